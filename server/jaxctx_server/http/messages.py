"""Request messages of the contract out of paths, queries and bodies, and responses as JSON.

Names in JSON are those of the contract. Whether values are within bounds is checked when the call is made; here only
what cannot be such a message is refused.
"""

import functools
import json
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.rules_pb2 import rule
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import JSON_MEDIA_TYPE
from jaxctx_server.http.request_body import PARSE_ERRORS, parse_json

SPARE_PARTS = 1000  # that a body may have beside those that its fields may have
TRUTH = {"true": True, "false": False}

MessageT = TypeVar("MessageT", bound=Message)


async def message_from_body(call: HttpCall, message: MessageT) -> MessageT:
    """The message, with the fields of a JSON body; fields in the path go first.

    Raises InvalidArgument for what cannot be such a message.
    """
    path_fields = typed_fields(message, call.request.path_params)
    max_parts = max_json_parts(message.DESCRIPTOR) + SPARE_PARTS
    parse = functools.partial(_parse_message, message=message, path_fields=path_fields, max_parts=max_parts)
    return await call.parse_body(parse)


def _parse_message(data: bytes, *, message: MessageT, path_fields: dict[str, Any], max_parts: int) -> MessageT:
    """The message, with the fields of a JSON body of at most `max_parts` values. Raises InvalidArgument."""
    try:
        fields = parse_json(data, max_values=max_parts, max_parts=max_parts) | path_fields
    except PARSE_ERRORS as error:
        raise InvalidArgument.field("request", "is no JSON object") from error
    return fill_message(message, fields)


def message_from_query(call: HttpCall, message: MessageT) -> MessageT:
    """The message, with the fields of the query; fields in the path go first. Raises as `message_from_body`."""
    return fill_message(message, typed_fields(message, {**call.request.query_params, **call.request.path_params}))


def typed_fields(message: Message, texts: dict[str, Any]) -> dict[str, Any]:
    """Texts of a path or query, with "true" and "false" as truth values where the field is one."""
    fields = dict(texts)
    for name, value in texts.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is not None and field.type == FieldDescriptor.TYPE_BOOL:
            fields[name] = TRUTH.get(value, value)
    return fields


def fill_message(message: MessageT, fields: dict[str, Any]) -> MessageT:
    """The message, with these fields set. Raises InvalidArgument for an unknown name or a value of another type."""
    try:
        return json_format.ParseDict(fields, message)
    except json_format.ParseError as error:
        raise InvalidArgument.field("request", str(error).partition("\n")[0]) from error
    except PARSE_ERRORS as error:
        raise InvalidArgument.field("request", "is no JSON object") from error


@functools.cache
def max_json_parts(descriptor: Descriptor) -> int:
    """How many texts, names, lists and objects the JSON of a message has at most, by the rules of its fields.

    Raises ValueError for a list whose limit only the server knows: no request of these paths has one.
    """
    parts = 1
    for field in descriptor.fields:
        field_rule = field.GetOptions().Extensions[rule]
        if field_rule.max_items_of:
            raise ValueError(f"{field.full_name} has no limit of its own")
        entries = field_rule.max_items if field.is_repeated else 1
        parts_of_entry = 1 if field.message_type is None else max_json_parts(field.message_type)
        parts += 2 + entries * parts_of_entry  # its name, the list or object around its entries, and the entries
    return parts


def message_fields(message: Message) -> dict[str, Any]:
    """All fields of a message by the names of the contract, without optional ones that are not set."""
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def message_json(message: Message) -> str:
    """A message as JSON."""
    return json.dumps(message_fields(message), ensure_ascii=False)


def message_response(message: Message) -> Response:
    """A response with the message as JSON."""
    return Response(message_json(message), media_type=JSON_MEDIA_TYPE)
