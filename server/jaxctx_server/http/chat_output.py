"""Calls of tools and thoughts in the outputs of a model, for every API that has messages.

How a model writes them is known from its description (`ModelService.GetModel`), also on a router. `ChatFormats.prepare`
asks the engine for outputs in which they can be found, and holds them to calls where the request demands a call;
`ChatFormats.parser` then turns the text of one output into events.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    HarmonyFormat,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    ReasoningFormat,
    TextDelta,
    ToolCallFormat,
)
from jaxctx.model.text.tool_calls.harmony import CHANNEL, FINAL
from jaxctx.model.text.tool_calls.harmony_grammar import choices_symbol, lark_symbol, regex_symbol
from jaxctx.model.text.tool_calls.symbols import json_symbol
from jaxctx.v1.context_service_pb2 import GenerateRequest
from jaxctx.v1.generation_pb2 import OutputFormat
from jaxctx.v1.model_service_pb2 import GetModelRequest, Model
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.tools import Tool

MAX_INLINE_TOOLS = 16 << 10  # characters of tools whose grammar is written on the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and what it says of calling them."""

    tools: Sequence[Tool] = ()  # that may be called
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""  # of the tool that must be called, with "named"
    parallel: bool = True  # whether an answer may have several calls

    @property
    def is_allowed(self) -> bool:
        """Whether an answer may have a call at all."""
        return bool(self.tools) and self.choice != "none"

    @property
    def size(self) -> int:
        """How large the tools are, in characters."""
        return sum(len(tool.text) for tool in self.tools)

    @property
    def is_quick(self) -> bool:
        """Whether a grammar of the tools is written at once. Schemas that refer to others may take long, as each
        argument is looked at with all that it refers to.
        """
        return self.size <= MAX_INLINE_TOOLS and not any('"$ref"' in tool.text for tool in self.tools)

    @property
    def demands_call(self) -> bool:
        """Whether an answer must be a call."""
        return bool(self.tools) and self.choice in ("required", "named")

    def allowed(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """What a part of an output says, without the calls after the first where only one may be."""
        return events if self.parallel else [event for event in events if not is_of_later_call(event)]


def is_of_later_call(event: OutputEvent) -> bool:
    """Whether an event belongs to another call than the first."""
    return not isinstance(event, TextDelta | ReasoningDelta) and event.index > 0


NO_TOOLS = ToolUse()


def check_names(tool_calls: ToolCallFormat, tools: Sequence[Tool]) -> None:
    """Raise InvalidArgument naming `tools` if a call of one of them would be lost, as its name cannot be read."""
    for tool in tools:
        if not tool_calls.can_name(tool.name):
            raise InvalidArgument.field(
                "tools", f"have a name that calls of this model cannot have: {tool.name[:80]!r}"
            )


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a model writes calls of tools, and its thoughts. None: not at all, or it is not known."""

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    special_markers: dict[str, int]
    looser_format: OutputFormat | None = None
    """That of outputs which the engine cannot hold to the schemas of tools that are not strict; see `prepare`."""

    async def prepare(self, generate: GenerateRequest, use: ToolUse, *, is_continuation: bool = False) -> "ChatFormats":
        """Change a request so that its outputs can be parsed, and are calls where they have to be. Returns the formats
        by which they are to be parsed.

        A format that the request asks for is that of a text, from its first character on, so there are no thoughts; if
        outputs have channels, it is that of the final one.
        Where calls are free, they may stand in place of a JSON text; where one is demanded, there is no text.
        A demanded call follows the schema of its tool. Should the engine refuse one of them, `looser_format` holds to
        those of strict tools only: no other schema refuses a request.
        Raises InvalidArgument naming `tools` if the model's format of calls is not known or cannot name one of them, or
        `tool_choice`: also where
        a call is demanded beside a format that is not JSON.
        """
        if use.is_allowed and self.tool_calls is None:
            raise InvalidArgument.field("tools", "are not supported for this model: its format of calls is not known")
        if use.is_allowed and self.tool_calls is not None:
            check_names(self.tool_calls, use.tools)
        if use.demands_call and generate.HasField("output_format"):
            if not is_json(generate.output_format):
                raise InvalidArgument.field("tool_choice", "must not demand a call of a text that is not JSON")
            generate.ClearField("output_format")
        has_format = generate.HasField("output_format")
        formats = replace(self, reasoning=None) if has_format and self.channels is None else self
        if use.is_allowed or formats.reasoning is not None:  # also where the request itself asks for them
            generate.include_special_tokens |= bool(self.special_markers)
        if formats.tool_calls is None or not use.is_allowed:
            formats._hold_final(generate, is_continuation)
            return formats
        schema = json_schema_of(generate.output_format) if has_format else None
        if has_format and schema is None:  # a text in which no call can stand
            formats._hold_final(generate, is_continuation)
            return formats
        if use.choice == "auto" and schema is None and not any(tool.is_strict for tool in use.tools):
            return formats
        if use.is_quick and len(generate.output_format.json_schema) <= MAX_INLINE_TOOLS:
            wanted, looser = formats._grammars(formats.tool_calls, use, schema, is_continuation)
        else:
            wanted, looser = await asyncio.to_thread(
                formats._grammars, formats.tool_calls, use, schema, is_continuation
            )
        generate.output_format.CopyFrom(OutputFormat(grammar=wanted))
        return formats if looser == wanted else replace(formats, looser_format=OutputFormat(grammar=looser))

    @property
    def channels(self) -> HarmonyFormat | None:
        """The format of calls, if it is that of whole outputs: thoughts and texts stand in channels too."""
        return self.tool_calls if isinstance(self.tool_calls, HarmonyFormat) else None

    @property
    def answer_header(self) -> str:
        """What stands between the opening of an answer and its text, if it has no thoughts."""
        return "" if self.channels is None else FINAL

    def _hold_final(self, generate: GenerateRequest, is_continuation: bool) -> None:
        """Make a format of texts that of the final channel, if outputs have any. An answer that goes on is in it."""
        if self.channels is None or is_continuation or not generate.HasField("output_format"):
            return
        symbol = symbol_of(generate.output_format)
        if symbol is not None:
            grammar = self.channels.text_grammar(symbol, self.special_markers)
            generate.output_format.CopyFrom(OutputFormat(grammar=grammar))

    def _grammars(
        self, tool_calls: ToolCallFormat, use: ToolUse, schema: Schema | None, is_continuation: bool
    ) -> tuple[str, str]:
        """The grammar that holds an output to calls of the tools, or to a text by the schema; and one in which only
        strict tools have their schemas.
        """
        write = tool_calls.grammar
        if isinstance(tool_calls, HarmonyFormat):
            write = partial(tool_calls.grammar, in_answer=is_continuation)
        wanted = self._grammar(write, use, schema, strict_only=False)
        return wanted, self._grammar(write, use, schema, strict_only=True)

    def _grammar(self, write: Callable[..., str], use: ToolUse, schema: Schema | None, *, strict_only: bool) -> str:
        """The grammar of outputs."""
        return write(
            [tool.chat_form for tool in use.tools],
            use.name if use.choice == "named" else use.choice,
            use.parallel and use.choice != "named",  # which asks for one call of that tool
            special_ids=self.special_markers,
            reasoning=self.reasoning,
            text_schema=schema,
            strict_only=strict_only,
        )

    def parser(self, use: ToolUse, *, is_continuation: bool = False) -> OutputParser:
        """A parser for the text of one output. `is_continuation`: the answer had begun before, its thoughts too."""
        if self.channels is not None:
            schemas = {tool.name: tool.parameters for tool in use.tools} if use.is_allowed else {}
            in_channels = self.channels.parser(tool_names=schemas.keys(), schemas=schemas, in_answer=is_continuation)
            return OutputParser(None, in_channels)
        reasoning = None if self.reasoning is None or is_continuation else self.reasoning.parser()
        tool_calls = None
        if self.tool_calls is not None and use.is_allowed:
            schemas = {tool.name: tool.parameters for tool in use.tools}
            tool_calls = self.tool_calls.parser(tool_names=schemas.keys(), schemas=schemas)
        return OutputParser(reasoning, tool_calls)

    def reads(self, use: ToolUse, *, is_continuation: bool) -> bool:
        """Whether an output may be something else than its text."""
        has_thoughts = self.reasoning is not None and not is_continuation
        return has_thoughts or use.is_allowed or self.channels is not None

    def new_call_id(self) -> str:
        """The id of a new call, in the form that the model's template takes."""
        if self.tool_calls is None:
            raise ValueError("the model writes no calls")
        return self.tool_calls.new_call_id()


def is_json(output_format: OutputFormat) -> bool:
    """Whether texts of a format are JSON, as `response_format` asks for it."""
    return output_format.WhichOneof("format") in ("json_object", "json_schema")


def json_schema_of(output_format: OutputFormat) -> Schema | None:
    """The schema of a format that is JSON. None if it is not, or its schema is no object."""
    if output_format.json_object:
        return {"type": "object"}
    try:
        schema = json.loads(output_format.json_schema or "null")
    except (ValueError, RecursionError):  # it is refused where it is compiled
        return None
    return schema if isinstance(schema, dict) else None


def symbol_of(output_format: OutputFormat) -> str | None:
    """The texts of a format as a symbol of a grammar. None for what is refused where it is compiled, and for a grammar
    that writes channels by itself.
    """
    match output_format.WhichOneof("format"):
        case "regex":
            return regex_symbol(output_format.regex)
        case "choices":
            return choices_symbol(output_format.choices.texts)
        case "grammar":
            return None if CHANNEL in output_format.grammar else lark_symbol(output_format.grammar)
    schema = json_schema_of(output_format)
    return None if schema is None else json_symbol(schema)


async def chat_formats(call: HttpCall, model_id: str) -> ChatFormats:
    """The formats of a model ("": the server's only one). Raises NotFound (MODEL_NOT_FOUND)."""
    found = await call.unary(call.services.models.get_model, GetModelRequest(model_id=model_id))
    return formats_of(found.model)


def formats_of(model: Model) -> ChatFormats:
    """The formats of a model that is described."""
    return ChatFormats(
        TOOL_CALL_FORMATS.get(model.tool_call_format),
        REASONING_FORMATS.get(model.reasoning_format),
        dict(model.special_markers),
    )
