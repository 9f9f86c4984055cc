"""Events of an output's parsers, put together as a client does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxctx.model.text.tool_calls import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass
class Read:
    """What a reader of events has."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments
    broken: list[int] = field(default_factory=list)  # calls that ended without being complete
    order: str = ""  # t: text, c: a call, r: thoughts behind one of these


def read(events: list[OutputEvent]) -> Read:
    """Put events together; they must be in order."""
    found, is_open = Read(), False
    for event in events:
        match event:
            case TextDelta(text):
                assert text
                assert not is_open
                found.text += text
                found.order += "" if found.order.endswith("t") else "t"
            case ReasoningDelta(text):
                assert text
                assert not is_open
                found.thoughts += text
                found.order += "r" if found.order and not found.order.endswith("r") else ""
            case ToolCallStart(index, name):
                assert not is_open
                assert index == len(found.calls)
                found.calls.append((name, ""))
                found.order += "c"
                is_open = True
            case ToolCallArguments(index, fragment):
                assert fragment
                assert is_open
                assert index == len(found.calls) - 1
                found.calls[-1] = (found.calls[-1][0], found.calls[-1][1] + fragment)
            case ToolCallEnd(index, is_complete):
                assert is_open
                assert index == len(found.calls) - 1
                found.broken += [] if is_complete else [index]
                is_open = False
    assert not is_open
    return found


def parse(parser: Any, pieces: list[str]) -> Read:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return read(events + parser.finish())
