"""The output of a response as it comes: its items, and the events of the stream that announce them.

    message          output_item.added, content_part.added, output_text.delta …, output_text.done, content_part.done,
                     output_item.done
    reasoning        the same, with reasoning_text
    function_call    output_item.added, function_call_arguments.delta …, function_call_arguments.done, output_item.done

One item is open at a time. Every method returns the events to send, as plain dicts with `type`; who does not stream
leaves them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxctx_server.http.openai.responses.items import message_item, new_id, output_text, reasoning_item

Json = dict[str, Any]


@dataclass(slots=True)
class OpenText:
    """A message or thoughts that are being written."""

    item_id: str
    kind: str  # "output_text" or "reasoning_text"
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)


@dataclass(slots=True)
class OpenCall:
    """A call of a function that is being written."""

    item_id: str
    call_id: str
    name: str
    namespace: str | None  # of the function
    fragments: list[str] = field(default_factory=list)


class OutputBuilder:
    """The items of one response."""

    def __init__(self, make_id: Callable[[str], str] = new_id) -> None:
        """`make_id` makes the id of each item, of the prefix of its kind."""
        self._make_id = make_id
        self.items: list[Json] = []  # those that are complete
        self._open: OpenText | OpenCall | None = None

    def text(self, text: str, logprobs: Sequence[Json] = ()) -> list[Json]:
        """More text of the answer."""
        return self._text("output_text", text, logprobs)

    def reasoning(self, text: str) -> list[Json]:
        """More thoughts."""
        return self._text("reasoning_text", text, ())

    def start_call(self, call_id: str, name: str, namespace: str | None = None) -> list[Json]:
        """A call of a function, of a namespace if it has one, begins."""
        events = self.close("completed")
        call = OpenCall(self._make_id("fc"), call_id, name, namespace)
        self._open = call
        item = function_call_item(call, "in_progress")
        return [*events, self._event("response.output_item.added", item=item)]

    def call_arguments(self, fragment: str) -> list[Json]:
        """More of the arguments of the call that has begun."""
        call = self._open
        if not isinstance(call, OpenCall):
            raise ValueError("no call has begun")
        call.fragments.append(fragment)
        kind = "response.function_call_arguments.delta"
        return [self._event(kind, item_id=call.item_id, delta=fragment)] if fragment else []

    def close(self, status: str) -> list[Json]:
        """End the item that is open, if there is one. `status`: "completed" or "incomplete"."""
        match self._open:
            case OpenText() as text:
                return self._close_text(text, status)
            case OpenCall() as call:
                return self._close_call(call, status)
        return []

    def finish(self, status: str) -> list[Json]:
        """End the output, which has at least one message or call: an empty text is an empty message."""
        events: list[Json] = []
        if self._open is None and not any(item["type"] != "reasoning" for item in self.items):
            events += self.start_text("output_text")
        elif isinstance(self._open, OpenText) and self._open.kind == "reasoning_text":
            events += self.close(status)
            events += self.start_text("output_text")
        return events + self.close(status)

    def _text(self, kind: str, text: str, logprobs: Sequence[Json]) -> list[Json]:
        events: list[Json] = []
        opened = self._open
        if not (isinstance(opened, OpenText) and opened.kind == kind):
            if not text and not logprobs:
                return []
            events = self.close("completed") + self.start_text(kind)
            opened = self._open
        assert isinstance(opened, OpenText)
        opened.texts.append(text)
        opened.logprobs += logprobs
        delta: Json = {"item_id": opened.item_id, "content_index": 0, "delta": text}
        if kind == "output_text":
            delta["logprobs"] = list(logprobs)
        return [*events, self._event(f"response.{kind}.delta", **delta)]

    def start_text(self, kind: str) -> list[Json]:
        """A message ("output_text") or thoughts ("reasoning_text") begin. No item is open."""
        opened = OpenText(self._make_id("msg" if kind == "output_text" else "rs"), kind)
        self._open = opened
        item = text_item(opened, "in_progress") | {"content": []}
        part = {"type": kind, "text": ""} if kind == "reasoning_text" else output_text("")
        return [
            self._event("response.output_item.added", item=item),
            self._event("response.content_part.added", item_id=opened.item_id, content_index=0, part=part),
        ]

    def _close_text(self, opened: OpenText, status: str) -> list[Json]:
        text, place = "".join(opened.texts), {"item_id": opened.item_id, "content_index": 0}
        item = text_item(opened, status)
        part = item["content"][0] if item["content"] else {"type": opened.kind, "text": ""}
        done: Json = {**place, "text": text}
        if opened.kind == "output_text":
            done["logprobs"] = opened.logprobs
        events = [
            self._event(f"response.{opened.kind}.done", **done),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", item=item),
        ]
        self._append(item)
        return events

    def _close_call(self, call: OpenCall, status: str) -> list[Json]:
        item = function_call_item(call, status)
        arguments: Json = {"item_id": call.item_id, "name": call.name, "arguments": item["arguments"]}
        events = [
            self._event("response.function_call_arguments.done", **arguments),
            self._event("response.output_item.done", item=item),
        ]
        self._append(item)
        return events

    def _append(self, item: Json) -> None:
        self.items.append(item)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "output_index": len(self.items), **fields}


def text_item(opened: OpenText, status: str) -> Json:
    """A message or thoughts as an item."""
    text = "".join(opened.texts)
    if opened.kind == "reasoning_text":
        return reasoning_item(text, opened.item_id, status)
    return message_item("assistant", [output_text(text, opened.logprobs)], opened.item_id, status)


def function_call_item(call: OpenCall, status: str) -> Json:
    """A call as an item."""
    return {
        "id": call.item_id,
        "type": "function_call",
        "status": status,
        "call_id": call.call_id,
        **({} if call.namespace is None else {"namespace": call.namespace}),
        "name": call.name,
        "arguments": "".join(call.fragments),
    }
