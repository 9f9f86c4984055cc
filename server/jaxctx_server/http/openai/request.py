"""A JSON body of the OpenAI API to the messages of the calls that it needs.

Raised here is InvalidArgument for what the contract cannot express, by the names of this API. Whether a value is within
its bounds is for the gRPC server to say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import CreateContextRequest, GenerateRequest
from jaxctx.v1.generation_pb2 import OutputFormat
from jaxctx.v1.rules_pb2 import rule
from jaxctx_server.http.message_schemas import value_field
from jaxctx_server.http.openai.fields import (
    CREATE_FIELDS,
    GENERATE_FIELDS,
    KNOWN_FIELDS,
    NOTHING,
    SAMPLING_FIELDS,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_STREAM_OPTIONS,
)
from jaxctx_server.http.openai.output_format import parse_output_format
from jaxctx_server.http.request_body import PARSE_ERRORS, parse_json

MAX_VALUES = 1 << 20  # of a body: the token ids of a prompt
MAX_PARTS = 1 << 16  # of a body: its texts, names, lists and objects
MAX_PRIORITY = 100
MAX_TOP_LOGPROBS = 20

NUMBER_TYPES = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether and how an answer comes in parts."""

    stream: bool
    include_usage: bool  # at the end
    continuous_usage: bool  # in every chunk, as far as it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """What requests of both APIs ask for."""

    create: CreateContextRequest
    generate: GenerateRequest
    is_prefill_only: bool  # no output: `generate.max_tokens` is 1, and nothing is generated
    streaming: StreamOptions
    return_token_ids: bool
    tokens_as_ids: bool  # log probabilities name tokens as "token_id:5"
    add_special_tokens: bool | None  # None: as the API does
    prompt_logprobs: int | None  # how many of the most likely tokens to tell beside each of the prompt; None: nothing
    prompt_cache_key: str | None  # under which the prompt is remembered, to be compared with the next one
    field_names: Mapping[str, str]  # the names that the request used, by the names of the contract
    unknown_fields: tuple[str, ...]
    looser_format: OutputFormat | None = None  # see `chat_output.ChatFormats`

    @property
    def outputs(self) -> int:
        """How many outputs each prompt gets."""
        return max(self.generate.n, 1)


def parse_shared(fields: Json) -> SharedOptions:
    """What both APIs have. Raises InvalidArgument, naming the field that is wrong or not supported."""
    refuse(fields, UNSUPPORTED_FIELDS)
    if type(fields.get("seed")) is int and fields["seed"] == -1:  # with which other servers choose one
        fields = {name: value for name, value in fields.items() if name != "seed"}
    create, generate = CreateContextRequest(), GenerateRequest()
    streaming = parse_stream_options(fields)
    for name, contract_name in CREATE_FIELDS.items():
        if name in fields:
            set_field(create, contract_name, fields[name], name)
    if "priority" in fields:
        create.priority = parse_priority(fields["priority"])
    for name, contract_name in GENERATE_FIELDS.items():
        if name in fields:
            set_field(generate, contract_name, fields[name], name)
    is_prefill_only = generate.HasField("max_tokens") and generate.max_tokens == 0
    if is_prefill_only:
        generate.max_tokens = 1  # so that the other options are checked all the same
    set_sampling(fields, generate)
    output_format, format_name = parse_output_format(fields)
    if output_format is not None:
        generate.output_format.CopyFrom(output_format)
    generate.include_special_tokens = not parse_truth_of(fields, "skip_special_tokens", True)
    special = fields.get("add_special_tokens")
    return SharedOptions(
        create=create,
        generate=generate,
        is_prefill_only=is_prefill_only,
        streaming=streaming,
        return_token_ids=parse_truth_of(fields, "return_token_ids", False),
        tokens_as_ids=parse_truth_of(fields, "return_tokens_as_token_ids", False),
        add_special_tokens=None if special is None else parse_truth("add_special_tokens", special),
        prompt_logprobs=parse_prompt_logprobs(fields, streaming),
        prompt_cache_key=parse_cache_key(fields),
        field_names={**used_names(fields), "output_format": format_name},
        unknown_fields=tuple(name for name in fields if name not in KNOWN_FIELDS),
    )


def parse_object(data: bytes) -> dict[str, Any]:
    """The fields of a body; those that are null are as if they were not there."""
    try:
        fields = parse_json(data, max_values=MAX_VALUES, max_parts=MAX_PARTS)
    except PARSE_ERRORS as error:
        raise InvalidArgument("the body is no JSON") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def refuse(fields: Json, unsupported: Mapping[str, Collection[Any]]) -> None:
    """Raise InvalidArgument for a field that asks for something that is not supported."""
    for name, values_for_nothing in unsupported.items():
        if name in fields:
            check_asks_for_nothing(name, fields[name], values_for_nothing)


def check_asks_for_nothing(name: str, value: object, values_for_nothing: Collection[Any]) -> None:
    """Raise InvalidArgument if a field has another value than these."""
    for allowed in values_for_nothing:
        if type(allowed) is type(value) and allowed == value:
            return
    raise InvalidArgument.field(name, "is not supported here")


def parse_stream_options(fields: Json) -> StreamOptions:
    """Whether and how the answer is to come in parts."""
    stream = parse_truth_of(fields, "stream", False)
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidArgument.field("stream_options", "must be an object")
    for name in UNSUPPORTED_STREAM_OPTIONS:
        if options.get(name) is not None:
            check_asks_for_nothing(f"stream_options.{name}", options[name], NOTHING)
    chosen = {}
    for name in ("include_usage", "continuous_usage_stats"):
        value = options.get(name)
        chosen[name] = False if value is None else parse_truth(f"stream_options.{name}", value)
    include_usage = chosen["include_usage"]
    if include_usage and not stream:
        raise InvalidArgument.field("stream_options", "needs stream")
    return StreamOptions(stream, include_usage, include_usage and chosen["continuous_usage_stats"])


def parse_priority(value: object) -> int:
    """The priority of contexts. In this API the lowest number goes first, as vLLM has it; there the highest."""
    if type(value) is not int or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidArgument.field("priority", f"must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return -value


def parse_prompt_logprobs(fields: Json, streaming: StreamOptions) -> int | None:
    """How many of the most likely tokens to tell beside each token of the prompt; None: nothing of its tokens."""
    if "prompt_logprobs" not in fields:
        return None
    if streaming.stream:
        raise InvalidArgument.field("prompt_logprobs", "must not be set in a stream")
    return parse_count("prompt_logprobs", fields["prompt_logprobs"], MAX_TOP_LOGPROBS)


def parse_cache_key(fields: Json) -> str | None:
    """The key of the prompt, if there is one."""
    key = fields.get("prompt_cache_key")
    if key is not None and not isinstance(key, str):
        raise InvalidArgument.field("prompt_cache_key", "must be text")
    return key or None


def parse_truth_of(fields: Json, name: str, default: bool) -> bool:
    """A field that must be true or false if it is there."""
    return parse_truth(name, fields[name]) if name in fields else default


def parse_count(name: str, value: object, most: int) -> int:
    """A value that must be a whole number from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidArgument.field(name, f"must be a whole number from 0 to {most}")
    return value


def parse_truth(name: str, value: object) -> bool:
    """A value that must be true or false."""
    if not isinstance(value, bool):
        raise InvalidArgument.field(name, "must be true or false")
    return value


def set_sampling(fields: Json, generate: GenerateRequest) -> None:
    """Set how outputs are sampled, and where they stop."""
    for name in SAMPLING_FIELDS:
        if name not in fields:
            continue
        value = fields[name]
        if name == "top_k" and value == -1:  # with which other servers switch it off
            value = 0
        set_field(generate.sampling, name, value, name)
    stop = fields.get("stop")
    if stop is not None:
        set_field(generate, "stop", [stop] if isinstance(stop, str) else stop, "stop")


def used_names(fields: Json) -> dict[str, str]:
    """The names that a request used for fields with another name in the contract, by the names of the contract."""
    names = {"template_arguments": "chat_template_kwargs", "text": "prompt", "tokens": "prompt"}
    for name, contract_name in {**CREATE_FIELDS, **GENERATE_FIELDS}.items():
        if name in fields:
            names[contract_name] = name
    return names


def set_field(message: Message, contract_name: str, value: object, name: str) -> None:
    """Set a field of a message. Raises InvalidArgument with the name of this API for a value of another type.

    Numbers must be numbers: JSON of protobuf takes them as texts too, and truth values as 0 and 1.
    """
    field: Any = message.DESCRIPTOR.fields_by_name[contract_name]
    if isinstance(value, list | dict):
        check_entries(message, contract_name, value, name)
    if not all(may_be_of(field, each) for each in entries_of(field, value)):
        raise InvalidArgument.field(name, "has a value of another type")
    try:
        json_format.ParseDict({contract_name: value}, message)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field(name, "has a value of another type") from error


def entries_of(field: FieldDescriptor, value: object) -> Collection[object]:
    """The entries of a list or a map, or the value itself."""
    if field.is_repeated and isinstance(value, dict):
        return value.values()
    return value if field.is_repeated and isinstance(value, list) else (value,)


def may_be_of(field: FieldDescriptor, value: object) -> bool:
    """Whether a truth value or a text is where a field, or a list or a map of this kind, has such values."""
    kind = value_field(field).type
    if isinstance(value, bool):
        return bool(kind == FieldDescriptor.TYPE_BOOL)
    return not isinstance(value, str) or kind not in NUMBER_TYPES


def check_entries(message: Message, contract_name: str, entries: Collection[Any], name: str) -> None:
    """Raise InvalidArgument for more entries of a list or map than the contract has, before time is spent on them."""
    field = message.DESCRIPTOR.fields_by_name[contract_name]
    max_items = field.GetOptions().Extensions[rule].max_items
    if field.is_repeated and len(entries) > max_items > 0:
        raise InvalidArgument.field(name, f"must have up to {max_items} entries, not {len(entries)}")
