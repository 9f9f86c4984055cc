"""Calls whose arguments are elements: a name and a text for each, without quotes.

    <function=f>
    <parameter=city>
    Bonn
    </parameter>
    </function>

A value ends at the first </parameter>, as in the parsers of the model's makers, of vLLM and of SGLang; but within a
string of JSON, where the schema allows no text, that mark is a part of the value. One newline before it is none, nor is
one at the start. `element_grammar` holds outputs to the same.
"""

import json

from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.element_values import argument_text
from jaxctx.model.text.tool_calls.json_scanner import JsonScanner, Malformed
from jaxctx.model.text.tool_calls.marks import partial_length

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_VALUE, END_OF_CALL = "</parameter>", "</function>"
MAX_NAME = 256  # characters, of the function and of an argument
BLANKS = " \t\r\n"
CONTROLS = frozenset(map(chr, range(32)))  # no string of JSON has one


class ElementReader:
    """Reads one call up to </function>. It becomes events once all of it is there."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "function"
        self._written = ""  # of a mark or a name
        self._name = self._key = ""
        self._arguments: dict[str, str] = {}  # as JSON
        self._types: dict[str, set[str] | None] = {}  # of the values, by the names of arguments
        self._value: list[str] = []
        self._held = ""  # behind it: may begin END_OF_VALUE, or is it but for what follows
        self._json: JsonScanner | None = None  # of the value, if it is no text and as long as it is JSON

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._state == "value":
                at = self._read_value(text, at)
                continue
            letter = text[at]
            if self._state in ("name", "key"):
                self._read_name(letter, at)
            elif self._written or letter not in BLANKS:
                self._read_mark(letter, at)
            if not self.done:
                self._sink.structure(letter)
            at += 1
        return at

    def _read_mark(self, letter: str, at: int) -> None:
        """A character of what stands before a name, or ends the call."""
        marks = (FUNCTION,) if self._state == "function" else (PARAMETER, END_OF_CALL)
        written = self._written + letter
        if not any(mark.startswith(written) for mark in marks):
            raise Malformed(at)
        self._written = written
        if written not in marks:
            return
        self._written = ""
        if written == END_OF_CALL:
            self._end_call()
        elif written == FUNCTION:
            self._sink.open_call()
            self._state = "name"
        else:
            self._state = "key"

    def _read_name(self, letter: str, at: int) -> None:
        if letter != ">":
            if letter in "<\n" or len(self._written) == MAX_NAME:
                raise Malformed(at)
            self._written += letter
            return
        written, self._written = self._written, ""
        if not written or (self._state == "name" and not self._sink.accepts(written)):
            raise Malformed(at)
        if self._state == "name":
            self._name, self._state = written, "between"
        else:
            self._begin_value(written)

    def _begin_value(self, key: str) -> None:
        if key not in self._types:
            self._types[key] = self._sink.argument_types(self._name, key)
        types = self._types[key]
        self._key, self._state = key, "value"
        self._value, self._held = [], ""
        self._json = JsonScanner() if types is not None and "string" not in types else None

    def _read_value(self, text: str, at: int) -> int:
        """A part of a value. Returns the position behind it, and behind its end."""
        window, start = self._held + text[at:], at - len(self._held)
        self._held = ""
        used = 0
        while True:
            found = window.find(END_OF_VALUE, used)
            if found < 0:
                certain = len(window) - partial_length(window[used:], END_OF_VALUE)
                self._take(window[used:certain])
                break
            self._take(window[used:found])
            behind = found + len(END_OF_VALUE)
            if self._json is None or not self._json.is_in_string or window[behind : behind + 1] in CONTROLS:
                self._sink.structure(text[at : start + behind])
                self._end_value()
                return start + behind
            if behind == len(window):  # a newline, which ends a value that is no JSON after all, may follow
                certain = found
                break
            self._take(window[found:behind])
            used = behind
        self._held = window[certain:]
        self._sink.structure(text[at:])
        return len(text)

    def _take(self, text: str) -> None:
        self._value.append(text)
        if self._json is not None:
            try:
                self._json.feed(text, 0)
            except Malformed:
                self._json = None

    def _end_value(self) -> None:
        value = "".join(self._value).removeprefix("\n").removesuffix("\n")
        self._arguments[self._key] = argument_text(value, self._types[self._key])
        self._state = "between"

    def _end_call(self) -> None:
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self._arguments.items())
        self._sink.structure(">")
        self._sink.name(self._name)
        self._sink.arguments("{" + ", ".join(members) + "}")
        self._sink.end_call()
        self.done = True
