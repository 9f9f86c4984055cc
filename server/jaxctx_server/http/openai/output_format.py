"""What an output may look like: `response_format`, and the fields that other servers have for it.

| field | values |
|---|---|
| response_format | {"type": "text" or "json_object" or "json_schema" or "grammar"}; an object may have a `schema` |
| structured_outputs | an object with one of json, json_object, regex, choice, grammar |
| guided_json, guided_json_object, guided_regex, guided_choice, guided_grammar | that value by itself |
| regex, json_schema | that value by itself |

A grammar is one of llguidance, in its dialect of Lark. Whether a schema, an expression or a grammar can be followed is
for the engine to say. Of a schema in `response_format` that is not `strict`, what cannot be followed is left out: the
API promises nothing of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import written_tightly
from jaxctx.v1.generation_pb2 import Choices, OutputFormat
from jaxctx_server.http.errors import json_text

Json = Mapping[str, Any]
Parse = Callable[[str, Any], OutputFormat | None]
MAX_CHOICES = 1024


def parse_output_format(fields: Json) -> tuple[OutputFormat | None, str]:
    """The format that a request asks for (None: any text), and the name of the field that says so.

    Raises InvalidArgument, naming the field, also if there are several.
    """
    found: OutputFormat | None = None
    found_name = "response_format"
    for name, parse in FORMAT_PARSERS.items():
        if name not in fields:
            continue
        output_format = parse(name, fields[name])
        if output_format is None:
            continue
        if found is not None:
            raise InvalidArgument.field(name, f"must not be together with {found_name}")
        found, found_name = output_format, name
    return found, found_name


def parse_response_format(name: str, value: Any) -> OutputFormat | None:
    """OpenAI's field."""
    if not isinstance(value, dict):
        raise InvalidArgument.field(name, "must be an object")
    match value.get("type"):
        case "text" | None if not value or value.get("type") == "text":
            return None
        case "json_object":
            if value.get("schema") is None:
                return OutputFormat(json_object=True)
            if not isinstance(value["schema"], dict):
                raise InvalidArgument.field(f"{name}.schema", "must be an object")
            return json_schema(f"{name}.schema", {"type": "object", **value["schema"]}, is_strict=False)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict):
                raise InvalidArgument.field(f"{name}.json_schema", "must be an object with a schema")
            schema = described.get("schema")
            if schema is None:
                return OutputFormat(json_object=True)
            is_strict = described.get("strict") is True
            return json_schema(f"{name}.json_schema.schema", schema, is_strict=is_strict)
        case "grammar":
            return grammar(f"{name}.grammar", value.get("grammar"))
    raise InvalidArgument.field(f"{name}.type", "must be text, json_object, json_schema or grammar")


def parse_structured_outputs(name: str, value: Any) -> OutputFormat | None:
    """vLLM's field."""
    if not isinstance(value, dict):
        raise InvalidArgument.field(name, "must be an object")
    found: OutputFormat | None = None
    for key, each in value.items():
        if each is None or each is False:
            continue
        if key not in STRUCTURED_OUTPUTS:
            raise InvalidArgument.field(f"{name}.{key}", "is not supported here")
        if found is not None:
            raise InvalidArgument.field(name, "must have one of " + ", ".join(STRUCTURED_OUTPUTS))
        found = STRUCTURED_OUTPUTS[key](f"{name}.{key}", each)
    return found


def json_schema(name: str, value: Any, *, is_strict: bool = True) -> OutputFormat:
    """A JSON schema: an object, or its JSON text. Unless it is strict, what cannot be followed of an object is left
    out.
    """
    if isinstance(value, str):
        return OutputFormat(json_schema=text(name, value))
    if not isinstance(value, dict | bool):
        raise InvalidArgument.field(name, "must be a JSON schema")
    try:
        tight = written_tightly(value, is_strict=is_strict) if isinstance(value, dict) else value
        return OutputFormat(json_schema=text(name, json_text(tight)))
    except RecursionError as error:
        raise InvalidArgument.field(name, "has too many objects and lists inside each other") from error


def json_object(name: str, value: Any) -> OutputFormat | None:
    """Whether any JSON object is asked for."""
    if not isinstance(value, bool):
        raise InvalidArgument.field(name, "must be true or false")
    return OutputFormat(json_object=True) if value else None


def regex(name: str, value: Any) -> OutputFormat | None:
    """A regular expression."""
    return OutputFormat(regex=text(name, value)) if value != "" else None


def grammar(name: str, value: Any) -> OutputFormat | None:
    """A grammar of llguidance."""
    return OutputFormat(grammar=text(name, value)) if value != "" else None


def choices(name: str, value: Any) -> OutputFormat | None:
    """A list of texts."""
    if not isinstance(value, list):
        raise InvalidArgument.field(name, "must be a list of texts")
    if len(value) > MAX_CHOICES:
        raise InvalidArgument.field(name, f"must have up to {MAX_CHOICES} texts, not {len(value)}")
    texts = [text(f"{name}[{place}]", each) for place, each in enumerate(value)]
    return OutputFormat(choices=Choices(texts=texts)) if texts else None


def text(name: str, value: Any) -> str:
    """A text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field(name, "has a lone surrogate") from error
    return value


def guided_json(name: str, value: Any) -> OutputFormat | None:
    """A JSON schema, or nothing: "" and {}."""
    asks_for_nothing = value is False or value in ("", {})
    return None if asks_for_nothing else json_schema(name, value)


STRUCTURED_OUTPUTS: Mapping[str, Parse] = {
    "json": json_schema,
    "json_object": json_object,
    "regex": regex,
    "choice": choices,
    "grammar": grammar,
}
FORMAT_PARSERS: Mapping[str, Parse] = {
    "response_format": parse_response_format,
    "structured_outputs": parse_structured_outputs,
    "guided_json": guided_json,
    "guided_json_object": json_object,
    "guided_regex": regex,
    "guided_choice": choices,
    "guided_grammar": grammar,
    "regex": regex,
    "json_schema": guided_json,
}
