"""Parsers of an output's text as it streams: thoughts, text, and calls of tools.

The events do not depend on how the text was cut into pieces, but for how many pieces a text or the arguments have.

    text ─▶ ReasoningParser ─▶ (text behind the thoughts) ─▶ ToolCallParser ─▶ events
    text ─▶ HarmonyParser ─▶ events
"""

from collections.abc import Callable, Collection, Mapping

from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.events import OutputEvent, ReasoningDelta, TextDelta, ToolEvent
from jaxctx.model.text.tool_calls.harmony import HarmonyParser
from jaxctx.model.text.tool_calls.json_scanner import Malformed
from jaxctx.model.text.tool_calls.marks import partial_length
from jaxctx.model.text.tool_calls.readers import Reader


class ToolCallParser:
    """Finds the calls of one output in one format."""

    def __init__(
        self,
        opening: str,
        make_reader: Callable[[CallSink], Reader],
        *,
        is_bare: bool = False,
        bare_opening: str = "",
        tool_names: Collection[str] | None = None,
        whole_calls: bool = False,
        schemas: Mapping[str, Schema] | None = None,
    ) -> None:
        """`opening`: the mark before calls; with `is_bare` an object at the start of the output is a call without it,
        with `bare_opening` what begins so anywhere.

        `tool_names`: a call of another tool is text; None: any name is taken. `whole_calls`: give a call only once all
        of it is there, and one that breaks off as text; else its arguments come as they are written. `schemas`: of
        arguments, by the names of tools.
        """
        self._opening = opening
        self._bare_opening = bare_opening
        self._make_reader = make_reader
        self._may_be_bare = is_bare
        self._sink = CallSink(tool_names, whole_calls=whole_calls, schemas=schemas)
        self._reader: Reader | None = None
        self._held = ""  # may begin the opening mark

    def feed(self, text: str) -> list[ToolEvent]:
        """Take text, and return what has become certain."""
        text, self._held = self._held + text, ""
        at = 0
        while at < len(text):
            if self._reader is None:
                at = self._search(text, at)
                continue
            at = self._read(self._reader, text, at)
            if self._held:  # behind a call, what began as its closing mark may begin the next opening mark
                text, at, self._held = self._held + text[at:], 0, ""
        return self._sink.drain()

    def finish(self) -> list[ToolEvent]:
        """The output ends. A call that is not whole is text, or ends without being complete if it has begun."""
        if self._reader is not None:
            self._sink.break_off()
        self._sink.text(self._held)
        self._reader, self._held = None, ""
        self._sink.finish()
        return self._sink.drain()

    def _search(self, text: str, at: int) -> int:
        """Look for the beginning of a call. Returns the position up to which the text is used."""
        if self._may_be_bare:
            rest = text[at:].lstrip()
            if rest.startswith("{"):
                start = len(text) - len(rest)
                self._sink.text(text[at:start])
                self._begin()
                return start
            self._may_be_bare = not rest
        found = text.find(self._opening, at)
        bare = text.find(self._bare_opening, at) if self._bare_opening else -1
        if bare >= 0 and not 0 <= found < bare:
            self._sink.text(text[at:bare])
            self._begin()
            return bare
        if found >= 0:
            self._sink.text(text[at:found])
            self._begin()
            self._sink.structure(self._opening)
            return found + len(self._opening)
        rest = text[at:]  # what is before is used: no mark begins there
        certain = len(text) - max(partial_length(rest, mark) for mark in (self._opening, self._bare_opening))
        self._sink.text(text[at:certain])
        self._held = text[certain:]
        return len(text)

    def _begin(self) -> None:
        self._reader, self._may_be_bare = self._make_reader(self._sink), False

    def _read(self, reader: Reader, text: str, at: int) -> int:
        try:
            at = reader.feed(text, at)
        except Malformed as error:
            self._held = self._sink.fail()
            self._reader = None
            return error.position
        if reader.done:
            self._sink.discard()
            self._reader = None
        return at


class ReasoningParser:
    """Finds the thoughts at the start of one output: between two marks, of which the first may be in the prompt.

    Space around the thoughts and before the answer is dropped.

    before ─▶ thoughts ─▶ before_text ─▶ text ◀──────────┐
                              │                          │
                              ▼                          │
                        before_marked ─▶ marked ─▶ behind_marked      where the answer stands between marks
    """

    def __init__(
        self, opening: str, closing: str, *, is_open: bool, answer_marks: tuple[str, str] | None = None
    ) -> None:
        """`is_open`: the prompt ends with the opening mark. `answer_marks`: around the answer behind thoughts."""
        self._opening, self._closing = opening, closing
        self._answer_marks = answer_marks
        self._state = "before_thoughts" if is_open else "before"
        self._is_open = is_open
        self._held = ""
        self._drops_space = True  # before the first thought

    def feed(self, text: str) -> list[ReasoningDelta | TextDelta]:
        """Take text, and return what has become certain."""
        events: list[ReasoningDelta | TextDelta] = []
        while text:
            match self._state:
                case "before" | "before_thoughts":
                    text = self._before(text, events)
                case "thoughts":
                    text = self._thoughts(text, events)
                case "before_text" | "before_marked":
                    text = self._before_text(text)
                case "marked":
                    text = self._marked(text, events)
                case "behind_marked":
                    text = text.lstrip()
                    self._state = "text" if text else "behind_marked"
                case _:
                    events.append(TextDelta(text))
                    text = ""
        return events

    def finish(self) -> list[ReasoningDelta | TextDelta]:
        """The output ends: what was held back was no mark."""
        held, self._held = self._held, ""
        if self._state in ("before", "before_text", "marked"):
            return [TextDelta(held)] if held else []
        if self._state in ("before_thoughts", "thoughts"):
            return [ReasoningDelta(held.rstrip())] if held.strip() else []
        return []

    def _before(self, text: str, events: list[ReasoningDelta | TextDelta]) -> str:
        """Look for the opening mark, with nothing but space before it. Returns what is still to be read."""
        text, self._held = self._held + text, ""
        rest = text.lstrip()
        if rest.startswith(self._opening):
            return self._enter_thoughts(rest[len(self._opening) :])
        if self._opening.startswith(rest):
            self._held = text
            return ""
        if self._is_open:
            return self._enter_thoughts(rest)
        self._state = "text"
        events.append(TextDelta(text))
        return ""

    def _enter_thoughts(self, text: str) -> str:
        self._state = "thoughts"
        return text

    def _thoughts(self, text: str, events: list[ReasoningDelta | TextDelta]) -> str:
        """Thoughts up to the closing mark. Returns what is still to be read."""
        text, self._held = self._held + text, ""
        found = text.find(self._closing)
        certain = found if found >= 0 else len(text) - partial_length(text, self._closing)
        thoughts = text[:certain].rstrip()
        if found >= 0:
            self._state, rest = "before_text", text[found + len(self._closing) :]
        else:
            self._held, rest = text[len(thoughts) :], ""
        if self._drops_space:
            thoughts = thoughts.lstrip()
        if thoughts:
            self._drops_space = False
            events.append(ReasoningDelta(thoughts))
        return rest

    def _before_text(self, text: str) -> str:
        """Space and the opening mark before the answer. Returns what is still to be read."""
        text, self._held = (self._held + text).lstrip(), ""
        mark = self._answer_marks[0] if self._answer_marks is not None else ""
        if self._state == "before_marked" or not mark:
            if text:
                self._state = "marked" if mark else "text"
            return text
        if text.startswith(mark):
            self._state = "before_marked"
            return text[len(mark) :]
        if mark.startswith(text):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _marked(self, text: str, events: list[ReasoningDelta | TextDelta]) -> str:
        """The answer up to its closing mark, without the space before that. Returns what is still to be read."""
        assert self._answer_marks is not None
        mark = self._answer_marks[1]
        text, self._held = self._held + text, ""
        found = text.find(mark)
        certain = found if found >= 0 else len(text) - partial_length(text, mark)
        answer = text[:certain].rstrip()
        if answer:
            events.append(TextDelta(answer))
        if found < 0:
            self._held = text[len(answer) :]
            return ""
        self._state = "behind_marked"
        return text[found + len(mark) :]


class OutputParser:
    """Thoughts, text and calls of one output; either parser may be missing. `HarmonyParser` finds thoughts too."""

    def __init__(self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | HarmonyParser | None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls

    def feed(self, text: str) -> list[OutputEvent]:
        """Take text, and return what has become certain."""
        if self._reasoning is None:
            return self._calls([TextDelta(text)] if text else [])
        return self._calls(self._reasoning.feed(text))

    def finish(self) -> list[OutputEvent]:
        """The output ends."""
        events: list[OutputEvent] = []
        if self._reasoning is not None:
            events += self._calls(self._reasoning.finish())
        if self._tool_calls is not None:
            events += self._tool_calls.finish()
        return events

    def _calls(self, deltas: list[ReasoningDelta | TextDelta] | list[TextDelta]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for delta in deltas:
            if isinstance(delta, TextDelta) and self._tool_calls is not None:
                events += self._tool_calls.feed(delta.text)
            else:
                events.append(delta)
        return events
