"""Readers of calls: what stands behind the mark that opens one, in each of the formats.

A reader takes text as it streams and reports it to a `CallSink`. It raises Malformed at the first character that cannot
be part of a call; whatever it has taken until then is the sink's.
"""

import json
from collections.abc import Callable
from typing import Protocol

from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.json_scanner import BLANK, JsonScanner, Malformed
from jaxctx.model.text.tool_calls.keyword_arguments import keyword_arguments

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # which some models write too
MAX_NAME = 256  # characters, also of a key
MISTRAL_MARKS = ("[ARGS]", "[CALL_ID]")  # between a name and its arguments
NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-:/")

QUOTES = "'\""
CLOSED_BY = {"'": "'", '"': '"', "(": ")", "[": "]", "{": "}"}


class Reader(Protocol):
    """Reads what follows an opening mark."""

    done: bool  # nothing more belongs to it

    def feed(self, text: str, at: int) -> int:
        """Take text from `at` on. Returns the position behind what belongs to it. Raises Malformed."""


class ObjectReader:
    """Reads a call that is an object: {"name": "f", "arguments": {...}}. Its keys may have any order."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "open"
        self._key = ""
        self._has_name = self._has_arguments = False
        self._scanner = JsonScanner()
        self._captured = ""  # a key, or the name, as JSON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            match self._state:
                case "key" | "name":
                    at = self._short_string(text, at)
                case "arguments":
                    at = self._scan(text, at)
                case "other":
                    at = self._scan(text, at)
                case _:
                    at = self._structure(text, at)
        return at

    def _structure(self, text: str, at: int) -> int:
        """A character between the parts of the object."""
        start, at = at, skip_blank(text, at)
        if at == len(text):
            self._sink.structure(text[start:])
            return at
        self._sink.structure(text[start:at])
        letter, state = text[at], self._state
        if state == "value":
            self._begin_value(letter, at)
            return at
        if letter == '"' and state in ("key_or_end", "next_key"):
            self._begin_scan("key")
            return at
        if letter == "{" and state == "open":
            self._sink.open_call()
            self._state = "key_or_end"
        elif letter == ":" and state == "colon":
            self._state = "value"
        elif letter == "," and state == "after":
            self._state = "next_key"
        elif letter == "}" and state == "after" and self._has_name:
            self._sink.end_call()
            self.done = True
            return at + 1
        else:
            raise Malformed(at)
        self._sink.structure(letter)
        return at + 1

    def _begin_value(self, letter: str, at: int) -> None:
        if self._key == NAME_KEY and letter == '"' and not self._has_name:
            self._begin_scan("name")
        elif self._key in ARGUMENT_KEYS and letter == "{" and not self._has_arguments:
            self._has_arguments = True
            self._begin_scan("arguments")
        elif self._key in OTHER_KEYS:
            self._begin_scan("other")
        else:
            raise Malformed(at)

    def _begin_scan(self, state: str) -> None:
        self._state, self._scanner, self._captured = state, JsonScanner(), ""

    def _scan(self, text: str, start: int) -> int:
        """The arguments, or a value that nothing is made of."""
        take = self._sink.arguments if self._state == "arguments" else self._sink.structure
        try:
            at = self._scanner.feed(text, start)
        except Malformed as error:
            take(text[start : error.position])
            raise
        take(text[start:at])
        if self._scanner.done:
            self._state = "after"
        return at

    def _short_string(self, text: str, start: int) -> int:
        """A key, or the name."""
        try:
            at = self._scanner.feed(text, start)
        except Malformed as error:
            self._sink.structure(text[start : error.position])
            raise
        self._captured += text[start:at]
        self._sink.structure(text[start:at])
        if len(self._captured) > MAX_NAME:
            raise Malformed(at)
        if self._scanner.done:
            self._end_string(str(json.loads(self._captured)), at)
        return at

    def _end_string(self, value: str, at: int) -> None:
        if self._state == "key":
            if value not in (NAME_KEY, *ARGUMENT_KEYS, *OTHER_KEYS):
                raise Malformed(at)
            self._key, self._state = value, "colon"
            return
        if not value or not self._sink.accepts(value):
            raise Malformed(at)
        self._has_name, self._state = True, "after"
        self._sink.name(value)


class ClosedReader:
    """Calls, and the mark that closes them, which may be missing."""

    def __init__(self, sink: CallSink, calls: Reader, closing: str) -> None:
        self.done = False
        self._sink = sink
        self._calls = calls
        self._closing = closing
        self._matched = 0  # characters of it

    def feed(self, text: str, at: int) -> int:
        if not self._calls.done:
            at = self._calls.feed(text, at)
        while at < len(text) and self._calls.done and not self.done:
            if self._matched == 0 and (end := skip_blank(text, at)) > at:
                self._sink.structure(text[at:end])
                at = end
                continue
            if text[at] != self._closing[self._matched]:
                raise Malformed(at)
            self._sink.structure(text[at])
            self._matched += 1
            self.done = self._matched == len(self._closing)
            at += 1
        return at


class LlamaReader:
    """Objects with ";" between them."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._object = ObjectReader(sink)
        self._had_separator = False

    def feed(self, text: str, at: int) -> int:
        while at < len(text):
            if not self._object.done:
                at = self._object.feed(text, at)
                continue
            start, at = at, skip_blank(text, at)
            self._sink.structure(text[start:at])
            if at == len(text):
                break
            if text[at] == ";" and not self._had_separator:
                self._sink.structure(";")
                self._had_separator = True
                at += 1
            elif text[at] == "{" and self._had_separator:
                self._object, self._had_separator = ObjectReader(self._sink), False
            else:
                raise Malformed(at)
        return at


class ChosenReader:
    """The reader that `choose` gives for the first character that is not blank; None: no call begins with it."""

    def __init__(self, sink: CallSink, choose: Callable[[str], Reader | None]) -> None:
        self.done = False
        self._sink = sink
        self._choose = choose
        self._reader: Reader | None = None

    def feed(self, text: str, at: int) -> int:
        if self._reader is None:
            start, at = at, skip_blank(text, at)
            self._sink.structure(text[start:at])
            if at == len(text):
                return at
            self._reader = self._choose(text[at])
            if self._reader is None:
                raise Malformed(at)
        at = self._reader.feed(text, at)
        self.done = self._reader.done
        return at


def objects_reader(sink: CallSink) -> Reader:
    """A reader of a list of objects, or of one object."""

    def choose(first: str) -> Reader | None:
        if first == "[":
            return ListReader(sink)
        return ObjectReader(sink) if first == "{" else None

    return ChosenReader(sink, choose)


def mistral_reader(sink: CallSink) -> Reader:
    """A reader of what stands behind [TOOL_CALLS]: a list of objects, one object, or a name, [ARGS] and the arguments.

    Between the name and [ARGS] there may be [CALL_ID] and an id; [ARGS] may be missing.
    """
    return ChosenReader(sink, lambda first: NamedReader(sink) if first in NAME_LETTERS else objects_reader(sink))


class ListReader:
    """A list of at least one object."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "open"
        self._object = ObjectReader(sink)

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._state == "object":
                at = self._object.feed(text, at)
                if self._object.done:
                    self._state = "after"
                continue
            start, at = at, skip_blank(text, at)
            self._sink.structure(text[start:at])
            if at == len(text):
                break
            expected = {"open": "[", "after": ",]"}[self._state]
            if text[at] not in expected:
                raise Malformed(at)
            self._sink.structure(text[at])
            self.done = text[at] == "]"
            if self.done:
                self._sink.end_list()
            self._state, self._object = "object", ObjectReader(self._sink)
            at += 1
        return at


class NamedReader:
    """A name, [ARGS] and the arguments."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "name"
        self._name = ""
        self._mark = ""
        self._scanner = JsonScanner()

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._state == "arguments":
                at = self._scan(text, at)
            else:
                at = self._header(text, at)
        return at

    def _header(self, text: str, at: int) -> int:
        """A character of the name, of a mark, of the id, or of the space around them."""
        letter, state = text[at], self._state
        if state == "mark":
            self._mark += letter
            if not any(mark.startswith(self._mark) for mark in MISTRAL_MARKS):
                raise Malformed(at)
            if self._mark in MISTRAL_MARKS:
                self._state = "before_arguments" if self._mark == "[ARGS]" else "id"
        elif letter == "{" and state in ("name", "after_name", "before_arguments"):
            if not self._sink.accepts(self._name):
                raise Malformed(at)
            self._sink.name(self._name)
            self._state = "arguments"
            return at
        elif letter == "[" and state in ("name", "after_name", "id"):
            self._state, self._mark = "mark", "["
        elif letter in NAME_LETTERS and state in ("name", "id"):
            self._name += letter if state == "name" else ""
            if len(self._name) > MAX_NAME:
                raise Malformed(at)
        elif letter in " \t\r\n":
            self._state = "after_name" if state == "name" else state
        else:
            raise Malformed(at)
        self._sink.structure(letter)
        return at + 1

    def _scan(self, text: str, start: int) -> int:
        at = scan_arguments(self._scanner, self._sink, text, start)
        self.done = self._scanner.done
        return at


def scan_arguments(scanner: JsonScanner, sink: CallSink, text: str, start: int) -> int:
    """Read arguments from `start` on, tell them, and the end of the call if they end. Returns where they do.

    Raises Malformed where they are no JSON; what was read before is told.
    """
    try:
        at = scanner.feed(text, start)
    except Malformed as error:
        sink.arguments(text[start : error.position])
        raise
    sink.arguments(text[start:at])
    if scanner.done:
        sink.end_call()
    return at


class ArgumentsReader:
    """The arguments of a call whose name is known."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._has_begun = False
        self._scanner = JsonScanner()

    def feed(self, text: str, at: int) -> int:
        if not self._has_begun:
            start, at = at, skip_blank(text, at)
            self._sink.structure(text[start:at])
            if at == len(text):
                return at
            if text[at] != "{":
                raise Malformed(at)
            self._has_begun = True
        at = scan_arguments(self._scanner, self._sink, text, at)
        self.done = self._scanner.done
        return at


class PythonReader:
    """Behind <function_calls>: calls as Python writes them, on a line each, up to </function_calls>.

    A call becomes events once all of it is there.
    """

    CLOSING = "</function_calls>"

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "name_or_end"
        self._name = ""
        self._arguments: list[str] = []
        self._open: list[str] = []  # brackets and quotes that are not closed, that of the call left out
        self._is_escaped = False
        self._matched = 0  # characters of CLOSING
        self._had_call = False

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            letter = text[at]
            match self._state:
                case "arguments":
                    at = self._read_arguments(text, at)
                    continue
                case "closing":
                    self._match_closing(letter, at)
                case "name":
                    self._read_name(letter, at)
                case _:
                    self._read_between(letter, at)
            self._sink.structure(letter)
            at += 1
        return at

    def _match_closing(self, letter: str, at: int) -> None:
        if letter != self.CLOSING[self._matched]:
            raise Malformed(at)
        self._matched += 1
        self.done = self._matched == len(self.CLOSING)

    def _read_between(self, letter: str, at: int) -> None:
        """A character before, between or behind calls."""
        if letter == "<" and self._had_call:
            self._state, self._matched = "closing", 1
        elif letter in NAME_LETTERS and self._state == "name_or_end":
            self._state, self._name = "name", letter
        elif letter == "," and self._state == "after":
            self._state = "name_or_end"
        elif letter not in " \t\r\n":
            raise Malformed(at)
        elif letter == "\n":
            self._state = "name_or_end"

    def _read_name(self, letter: str, at: int) -> None:
        if letter == "(":
            if not self._sink.accepts(self._name):
                raise Malformed(at)
            self._sink.open_call()
            self._state, self._arguments, self._open = "arguments", [], []
        elif letter in NAME_LETTERS and len(self._name) < MAX_NAME:
            self._name += letter
        else:
            raise Malformed(at)

    def _read_arguments(self, text: str, start: int) -> int:
        """Up to the parenthesis that ends the call."""
        for at in range(start, len(text)):
            letter, innermost = text[at], self._open[-1] if self._open else ")"
            if self._is_escaped:
                self._is_escaped = False
            elif innermost in QUOTES and letter == "\\":
                self._is_escaped = True
            elif letter == innermost:
                if not self._open:
                    return self._end(text, start, at)
                self._open.pop()
            elif innermost in QUOTES:
                continue
            elif letter in CLOSED_BY:
                self._open.append(CLOSED_BY[letter])
            elif letter in ")]}":
                self._take(text[start:at])
                raise Malformed(at)
        self._take(text[start:])
        return len(text)

    def _take(self, text: str) -> None:
        self._arguments.append(text)
        self._sink.structure(text)

    def _end(self, text: str, start: int, at: int) -> int:
        self._take(text[start:at])
        try:
            arguments = keyword_arguments("".join(self._arguments))
        except Malformed:
            raise Malformed(at) from None
        self._sink.structure(")")
        self._sink.name(self._name)
        self._sink.arguments(arguments)
        self._sink.end_call()
        self._state, self._had_call = "after", True
        return at + 1


def skip_blank(text: str, at: int) -> int:
    """The position behind the space at a position."""
    found = BLANK.match(text, at)
    return at if found is None else found.end()
