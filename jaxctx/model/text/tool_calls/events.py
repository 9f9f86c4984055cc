"""Events: what the text of an output says, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow, and then its end; events of two calls do not mix."""

    index: int  # of the output's calls, from 0
    name: str  # of the tool


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments. The pieces together are a JSON object, as the model wrote it."""

    index: int
    json_fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call ends."""

    index: int
    is_complete: bool = True  # else the output ended, or was no longer JSON, within the arguments


ToolEvent = TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
OutputEvent = ToolEvent | ReasoningDelta
