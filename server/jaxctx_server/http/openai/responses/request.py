"""The body of POST /v1/responses, read and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import written_tightly
from jaxctx.v1.context_service_pb2 import CreateContextRequest, GenerateRequest
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.fields import EFFORTS, SAMPLING_FIELDS, VERBOSITIES
from jaxctx_server.http.openai.request import (
    MAX_TOP_LOGPROBS,
    check_asks_for_nothing,
    parse_count,
    parse_object,
    parse_truth,
    set_field,
    set_sampling,
)
from jaxctx_server.http.openai.responses.items import parse_input
from jaxctx_server.http.openai.responses.namespaces import is_namespace, namespace_of, put_into_namespace
from jaxctx_server.http.tools import MAX_TOOLS, make_tool, read_function

Json = dict[str, Any]
MAX_METADATA = 16
WEB_SEARCH_TOOLS = ("web_search", "web_search_preview")
"""Tools that a server of this API may run by itself, and that coding agents offer without being asked to."""
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(  # all but log probabilities are of items that are whole anyway, or that no response here has
    (
        LOGPROBS,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
        "reasoning.encrypted_content",
    )
)
CREATE_FIELDS: Mapping[str, str] = {"model": "model_id", "cache_salt": "salt"}
GENERATE_FIELDS: Mapping[str, str] = {
    "max_output_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
OWN_FIELDS = (
    *("input", "instructions", "previous_response_id", "conversation", "store", "stream", "stream_options"),
    *("tools", "tool_choice", "parallel_tool_calls", "text", "include", "top_logprobs", "metadata", "reasoning"),
    *("truncation", "prompt_cache_options", "background", "stop", "generate"),
)
IGNORED_FIELDS = (
    *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
    "max_tool_calls",  # of tools that the server runs: there are none
)
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "prompt": ({},),
    "context_management": ([],),
    "moderation": ({},),
    "n": (1,),
}
KNOWN_FIELDS = frozenset(
    (*CREATE_FIELDS, *GENERATE_FIELDS, *OWN_FIELDS, *SAMPLING_FIELDS, *IGNORED_FIELDS, *UNSUPPORTED_FIELDS)
)


class ToolChoice(TypedDict):
    """Which tools may be called, by the names of `chat_output.ToolUse`."""

    choice: Literal["auto", "none", "required", "named"]
    name: str
    parallel: bool
    allowed: Sequence[str] | None  # names of the tools that may be called; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """What a request asks for."""

    fields: Json  # as they were sent; those that are null are as if they were not there
    items: Sequence[Json]  # of the input, references among them
    instructions: str | None
    tools: Sequence[str] | None  # JSON texts as the chat template reads them; None: not said
    previous_response_id: str | None
    conversation_id: str | None
    tool_choice: ToolChoice
    comparison_response_id: str | None
    tells_logprobs: bool
    effort: str | None  # of thinking
    generates: bool  # False: only the prompt is computed, and kept
    store: bool
    background: bool  # it is made while nobody waits for it
    stream: bool
    create: CreateContextRequest
    generate: GenerateRequest
    unknown_fields: tuple[str, ...]

    @property
    def field_names(self) -> dict[str, str]:
        """The names that this API has for fields of the contract."""
        return {contract: name for name, contract in {**CREATE_FIELDS, **GENERATE_FIELDS}.items()} | {
            "messages": "input",
            "tokens": "input",
            "output_format": "text",
            "template_arguments": "reasoning",
        }


def parse_responses_request(data: bytes) -> ResponsesRequest:
    """The request of a body. Raises InvalidArgument naming the field."""
    return read_fields(parse_object(data))


def read_fields(fields: Json) -> ResponsesRequest:
    """The request of these fields. Raises InvalidArgument naming the field."""
    for name, values in UNSUPPORTED_FIELDS.items():
        if name in fields:
            check_asks_for_nothing(name, fields[name], values)
    create, generate = CreateContextRequest(), GenerateRequest()
    tells_logprobs = set_logprobs(fields, generate)
    for name, contract_name in CREATE_FIELDS.items():
        if name in fields:
            set_field(create, contract_name, fields[name], name)
    for name, contract_name in GENERATE_FIELDS.items():
        if name in fields:
            set_field(generate, contract_name, fields[name], name)
    set_sampling(fields, generate)
    set_output_format(fields, generate)
    previous, conversation = optional_text(fields, "previous_response_id"), conversation_id(fields)
    if previous is not None and conversation is not None:
        raise InvalidArgument.field("previous_response_id", "must not be set together with conversation")
    check_metadata(fields.get("metadata", {}))
    store = parse_truth("store", fields.get("store", True))
    background = parse_truth("background", fields.get("background", False))
    if background and not store:
        raise InvalidArgument.field("store", "must not be false with background: its state is where it is found")
    return ResponsesRequest(
        fields=fields,
        items=parse_input(fields.get("input"), may_refer=True),
        instructions=optional_text(fields, "instructions"),
        tools=parse_tools(fields["tools"]) if "tools" in fields else None,
        previous_response_id=previous,
        conversation_id=conversation,
        tool_choice=parse_tool_choice(fields),
        comparison_response_id=optional_text(object_of(fields, "prompt_cache_options"), "comparison_response_id"),
        tells_logprobs=tells_logprobs,
        effort=parse_effort(fields),
        generates=parse_truth("generate", fields.get("generate", True)) and not only_prewarms(fields),
        store=store,
        background=background,
        stream=parse_truth("stream", fields.get("stream", False)),
        create=create,
        generate=generate,
        unknown_fields=tuple(name for name in fields if name not in KNOWN_FIELDS),
    )


def optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    """A text, or None if it is not there. Raises InvalidArgument."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument.field(name, "must be a text")
    return value


def object_of(fields: Mapping[str, Any], name: str) -> Json:
    """An object, empty if it is not there. Raises InvalidArgument."""
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise InvalidArgument.field(name, "must be an object")
    return value


def conversation_id(fields: Mapping[str, Any]) -> str | None:
    """The conversation: its id, or an object with that. Raises InvalidArgument."""
    value = fields.get("conversation")
    if isinstance(value, dict):
        value = value.get("id")
        if not isinstance(value, str):
            raise InvalidArgument.field("conversation.id", "must be a text")
    if value is not None and not isinstance(value, str):
        raise InvalidArgument.field("conversation", "must be the id of a conversation")
    return value


def parse_tools(value: object) -> list[str]:
    """Functions as the chat template reads them, each as JSON. Raises InvalidArgument naming the field.

    A search of the web is left out, as if the model had never chosen it: the response's `tools` do not name it either.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidArgument.field("tools", f"must be a list of up to {MAX_TOOLS} tools")
    functions: list[str] = []
    for index, tool in enumerate(value):
        if is_namespace(tool):
            functions += namespace_functions(tool, f"tools[{index}]")
        elif not is_web_search(tool):
            functions.append(make_tool(f"tools[{index}]", tool, read_tool).text)
    if len(functions) > MAX_TOOLS:
        raise InvalidArgument.field("tools", f"must have up to {MAX_TOOLS} functions, those of namespaces counted")
    return functions


def namespace_functions(tool: Json, field: str) -> list[str]:
    """The functions of a namespace, as those of `parse_tools`. Raises InvalidArgument naming the field."""
    namespace = namespace_of(tool, field)

    def read(path: str, function: object) -> Json:
        return put_into_namespace(read_tool(path, function), namespace)

    return [make_tool(f"{field}.tools[{index}]", each, read).text for index, each in enumerate(tool["tools"])]


def is_web_search(tool: object) -> bool:
    """Whether a tool is a search of the web by the server."""
    return isinstance(tool, dict) and tool.get("type") in WEB_SEARCH_TOOLS


def read_tool(field: str, tool: Any) -> Json:
    """One function, in the form of chat. Raises InvalidArgument naming the field."""
    if tool.get("type") != "function":
        raise InvalidArgument.field(f"{field}.type", "must be function: this server runs no tools itself")
    return read_function(field, tool)


def parse_tool_choice(fields: Mapping[str, Any]) -> ToolChoice:
    """Which tools may be called, and whether one must be. Raises InvalidArgument naming the field."""
    parallel = parse_truth("parallel_tool_calls", fields.get("parallel_tool_calls", True))
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice=choice, name="", parallel=parallel, allowed=None)
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return ToolChoice(choice="named", name=choice["name"], parallel=parallel, allowed=None)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise InvalidArgument.field("tool_choice.mode", "must be auto or required")
        return ToolChoice(choice=mode, name="", parallel=parallel, allowed=allowed_names(choice.get("tools")))
    message = "must be auto, none, required, a function with its name, or allowed_tools"
    raise InvalidArgument.field("tool_choice", message)


def allowed_names(value: object) -> list[str]:
    """The names of functions that may be called. Raises InvalidArgument naming the field."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise InvalidArgument.field("tool_choice.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    names: list[str] = []
    for index, tool in enumerate(value):
        field = f"tool_choice.tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise InvalidArgument.field(field, "must be a function with its name")
        names.append(tool["name"])
    return names


def set_logprobs(fields: Mapping[str, Any], generate: GenerateRequest) -> bool:
    """Ask for log probabilities if the request does. Raises InvalidArgument naming the field."""
    included = fields.get("include", [])
    if not isinstance(included, list):
        raise InvalidArgument.field("include", "must be a list of texts")
    for index, name in enumerate(included):
        if not isinstance(name, str) or name not in INCLUDABLE:
            raise InvalidArgument.field(f"include[{index}]", "is nothing that could be included")
    top = parse_count("top_logprobs", fields.get("top_logprobs", 0), MAX_TOP_LOGPROBS)
    generate.logprobs, generate.top_logprobs = LOGPROBS in included or top > 0, top
    return generate.logprobs


def only_prewarms(fields: Mapping[str, Any]) -> bool:
    """Whether the prompt is only computed for later requests. Raises InvalidArgument naming the field."""
    prewarm = object_of(fields, "prompt_cache_options").get("prewarm")
    return False if prewarm is None else parse_truth("prompt_cache_options.prewarm", prewarm)


def parse_effort(fields: Mapping[str, Any]) -> str | None:
    """How much to think; None: as the model does by itself. Raises InvalidArgument naming the field."""
    effort = object_of(fields, "reasoning").get("effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidArgument.field("reasoning.effort", "must be one of " + ", ".join(EFFORTS))
    return effort


def set_output_format(fields: Mapping[str, Any], generate: GenerateRequest) -> None:
    """Set the format of the text. Raises InvalidArgument naming the field."""
    text = object_of(fields, "text")
    if text.get("verbosity") not in (None, *VERBOSITIES):  # it changes nothing
        raise InvalidArgument.field("text.verbosity", "must be one of " + ", ".join(VERBOSITIES))
    wanted = text.get("format") or {"type": "text"}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    match kind:
        case "text":
            return
        case "json_object":
            generate.output_format.json_object = True
        case "json_schema":
            if not isinstance(wanted.get("schema"), dict):
                raise InvalidArgument.field("text.format.schema", "must be a JSON schema")
            schema = written_tightly(wanted["schema"], is_strict=wanted.get("strict") is True)
            generate.output_format.json_schema = json_text(schema)
        case _:
            raise InvalidArgument.field("text.format.type", "must be text, json_object or json_schema")


def check_metadata(value: object) -> None:
    """Raise InvalidArgument for notes that are no map of up to 16 short texts."""
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise InvalidArgument.field("metadata", f"must be an object of up to {MAX_METADATA} texts")
    for key, text in value.items():
        if len(key) > 64 or not isinstance(text, str) or len(text) > 512:
            raise InvalidArgument.field("metadata", "must have keys of up to 64 and texts of up to 512 characters")
