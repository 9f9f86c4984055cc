"""What the arguments of a tool are, for rules of every way to write them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import LENIENT, STYLE, References, Schema, closed_objects, readable, standalone
from jaxctx.model.text.tool_calls.optional_properties import check_optional
from jaxctx.model.text.tool_calls.symbols import json_symbol

MAX_PROPERTIES = 512  # of the arguments of a tool: the rules of more are longer than a grammar may be
MAX_RULES = 256 << 10  # characters of the rules of a tool: several times what a grammar may have
MAX_LOOKS = 1 << 16  # of schemas, keys and values for one grammar: as many as it may have characters
TOO_LARGE = "have schemas that are too large together with what they refer to"
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ..., "strict": ...}}
ANNOTATIONS = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
)
"""Of a schema, what says nothing of its values."""
PLAIN_OBJECT_KEYS = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("$schema", "$id", "x-guidance"),
}
"""Of a schema, what says which properties an object has, and what says nothing."""
ENCODER = json.JSONEncoder(ensure_ascii=False)


class RulesWork:
    """How much is looked at for the rules of tools. Schemas that refer to others are small, and what they say together
    is not: arguments may all refer to the same large one, or to parts of it that stand inside of each other.
    """

    def __init__(self) -> None:
        self._left = MAX_LOOKS

    def look(self, count: int) -> None:
        """So many schemas, keys or values are looked at next. Raises InvalidArgument naming `tools` if they are too
        many in all.
        """
        self._left -= count
        if self._left < 0:
            raise InvalidArgument.field("tools", TOO_LARGE)


@dataclass(frozen=True, slots=True)
class ArgumentsSchema:
    """What the arguments of a tool are: an object of this schema."""

    schema: Schema
    is_strict: bool  # else what cannot be followed of it is left out
    references: References  # within that schema
    work: RulesWork

    @property
    def options(self) -> dict[str, Any]:
        """How llguidance reads it."""
        return STYLE if self.is_strict else {**STYLE, **LENIENT}

    def json_of(self, value: Any) -> str:
        """A symbol for JSON of a part of the schema, as of a property.

        Raises InvalidArgument naming `tools` if it is too large, or its objects have too many optional properties.
        """
        part = standalone(value, self.references, self.work.look) if isinstance(value, dict) else {}
        check_optional(part, References(part), self.work.look)
        document = {"x-guidance": self.options, **part}
        return f"%json {bounded_json(document)}" if "$defs" in part else json_symbol(document)


def bounded_json(document: Schema) -> str:
    """JSON of a schema that may have a part many times. Raises InvalidArgument naming `tools` once it is too long."""
    parts: list[str] = []
    size = RulesSize()
    for part in ENCODER.iterencode(document):
        parts += size.checked([part])
    return "".join(parts)


def is_strict_tool(tool: Tool) -> bool:
    """Whether the arguments of a tool's calls must match its schema."""
    return tool["function"].get("strict") is True


def arguments_schema(tool: Tool, is_free: bool, work: RulesWork) -> ArgumentsSchema:
    """What the arguments of a tool are. Of a call that is free, only a strict tool has its schema."""
    is_strict = is_strict_tool(tool)
    schema: Schema = {"type": "object"}
    if is_strict or not is_free:
        schema = closed_objects({**(tool["function"].get("parameters") or {}), "type": "object"})
    if not is_strict:
        schema = readable(schema)
    return ArgumentsSchema(schema, is_strict, References(schema), work)


def check_properties(schema: Schema, key: re.Pattern[str]) -> None:
    """Raise InvalidArgument naming `tools` if arguments of this schema cannot be held by rules for each of them: their
    names must match `key`.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    others = schema.keys() - PLAIN_OBJECT_KEYS
    if others:
        raise InvalidArgument.field("tools", f"this model's calls cannot be held to {min(others)!r} of arguments")
    if not isinstance(properties, dict) or not all(map(key.fullmatch, properties)):
        raise InvalidArgument.field("tools", "this model's calls cannot have such names of arguments")
    if len(properties) > MAX_PROPERTIES:
        raise InvalidArgument.field("tools", f"must have up to {MAX_PROPERTIES} arguments each")
    if not all(isinstance(value, dict) or value is True for value in properties.values()):
        raise InvalidArgument.field("tools", "each of the properties must have a schema")
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        raise InvalidArgument.field("tools", "arguments that are required must be among the properties")


class RulesSize:
    """How long the rules of one tool are. Each argument may have all the others in its rules, if they refer to them: no
    more is written than a grammar could ever have.
    """

    def __init__(self) -> None:
        self._size = 0  # in characters

    def checked(self, rules: list[str]) -> list[str]:
        """These further rules. Raises InvalidArgument naming `tools` if they are too long together."""
        self._size += sum(map(len, rules))
        if self._size > MAX_RULES:
            raise InvalidArgument.field("tools", TOO_LARGE)
        return rules
