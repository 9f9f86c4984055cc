"""Calls of tools and thoughts in the outputs of a model, for every API that has messages.

How a model writes them is known from its description (`ModelService.GetModel`), also on a router. `ChatFormats.prepare`
asks the engine for outputs in which they can be found, and holds them to calls where the request demands a call;
`ChatFormats.parser` then turns the text of one output into events.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputParser,
    ReasoningFormat,
    ToolCallFormat,
)
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


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """How a model writes calls of tools, and its thoughts. None: not at all, or it is not known."""

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    special_markers: dict[str, int]

    async def prepare(self, generate: GenerateRequest, use: ToolUse) -> None:
        """Change a request so that its outputs can be parsed, and are calls where they have to be.

        Raises InvalidArgument naming `tools` if the model's format of calls is not known, or `tool_choice`.
        """
        if use.is_allowed and self.tool_calls is None:
            raise InvalidArgument.field("tools", "are not supported for this model: its format of calls is not known")
        if use.is_allowed or self.reasoning is not None:
            generate.include_special_tokens = bool(self.special_markers)
        if self.tool_calls is None or not use.is_allowed or generate.HasField("output_format"):
            return
        if use.choice == "auto" and not any(tool.is_strict for tool in use.tools):
            return
        if use.size <= MAX_INLINE_TOOLS:
            grammar = self._grammar(self.tool_calls, use)
        else:
            grammar = await asyncio.to_thread(self._grammar, self.tool_calls, use)
        generate.output_format.CopyFrom(OutputFormat(grammar=grammar))

    def _grammar(self, tool_calls: ToolCallFormat, use: ToolUse) -> str:
        """The grammar that holds an output to calls of the tools."""
        choice = use.name if use.choice == "named" else use.choice
        parallel = use.parallel and use.choice != "named"  # which asks for one call of that tool
        tools = [tool.chat_form for tool in use.tools]
        return tool_calls.grammar(tools, choice, parallel, special_ids=self.special_markers, reasoning=self.reasoning)

    def parser(self, use: ToolUse, *, is_continuation: bool = False) -> OutputParser:
        """A parser for the text of one output. `is_continuation`: the answer had begun before, its thoughts too."""
        reasoning = None if self.reasoning is None or is_continuation else self.reasoning.parser()
        tool_calls = None
        if self.tool_calls is not None and use.is_allowed:
            tool_calls = self.tool_calls.parser(tool_names=[tool.name for tool in use.tools])
        return OutputParser(reasoning, tool_calls)

    def new_call_id(self) -> str:
        """The id of a new call, in the form that the model's template takes."""
        if self.tool_calls is None:
            raise ValueError("the model writes no calls")
        return self.tool_calls.new_call_id()


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
