"""JSON schemas of the contract's messages, from their types and the rules of their fields (rules.proto).

    request    names of the contract, as JSON of protobuf allows it: null for a field that is not set, whole numbers
               also as text, enums also by number; bounds as the rules have them
    response   as this server writes it: every field without presence is there, 64-bit whole numbers are text

Whatever a server accepts is allowed by the schema. It refuses more than the schema does: what depends on its model
(`max_context_tokens`, token ids), sizes of texts in bytes (the schema counts characters), and rules between fields.
"""

import math
from collections.abc import Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor

from jaxctx.v1 import rules_pb2
from jaxctx.v1.rules_pb2 import FieldRules
from jaxctx_server.http.api_description import Json, query_parameter, schema_ref

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
INTEGER_PATTERN = r"^-?[0-9]+(\.0+)?$"
MAX_NAME_BYTES = 100
LARGEST = {FieldDescriptor.TYPE_INT32: 2**31 - 1, FieldDescriptor.TYPE_INT64: 2**63 - 1}
NUMBERS_AS_TEXT = ["NaN", "Infinity", "-Infinity"]
STANDARD_MESSAGES: dict[str, Json] = {  # that have a form of their own in JSON
    "google.protobuf.Duration": {
        "type": "string",
        "pattern": r"^0*[0-9]{1,9}(\.[0-9]{1,9})?s$",  # no rule allows one below 0, or above ten years
        "description": 'Seconds, as "1.5s".',
    },
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
}


def request_schemas(descriptor: Descriptor, *, without: Sequence[str] = ()) -> dict[str, Json]:
    """The schema of a request and those of the messages in it, by their names. `without`: fields that the body need not
    have, because the path has them.
    """
    schemas: dict[str, Json] = {}
    add_request_schema(schemas, descriptor, without)
    return schemas


def add_request_schema(schemas: dict[str, Json], descriptor: Descriptor, without: Sequence[str] = ()) -> None:
    """Add the schema of a request, and those of the messages in it that are not there yet."""
    properties: Json = {}
    schema: Json = {"type": "object", "additionalProperties": False, "properties": properties}
    schemas[descriptor.name] = schema
    required = [field.name for field in descriptor.fields if is_required(field) and field.name not in without]
    for field in descriptor.fields:
        rules = rules_of(field)
        described = list_schema(field, rules, request_value(field, rules))
        properties[field.name] = described if is_required(field) else {"anyOf": [described, {"type": "null"}]}
        nested = message_with_schema(field)
        if nested is not None and nested.name not in schemas:
            add_request_schema(schemas, nested)
    if required:
        schema["required"] = required
    choices = [one_of(oneof) for oneof in descriptor.oneofs if is_required_choice(oneof)]
    if choices:
        schema["allOf"] = choices


def response_schemas(descriptor: Descriptor) -> dict[str, Json]:
    """The schema of a response and those of the messages in it, by their names."""
    schemas: dict[str, Json] = {}
    add_response_schema(schemas, descriptor)
    return schemas


def add_response_schema(schemas: dict[str, Json], descriptor: Descriptor) -> None:
    """Add the schema of a response, and those of the messages in it that are not there yet."""
    properties: Json = {}
    schemas[descriptor.name] = {
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in descriptor.fields if not field.has_presence],
        "properties": properties,
    }
    for field in descriptor.fields:
        properties[field.name] = list_schema(field, FieldRules(), response_value(field))
        nested = message_with_schema(field)
        if nested is not None and nested.name not in schemas:
            add_response_schema(schemas, nested)


def query_parameters(descriptor: Descriptor, *, without: Sequence[str] = ()) -> list[Json]:
    """The fields of a request as parameters of the query, but those in `without`, which the path has."""
    return [
        query_parameter(
            field.name,
            f"{descriptor.name}.{field.name}",
            query_value(field, rules_of(field)),
            required=is_required(field),
        )
        for field in descriptor.fields
        if field.name not in without
    ]


def request_value(field: FieldDescriptor, rules: FieldRules) -> Json:
    """The schema of a field's value in a request; of a list or a map, of one entry."""
    value = value_field(field)
    if value.message_type is not None:
        return message_ref(value.message_type)
    if value.enum_type is not None:
        names = [each.name for each in value.enum_type.values]
        return {"anyOf": [{"enum": names}, {"type": "integer"}, {"type": "string", "pattern": INTEGER_PATTERN}]}
    match value.type:
        case FieldDescriptor.TYPE_BOOL:
            return {"type": "boolean"}
        case FieldDescriptor.TYPE_STRING:
            return text_schema(rules)
        case FieldDescriptor.TYPE_DOUBLE:
            return {"anyOf": [number_schema(value, rules), {"type": "string"}]}
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_INT64:
            return {"anyOf": [number_schema(value, rules), {"type": "string", "pattern": INTEGER_PATTERN}]}
    raise ValueError(f"{field.full_name} has a type that no request has had")


def query_value(field: FieldDescriptor, rules: FieldRules) -> Json:
    """The schema of a field's value in a query, where all is text."""
    if field.enum_type is not None:
        return {"enum": [each.name for each in field.enum_type.values]}
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return {"type": "boolean"}
        case FieldDescriptor.TYPE_STRING:
            return text_schema(rules)
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_INT64:
            return number_schema(field, rules)
    raise ValueError(f"{field.full_name} has a type that no query has had")


def response_value(field: FieldDescriptor) -> Json:
    """The schema of a field's value in a response; of a list or a map, of one entry."""
    value = value_field(field)
    if value.message_type is not None:
        return message_ref(value.message_type)
    if value.enum_type is not None:
        return {"enum": [each.name for each in value.enum_type.values]}
    match value.type:
        case FieldDescriptor.TYPE_BOOL:
            return {"type": "boolean"}
        case FieldDescriptor.TYPE_STRING:
            return {"type": "string"}
        case FieldDescriptor.TYPE_BYTES:
            return {"type": "string", "contentEncoding": "base64"}
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return {"anyOf": [{"type": "number"}, {"enum": NUMBERS_AS_TEXT}]}
        case FieldDescriptor.TYPE_INT64 | FieldDescriptor.TYPE_UINT64:
            return {"type": "string", "pattern": r"^-?[0-9]+$"}
    return {"type": "integer"}


def list_schema(field: FieldDescriptor, rules: FieldRules, entry: Json) -> Json:
    """The schema of a field whose values, or entries if it is a list or a map, have the schema `entry`."""
    if not field.is_repeated:
        return entry
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        schema: Json = {"type": "object", "additionalProperties": entry}
        low, high = "minProperties", "maxProperties"
    else:
        schema = {"type": "array", "items": entry}
        low, high = "minItems", "maxItems"
    if rules.min_items:
        schema[low] = rules.min_items
    if rules.max_items:
        schema[high] = rules.max_items
    return schema


def text_schema(rules: FieldRules) -> Json:
    """The schema of a text: an id, a name, or any text of so many bytes. A character has one byte or more."""
    if rules.id:
        return {"type": "string", "pattern": ID_PATTERN}
    if rules.name:
        return {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES}
    schema: Json = {"type": "string"}
    if rules.min_bytes:
        schema["minLength"] = 1
    if rules.max_bytes:
        schema["maxLength"] = rules.max_bytes
    return schema


def number_schema(field: FieldDescriptor, rules: FieldRules) -> Json:
    """The schema of a number within the bounds of its type and its rules."""
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        schema: Json = {"type": "number"}
    else:
        schema = {"type": "integer", "minimum": -LARGEST[field.type] - 1, "maximum": LARGEST[field.type]}
    if rules.HasField("gt"):
        schema.pop("minimum", None)
        schema["exclusiveMinimum"] = whole_if_possible(rules.gt)
    if rules.HasField("gte"):
        schema["minimum"] = whole_if_possible(rules.gte)
    if rules.token_id:
        schema["minimum"] = 0
    if rules.HasField("lte"):
        schema["maximum"] = whole_if_possible(rules.lte)
    return schema


def whole_if_possible(number: float) -> float:
    """The same number, as an int if it is whole."""
    return int(number) if math.isfinite(number) and number == int(number) else number


def value_field(field: FieldDescriptor) -> FieldDescriptor:
    """The field itself; of a map, the field of its values."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return field.message_type.fields_by_name["value"]
    return field


def message_ref(message: Descriptor) -> Json:
    """The schema of a message by its name, or in place if JSON of protobuf has a form of its own for it."""
    return STANDARD_MESSAGES.get(message.full_name) or schema_ref(message.name)


def message_with_schema(field: FieldDescriptor) -> Descriptor | None:
    """The type of the messages that the field holds, if their schema has a name."""
    message = value_field(field).message_type
    return None if message is None or message.full_name in STANDARD_MESSAGES else message


def rules_of(field: FieldDescriptor) -> FieldRules:
    """The rules that the contract states of a field."""
    rules: FieldRules = field.GetOptions().Extensions[rules_pb2.rule]
    return rules


def is_required(field: FieldDescriptor) -> bool:
    """Whether a request without this field is refused: by its rules, which forbid also the value of an unset field."""
    rules = rules_of(field)
    if field.has_presence:
        return rules.required
    if field.is_repeated:
        return rules.min_items > 0  # other rules are those of its entries
    is_above_0 = (rules.HasField("gt") and rules.gt >= 0) or (rules.HasField("gte") and rules.gte > 0)
    return rules.id or rules.name or rules.min_bytes > 0 or is_above_0


def is_required_choice(oneof: OneofDescriptor) -> bool:
    """Whether exactly one of the fields must be set."""
    return bool(oneof.GetOptions().Extensions[rules_pb2.choice].required)


def one_of(oneof: OneofDescriptor) -> Json:
    """The schema of an object that has a value for at least one of the fields."""
    not_null: Json = {"not": {"type": "null"}}
    return {"anyOf": [{"required": [each.name], "properties": {each.name: not_null}} for each in oneof.fields]}
