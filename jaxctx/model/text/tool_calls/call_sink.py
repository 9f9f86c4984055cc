"""Where the readers of a format put what they read: calls as events, and text that turned out to be no call.

Nothing is lost: every character that a reader takes is either in an event or, until the call has begun or ended, kept
to be given back as text.
"""

from collections.abc import Collection, Mapping

from jaxctx.model.text.json_schemas import References, Schema
from jaxctx.model.text.tool_calls.element_values import SchemaTypes
from jaxctx.model.text.tool_calls.events import TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart, ToolEvent


class CallSink:
    """The events of one output: readers put in calls, the parser text."""

    def __init__(
        self, tool_names: Collection[str] | None, *, whole_calls: bool, schemas: Mapping[str, Schema] | None = None
    ) -> None:
        """`tool_names`: a call of another tool is none; None: any name is taken. `whole_calls`: a call becomes events
        once all of it is there, so that one that breaks off is text. `schemas`: of arguments, by the names of tools.
        """
        self._tool_names = tool_names
        self._schemas = schemas or {}
        self._types: dict[str, SchemaTypes] = {}  # of schemas that calls had, by the names of tools
        self._whole_calls = whole_calls
        self._events: list[ToolEvent] = []
        self._calls = 0  # that have begun
        self._name: str | None = None  # of the call that is read
        self._arguments: list[str] = []  # not yet in events
        self._begun = False  # the call that is read has its ToolCallStart
        self._raw: list[str] = []  # what is in no event
        self._ended = False  # a call has ended, and no other one was begun
        self._space: list[str] = []  # at the start or behind a call: dropped before a call
        self._holds_space = True

    def accepts(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return self._tool_names is None or name in self._tool_names

    def argument_types(self, name: str, key: str) -> set[str] | None:
        """The types of JSON that an argument of a tool may have; None: not known, or any."""
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        if not isinstance(properties, dict) or key not in properties:
            return None
        if name not in self._types:
            self._types[name] = SchemaTypes(References(schema))
        return self._types[name].allowed(properties[key])

    # --- Called by readers

    def structure(self, text: str) -> None:
        """Text of the format that is no argument."""
        if text:
            self._raw.append(text)

    def name(self, name: str) -> None:
        """The name of the call that is read."""
        self._name = name
        self._advance()

    def arguments(self, fragment: str) -> None:
        """A piece of its arguments."""
        if fragment:
            self._arguments.append(fragment)
            if not self._begun:
                self._raw.append(fragment)
            self._advance()

    def end_call(self) -> None:
        """The call is complete; it has a name."""
        if not self._begun:
            self._begin()
            self._emit_arguments("".join(self._arguments) or "{}")
        self._close(is_complete=True)
        self._raw, self._ended = [], True

    def end_list(self) -> None:
        """A list of calls is complete: what ends it is no text, whatever follows."""
        self._raw = []

    # --- Called by the parser

    def text(self, text: str) -> None:
        """Text outside of calls."""
        if not text:
            return
        if self._holds_space and text.isspace():
            self._space.append(text)
            return
        text = "".join([*self._space, text])
        self._space, self._holds_space = [], False
        if self._events and isinstance(self._events[-1], TextDelta):
            text = self._events.pop().text + text  # type: ignore[union-attr]
        self._events.append(TextDelta(text))

    def open_call(self) -> None:
        """The object of a call begins."""
        self._ended = False

    def fail(self) -> str:
        """What is read is no call: give back as text what is in no event.

        Returns what stood behind a complete call, which is not yet text: it may be a part of something else.
        """
        if self._begun:
            self._close(is_complete=False)
        raw, self._raw = "".join(self._raw), []
        self._name, self._arguments = None, []
        was_ended, self._ended = self._ended, False
        if was_ended and not raw.isspace():
            return raw
        self.text(raw)
        return ""

    def break_off(self) -> None:
        """The output ends within the format. Behind a call that is complete, the rest of the format is dropped."""
        if self._ended:
            self.discard()
        else:
            self.fail()

    def discard(self) -> None:
        """Drop the text of the format around calls."""
        self._raw, self._ended = [], False

    def finish(self) -> None:
        """The output ends: space without a call is text."""
        if self._calls == 0 and self._space:
            self._events.append(TextDelta("".join(self._space)))
        self._space = []

    def drain(self) -> list[ToolEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        if self._whole_calls or self._name is None or not self._arguments:
            return
        if not self._begun:
            self._begin()
        self._emit_arguments("".join(self._arguments))

    def _begin(self) -> None:
        self._events.append(ToolCallStart(self._calls, str(self._name)))
        self._calls += 1
        self._begun, self._raw, self._space, self._holds_space = True, [], [], True

    def _emit_arguments(self, fragment: str) -> None:
        self._events.append(ToolCallArguments(self._calls - 1, fragment))
        self._arguments = []

    def _close(self, *, is_complete: bool) -> None:
        self._events.append(ToolCallEnd(self._calls - 1, is_complete))
        self._name, self._arguments, self._begun = None, [], False
