"""Outputs in messages, each with a channel of its own, as gpt-oss writes them ("harmony"): a parser of whole outputs.

    <|channel|>analysis<|message|>…<|end|>                                             thoughts
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                         text, before a call
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>       a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                           text

The prompt ends with the first `<|start|>assistant`. A recipient may also stand before the channel. A model ends with
<|return|> or <|call|>, which a server leaves out of the text.

    header ─▶ thoughts │ text │ call ─▶ behind_call ─▶ text
      ▲                    │
      └────────────────────┘

A message ends with one of three marks, and only where another one or nothing follows: else the mark is a part of it.
A message whose header is none, or that goes to nobody who is known, is text with its header.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.events import OutputEvent, ReasoningDelta
from jaxctx.model.text.tool_calls.json_scanner import SPACES, Malformed
from jaxctx.model.text.tool_calls.marks import partial_length
from jaxctx.model.text.tool_calls.readers import Reader

START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = (
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ENDS = (END, RETURN, CALL)  # of a message
ANSWERS = f"{START}assistant"  # begins a message, but for the first one
BEGINNINGS = (ANSWERS, CHANNEL)  # a model sometimes forgets the first of them
THOUGHTS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
FUNCTIONS = "functions."  # before the name of a tool, in a recipient
STATES = {"analysis": "thoughts", "commentary": "text", "final": "text"}  # of the parser, by channels
MAX_HEADER = 1024  # characters
# Nothing here is taken back once it matched: a header that is none would take time with the cube of its length.
RECIPIENT = r"to=([^\s<]++)"
BEFORE_CHANNEL = re.compile(rf" *+(?:{RECIPIENT} *+)?")
BEFORE_CHANNEL_BEGUN = re.compile(r" *(?:t|to|to=[^\s<]* *)?")
RECIPIENT_BEGUN = re.compile(r" to=[^\s<]* *")  # what a header has begun with, if nothing else follows
BEHIND_CHANNEL = re.compile(rf" *+([a-z]++) *+(?:{RECIPIENT} *+)?(?:{re.escape(CONSTRAIN)})? *+[^\s<]*+ *+")
BEHIND_CHANNEL_BEGUN = re.compile(rf"[^<\n]*(?:{re.escape(CONSTRAIN)}[^<\n]*)?")
ANY_END = re.compile("|".join(map(re.escape, ENDS)))


def writes_channels(chat_template_source: str) -> bool:
    """Whether a chat template writes messages of this kind."""
    return CHANNEL in chat_template_source and ANSWERS in chat_template_source


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the text of a message."""

    size: int  # characters
    channel: str
    recipient: str | None


class NoHeader(ValueError):
    """What a text begins with is no header of a message."""


class HarmonyParser:
    """Finds thoughts, text and calls of one output."""

    def __init__(
        self,
        make_reader: Callable[[CallSink], Reader],
        *,
        tool_names: Collection[str] | None = None,
        whole_calls: bool = False,
        schemas: Mapping[str, Schema] | None = None,
        in_answer: bool = False,
    ) -> None:
        """`make_reader`: of a call's arguments. `tool_names`, `whole_calls`, `schemas`: see `ToolCallFormat.parser`.

        `in_answer`: the output goes on with a text, whose header is in the prompt.
        """
        self._make_reader = make_reader
        self._sink = CallSink(tool_names, whole_calls=whole_calls, schemas=schemas)
        self._reader = make_reader(self._sink)
        self._events: list[OutputEvent] = []
        self._state = "text" if in_answer else "header"
        self._held = ""  # a header, or what may be an end
        self._has_arguments = False  # of the call that is read
        self._said: set[str] = set()  # states whose messages had something
        self._is_new = False  # nothing of the message was said, and another one of its state was

    def feed(self, text: str) -> list[OutputEvent]:
        """Take text, and return what has become certain."""
        text, self._held = self._held + text, ""
        while text:
            match self._state:
                case "header":
                    text = self._header(text)
                case "call":
                    text = self._call(text)
                case "behind_call":
                    text = text.lstrip(SPACES)
                    if text:
                        self._begin("text")
                case _:
                    text = self._body(text)
        return self._drain()

    def finish(self) -> list[OutputEvent]:
        """The output ends. Marks that nothing follows are no text; a call without arguments has none."""
        held, self._held = self._held, ""
        if self._state == "call":
            self._finish_call(held)
        elif self._state == "header":
            is_header = any(mark in held for mark in MARKS) or RECIPIENT_BEGUN.fullmatch(held) is not None
            self._say("" if is_header else held)
        else:
            end = ANY_END.match(held)
            behind = "" if end is None else held[end.end() :]
            is_end = end is not None and (not behind or START in behind)
            self._say("" if is_end else held)
        self._events += self._sink.drain()
        self._sink.finish()
        return self._drain()

    def _finish_call(self, held: str) -> None:
        """The output ends within a call, with what may be its end."""
        if self._has_arguments or (held.strip() and ANY_END.fullmatch(held.strip()) is None):
            self._sink.fail()
            self._sink.text(held)
        else:
            self._sink.end_call()

    def _header(self, text: str) -> str:
        """The header of a message. Returns what is still to be read."""
        begun = len(ANSWERS) if text.startswith(ANSWERS) else 0  # which is no part of what a message says
        try:
            header = read_header(text)
        except NoHeader:
            self._begin("text")
            return text[begun:]
        if header is None:
            self._held = text
            return ""
        if header.recipient is None:
            if header.channel in STATES:
                self._begin(STATES[header.channel])
                return text[header.size :]
        elif header.recipient.startswith(FUNCTIONS):
            name = header.recipient.removeprefix(FUNCTIONS)
            if name and self._sink.accepts(name):
                self._begin_call(name, text[begun : header.size])
                return text[header.size :]
        self._begin("text")
        return text[begun:]

    def _begin(self, state: str) -> None:
        self._state, self._is_new = state, state in self._said

    def _begin_call(self, name: str, header: str) -> None:
        self._state, self._reader, self._has_arguments = "call", self._make_reader(self._sink), False
        self._sink.open_call()
        self._sink.structure(header)
        self._sink.name(name)

    def _call(self, text: str) -> str:
        """The arguments of a call. Returns what is still to be read."""
        if not self._has_arguments:
            rest = text.lstrip(SPACES)
            if not rest or any(mark.startswith(rest) for mark in ENDS):
                self._held = text
                return ""
            if ANY_END.match(rest) is not None:
                self._sink.end_call()
                self._sink.discard()
                self._state = "behind_call"
                return rest
            self._has_arguments = True
        try:
            at = self._reader.feed(text, 0)
        except Malformed as error:
            self._sink.fail()
            self._said.add("text")
            self._state, self._is_new = "text", False
            return text[error.position :]
        if self._reader.done:
            self._sink.discard()
            self._state = "behind_call"
        return text[at:]

    def _body(self, text: str) -> str:
        """Thoughts or text up to the end of the message. Returns what is still to be read."""
        at = 0
        while (end := ANY_END.search(text, at)) is not None:
            if text.startswith(BEGINNINGS, end.end()):
                self._say(text[: end.start()])
                self._state = "header"
                return text[end.end() :]
            if len(text) - end.end() < len(ANSWERS) and begins_message(text[end.end() :]):
                self._say(text[: end.start()])
                self._held = text[end.start() :]
                return ""
            at = end.end()
        certain = max(at, len(text) - max(partial_length(text, mark) for mark in ENDS))
        self._say(text[:certain])
        self._held = text[certain:]
        return ""

    def _say(self, text: str) -> None:
        """Thoughts or text, on a line of its own where a message of the same kind was before."""
        if not text:
            return
        state = "thoughts" if self._state == "thoughts" else "text"
        if self._is_new:
            text = "\n" + text
        self._is_new = False
        self._said.add(state)
        if state == "text":
            self._sink.text(text)
            return
        self._events += self._sink.drain()
        self._events.append(ReasoningDelta(text))

    def _drain(self) -> list[OutputEvent]:
        events, self._events = self._events + self._sink.drain(), []
        return events


def begins_message(text: str) -> bool:
    """Whether a text is the beginning of what begins a message."""
    return any(mark.startswith(text) for mark in BEGINNINGS)


def read_header(text: str) -> Header | None:
    """The header that a text begins with; None if it is not whole. Raises NoHeader."""
    if text != ANSWERS and ANSWERS.startswith(text):
        return None
    begun = len(ANSWERS) if text.startswith(ANSWERS) else 0
    channel = text.find(CHANNEL, begun)
    before = text[begun : len(text) if channel < 0 else channel]
    if channel < 0:
        certain = before[: len(before) - partial_length(before, CHANNEL)]
        _check_begun(text, BEFORE_CHANNEL_BEGUN.fullmatch(certain))
        return None
    if (first := BEFORE_CHANNEL.fullmatch(before)) is None:
        raise NoHeader
    named = channel + len(CHANNEL)
    message = text.find(MESSAGE, named)
    if message < 0:
        behind = text[named:]
        certain = behind[: len(behind) - max(partial_length(behind, mark) for mark in (MESSAGE, CONSTRAIN))]
        _check_begun(text, BEHIND_CHANNEL_BEGUN.fullmatch(certain))
        return None
    size = message + len(MESSAGE)
    second = None if size > MAX_HEADER else BEHIND_CHANNEL.fullmatch(text, named, message)
    if second is None:
        raise NoHeader
    return Header(size, second[1], first[1] or second[2])


def _check_begun(text: str, begun: re.Match[str] | None) -> None:
    """Raise NoHeader if a text does not begin one."""
    if begun is None or len(text) > MAX_HEADER:
        raise NoHeader
