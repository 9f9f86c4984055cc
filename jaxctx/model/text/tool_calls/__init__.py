"""Calls of tools, and thoughts, in the text of outputs: formats of the supported families, parsers and grammars.

    formats.py       the formats in one table, and which of them a model has
    reasoning.py     the same for thoughts
    parser.py        streaming parsers: text in pieces to events
    events.py        what they give
    readers.py       what stands behind the mark that opens a call, by format
    element_reader.py  those whose arguments are elements; element_values.py: what their texts mean
    call_sink.py     calls as events, what is no call as text; nothing is lost
    json_scanner.py  JSON as it streams
    harmony.py       a parser of whole outputs in messages with channels; harmony_grammar.py: their grammars
    grammar.py       grammars that hold an output to calls; element_grammar.py: their rules for elements
    optional_properties.py  how many of them can be followed

Plain Python, without the model and without tokens: servers use it where they turn outputs into messages.
"""

from jaxctx.model.text.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolEvent,
)
from jaxctx.model.text.tool_calls.formats import TOOL_CALL_FORMATS, HarmonyFormat, ToolCallFormat, tool_call_format
from jaxctx.model.text.tool_calls.parser import OutputParser, ReasoningParser, ToolCallParser
from jaxctx.model.text.tool_calls.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format

__all__ = [
    "REASONING_FORMATS",
    "TOOL_CALL_FORMATS",
    "HarmonyFormat",
    "OutputEvent",
    "OutputParser",
    "ReasoningDelta",
    "ReasoningFormat",
    "ReasoningParser",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallFormat",
    "ToolCallParser",
    "ToolCallStart",
    "ToolEvent",
    "reasoning_format",
    "tool_call_format",
]
