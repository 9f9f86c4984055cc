"""A JSON body of the OpenAI API to the messages of the calls that it needs.

Raised here is InvalidArgument for what the contract cannot express, by the names of this API. Whether a value is within
its bounds is for the gRPC server to say.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf import json_format
from google.protobuf.message import Message

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import CreateContextRequest, FillRequest, GenerateRequest
from jaxctx.v1.rules_pb2 import rule
from jaxctx_server.http.openai.fields import (
    CREATE_FIELDS,
    GENERATE_FIELDS,
    KNOWN_FIELDS,
    NOTHING,
    SAMPLING_FIELDS,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_STREAM_OPTIONS,
)
from jaxctx_server.http.request_body import PARSE_ERRORS, parse_json

MAX_VALUES = 1 << 20  # of a body: the token ids of a prompt
MAX_PARTS = 1 << 16  # of a body: its texts, names, lists and objects

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request as the calls that it needs, in their order; the id of the context is not set yet."""

    create: CreateContextRequest
    fill: FillRequest
    generate: GenerateRequest
    stream: bool
    include_usage: bool  # at the end of a stream
    field_names: Mapping[str, str]  # the names that the request used, by the names of the contract
    unknown_fields: tuple[str, ...]


class ApiForm(Protocol):
    """One of the two APIs: what its requests ask to fill, and the form of its answers."""

    object_name: str
    chunk_object_name: str
    id_prefix: str
    adds_special_tokens: bool

    def fill_prompt(self, fields: Json, fill: FillRequest) -> None:
        """Set the text, token ids or messages of a request. Raises InvalidArgument, naming the field."""

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A whole output."""

    def chunk_choice(self, index: int, text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        """A part of an output; `is_first` for the first part of this output."""


def parse_request(form: ApiForm, data: bytes) -> CompletionRequest:
    """The request of a body. Raises InvalidArgument, naming the field that is wrong or not supported."""
    fields = parse_object(data)
    refuse_unsupported(form, fields)
    if "best_of" in fields and fields["best_of"] != fields.get("n", 1):
        raise InvalidArgument.field("best_of", "must be n: all outputs are told")
    create, fill, generate = CreateContextRequest(), FillRequest(), GenerateRequest()
    stream = parse_truth("stream", fields.get("stream", False))
    include_usage = parse_include_usage(fields)
    for name, contract_name in CREATE_FIELDS.items():
        if name in fields:
            set_field(create, contract_name, fields[name], name)
    for name, contract_name in GENERATE_FIELDS.items():
        if name in fields:
            set_field(generate, contract_name, fields[name], name)
    set_sampling(fields, generate)
    form.fill_prompt(fields, fill)
    return CompletionRequest(
        create=create,
        fill=fill,
        generate=generate,
        stream=stream,
        include_usage=include_usage,
        field_names=used_names(fields),
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


def refuse_unsupported(form: ApiForm, fields: Json) -> None:
    """Raise InvalidArgument for a field that asks for something that is not supported."""
    for name, values_for_nothing in UNSUPPORTED_FIELDS.items():
        if name in fields:
            check_asks_for_nothing(name, fields[name], values_for_nothing)
    if "add_special_tokens" in fields:
        check_asks_for_nothing("add_special_tokens", fields["add_special_tokens"], (form.adds_special_tokens,))


def check_asks_for_nothing(name: str, value: object, values_for_nothing: Collection[Any]) -> None:
    """Raise InvalidArgument if a field has another value than these."""
    for allowed in values_for_nothing:
        if type(allowed) is type(value) and allowed == value:
            return
    raise InvalidArgument.field(name, "is not supported here")


def parse_include_usage(fields: Json) -> bool:
    """Whether a stream is to end with its usage."""
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidArgument.field("stream_options", "must be an object")
    for name in UNSUPPORTED_STREAM_OPTIONS:
        if options.get(name) is not None:
            check_asks_for_nothing(f"stream_options.{name}", options[name], NOTHING)
    return parse_truth("stream_options.include_usage", options.get("include_usage", False))


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
    names = {}
    for name, contract_name in {**CREATE_FIELDS, **GENERATE_FIELDS}.items():
        if name in fields:
            names[contract_name] = name
    return names


def set_field(message: Message, contract_name: str, value: object, name: str) -> None:
    """Set a field of a message. Raises InvalidArgument with the name of this API for a value of another type."""
    if isinstance(value, list | dict):
        check_entries(message, contract_name, value, name)
    try:
        json_format.ParseDict({contract_name: value}, message)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field(name, "has a value of another type") from error


def check_entries(message: Message, contract_name: str, entries: Collection[Any], name: str) -> None:
    """Raise InvalidArgument for more entries of a list or map than the contract has, before time is spent on them."""
    field = message.DESCRIPTOR.fields_by_name[contract_name]
    max_items = field.GetOptions().Extensions[rule].max_items
    if field.is_repeated and len(entries) > max_items > 0:
        raise InvalidArgument.field(name, f"must have up to {max_items} entries, not {len(entries)}")
