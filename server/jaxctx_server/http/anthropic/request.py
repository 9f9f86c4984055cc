"""The body of POST /v1/messages, read and checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import written_tightly
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import CreateContextRequest, GenerateRequest
from jaxctx.v1.generation_pb2 import OutputFormat
from jaxctx_server.http.anthropic.prompt import parse_prompt
from jaxctx_server.http.anthropic.tools import callable_tools, definitions, parse_tools
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.request import check_asks_for_nothing, parse_object, parse_truth, set_field
from jaxctx_server.http.tools import Tool

Json = dict[str, Any]
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
IGNORED_FIELDS = ("metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "anthropic_beta")
OWN_FIELDS = (
    *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "thinking", "tools", "tool_choice"),
    *("output_config", "output_format", "diagnostics", "cache_salt", "ignore_eos", "min_tokens", "context_management"),
)
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "user_profile_id": (),
    "workspace_id": (),
}
KNOWN_FIELDS = frozenset((*SAMPLING_FIELDS, *IGNORED_FIELDS, *OWN_FIELDS, *UNSUPPORTED_FIELDS))
TOOL_CHOICES = ("auto", "any", "tool", "none")
THINKING_OF_KIND: Mapping[str, bool] = {
    "enabled": True,
    "adaptive": True,
    "disabled": False,
    "between_tools": False,  # no thoughts before the first call, which is where a chat template would have them
}
NAMES_OF_FIELDS = {
    "model_id": "model",
    "stop": "stop_sequences",
    "salt": "cache_salt",
    "output_format": "output_config.format",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools the model may call, and whether it must."""

    kind: str = "auto"  # one of TOOL_CHOICES
    name: str = ""  # of the tool that must be called
    parallel: bool = True  # several calls in one answer are allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """What a request asks for."""

    create: CreateContextRequest
    prompt: ChatMessages
    generate: GenerateRequest | None  # None: only compute the prompt
    tools: Sequence[Tool]  # that can be called
    tool_choice: ToolChoice
    stream: bool
    has_context_management: bool  # edits of the context are asked for; none is ever applied
    wants_diagnosis: bool
    previous_message_id: str | None
    unknown_fields: tuple[str, ...]


def parse_messages_request(data: bytes) -> MessagesRequest:
    """The request of a body. Raises InvalidArgument naming the field."""
    fields = parse_object(data)
    create, prompt, tools = parse_prompt_fields(fields)
    choice = parse_tool_choice(fields.get("tool_choice"), bool(tools))
    diagnostics = fields.get("diagnostics")
    if diagnostics is not None and not isinstance(diagnostics, dict):
        raise InvalidArgument.field("diagnostics", "must be an object")
    previous = (diagnostics or {}).get("previous_message_id")
    if previous is not None and not isinstance(previous, str):
        raise InvalidArgument.field("diagnostics.previous_message_id", "must be a text")
    return MessagesRequest(
        create=create,
        prompt=prompt,
        generate=parse_generation(fields),
        tools=tools,
        tool_choice=choice,
        stream=parse_truth("stream", fields.get("stream", False)),
        has_context_management=parse_context_management(fields.get("context_management")),
        wants_diagnosis=diagnostics is not None,
        previous_message_id=previous,
        unknown_fields=tuple(name for name in fields if name not in KNOWN_FIELDS),
    )


def parse_prompt_fields(fields: Json) -> tuple[CreateContextRequest, ChatMessages, list[Tool]]:
    """Model, prompt, and the tools that can be called. Raises InvalidArgument naming the field."""
    for name, values in UNSUPPORTED_FIELDS.items():
        if name in fields:
            check_asks_for_nothing(name, fields[name], values)
    create = CreateContextRequest()
    if "model" in fields:
        set_field(create, "model_id", fields["model"], "model")
    if "cache_salt" in fields:
        set_field(create, "salt", fields["cache_salt"], "cache_salt")
    offered = parse_tools(fields.get("tools", []))
    prompt = parse_prompt(fields.get("system"), fields.get("messages"), definitions(offered))
    choice = fields.get("tool_choice")
    if not (isinstance(choice, dict) and choice.get("type") == "none"):
        prompt.tools.extend(each.tool.text for each in offered if not each.is_deferred)
    thinking = template_arguments(fields.get("thinking"))
    if thinking:
        prompt.template_arguments = thinking
    return create, prompt, callable_tools(offered, fields["messages"])


def parse_generation(fields: Json) -> GenerateRequest | None:
    """How the prompt is continued; None with `max_tokens` 0. Raises InvalidArgument naming the field."""
    max_tokens = fields.get("max_tokens")
    if type(max_tokens) is not int or max_tokens < 0:
        raise InvalidArgument.field("max_tokens", "must be a whole number from 0")
    if max_tokens == 0:
        if parse_truth("stream", fields.get("stream", False)):
            raise InvalidArgument.field("stream", "must not be true with max_tokens 0, which answers nothing")
        return None
    generate = GenerateRequest()
    set_field(generate, "max_tokens", max_tokens, "max_tokens")
    for name in ("min_tokens", "ignore_eos"):
        if name in fields:
            set_field(generate, name, fields[name], name)
    for name in SAMPLING_FIELDS:
        if name in fields:
            set_field(generate.sampling, name, fields[name], name)
    if "stop_sequences" in fields:
        set_field(generate, "stop", fields["stop_sequences"], "stop_sequences")
    schema = output_schema(fields)
    if schema is not None:
        generate.output_format.CopyFrom(OutputFormat(json_schema=schema))
    return generate


def parse_context_management(value: object) -> bool:
    """Whether edits of the context are asked for. Raises InvalidArgument naming the field.

    Edits take old thoughts and results of tools out of a prompt that has become long. This server computes what it is
    given, and answers that it has applied none. Coding agents ask for edits in every request.
    """
    if value is None:
        return False
    if not isinstance(value, dict):
        raise InvalidArgument.field("context_management", "must be an object")
    edits = value.get("edits", [])
    if not isinstance(edits, list):
        raise InvalidArgument.field("context_management.edits", "must be a list")
    for index, edit in enumerate(edits):
        if not isinstance(edit, dict) or not isinstance(edit.get("type"), str):
            raise InvalidArgument.field(f"context_management.edits[{index}].type", "must be a text")
    return True


def output_schema(fields: Json) -> str | None:
    """The JSON schema that the answer must match, as JSON. Raises InvalidArgument naming the field."""
    config = fields.get("output_config", {})
    if not isinstance(config, dict):
        raise InvalidArgument.field("output_config", "must be an object")
    name, wanted = "output_config.format", config.get("format")
    if wanted is None:
        name, wanted = "output_format", fields.get("output_format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise InvalidArgument.field(f"{name}.type", "must be json_schema")
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise InvalidArgument.field(f"{name}.schema", "must be a JSON schema")
    return json_text(written_tightly(schema))


def template_arguments(thinking: object) -> str:
    """The arguments of the chat template that say whether to think; empty: not said. Raises InvalidArgument."""
    if thinking is None:
        return ""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(kind, str) or kind not in THINKING_OF_KIND:
        raise InvalidArgument.field("thinking.type", f"must be one of {', '.join(THINKING_OF_KIND)}")
    return json.dumps({"enable_thinking": THINKING_OF_KIND[kind]})


def parse_tool_choice(value: object, has_tools: bool) -> ToolChoice:
    """Which tools may be called. Raises InvalidArgument naming the field."""
    if value is None:
        return ToolChoice()
    if not isinstance(value, dict) or value.get("type") not in TOOL_CHOICES:
        raise InvalidArgument.field("tool_choice.type", f"must be one of {', '.join(TOOL_CHOICES)}")
    kind, name = value["type"], value.get("name", "")
    if kind == "tool" and (not isinstance(name, str) or not name):
        raise InvalidArgument.field("tool_choice.name", "must be the name of a tool")
    if kind in ("any", "tool") and not has_tools:
        raise InvalidArgument.field("tool_choice", "needs tools")
    single = parse_truth("tool_choice.disable_parallel_tool_use", value.get("disable_parallel_tool_use", False))
    return ToolChoice(kind=kind, name=name if kind == "tool" else "", parallel=not single)
