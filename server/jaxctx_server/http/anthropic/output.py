"""The content blocks of an answer, and the events of the stream that announce them.

    content_block_start ──▶ content_block_delta … ──▶ content_block_stop

One block is open at a time. Every method returns the events to send, as plain dicts with `type`; who does not stream
leaves them.
"""

import json
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


@dataclass(slots=True)
class OpenBlock:
    """A block that is being written."""

    kind: str  # "text", "thinking" or "tool_use"
    pieces: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""


class ContentBuilder:
    """The content of one answer."""

    def __init__(self) -> None:
        self.blocks: list[Json] = []  # those that are complete
        self._open: OpenBlock | None = None

    def text(self, text: str) -> list[Json]:
        """More text of the answer."""
        return self._piece("text", text)

    def thinking(self, text: str) -> list[Json]:
        """More thoughts."""
        return self._piece("thinking", text)

    def start_call(self, call_id: str, name: str) -> list[Json]:
        """A call of a tool begins."""
        events = self.close()
        self._open = OpenBlock("tool_use", call_id=call_id, name=name)
        start = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return [*events, self._event("content_block_start", content_block=start)]

    def call_arguments(self, fragment: str) -> list[Json]:
        """More of the arguments of the call that has begun."""
        if self._open is None or self._open.kind != "tool_use":
            raise ValueError("no call has begun")
        self._open.pieces.append(fragment)
        delta = {"type": "input_json_delta", "partial_json": fragment}
        return [self._event("content_block_delta", delta=delta)]

    def close(self) -> list[Json]:
        """End the block that is open, if there is one."""
        opened = self._open
        if opened is None:
            return []
        event = self._event("content_block_stop")
        self.blocks.append(finished_block(opened))
        self._open = None
        return [event]

    def _piece(self, kind: str, text: str) -> list[Json]:
        if not text:
            return []
        events: list[Json] = []
        if self._open is None or self._open.kind != kind:
            events = self.close()
            self._open = OpenBlock(kind)
            start = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events.append(self._event("content_block_start", content_block=start))
        self._open.pieces.append(text)
        delta_type, name = DELTAS[kind]
        return [*events, self._event("content_block_delta", delta={"type": delta_type, name: text})]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": len(self.blocks), **fields}


def finished_block(opened: OpenBlock) -> Json:
    """A block that is complete. Arguments that break off are as if there were none: the API has objects only."""
    text = "".join(opened.pieces)
    if opened.kind == "tool_use":
        return {"type": "tool_use", "id": opened.call_id, "name": opened.name, "input": arguments_of(text)}
    if opened.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def arguments_of(text: str) -> Json:
    """The arguments of a call; empty for what is no JSON object."""
    try:
        arguments = json.loads(text, parse_float=nearest_float)
    except (ValueError, RecursionError):  # the latter for very many lists inside each other
        return {}
    return arguments if isinstance(arguments, dict) else {}


def nearest_float(text: str) -> float:
    """The number of a text. One beyond all floats is the last of them: JSON, and so an answer, has no infinity."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def new_call_id() -> str:
    """The id of a call."""
    return f"toolu_{secrets.token_hex(12)}"
