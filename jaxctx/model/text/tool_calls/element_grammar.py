"""Rules for arguments that are elements: what fits, `element_reader` reads as values of the schema of a strict tool.

JSON      of the schema, where that allows no text
listed    one of some values (enum, const), each of which is read as it is
text      of so many characters, without </parameter>; beside it null, and other values that are then texts
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Schema, referred
from jaxctx.model.text.tool_calls.arguments import ANNOTATIONS, ArgumentsSchema, RulesSize, check_properties
from jaxctx.model.text.tool_calls.element_reader import END_OF_VALUE, PARAMETER
from jaxctx.model.text.tool_calls.element_values import (
    JSON_TYPES,
    MAX_SCHEMAS,
    alternatives_in,
    argument_text,
    own_types,
    types_of,
)
from jaxctx.model.text.tool_calls.symbols import ANY_TEXT, quoted

ELEMENT_KEY = re.compile(r"[^<>\n]{1,256}")
AFTER_VALUE = f"\n{END_OF_VALUE}\n"
MARK = re.escape(END_OF_VALUE).replace("/", r"\/")
# A text ends where its end first stands.
ELEMENT_RULES = [
    f"element_text: element_value {quoted(chr(10))}",
    f"element_value[lazy]: ELEMENT_TEXT {quoted(END_OF_VALUE)}",
    f"ELEMENT_TEXT: {ANY_TEXT}",
    f"any_element: {quoted(PARAMETER)} /[^<>\\n]{{1,256}}/ {quoted('>' + chr(10))} element_text",
]
READ_AS_TEXTS = frozenset(("string", "boolean", "integer", "number", "null"))  # beside texts, but for null itself
UNION_KEYS = ANNOTATIONS | {"anyOf", "oneOf", "$ref"}
LISTING_KEYS = ANNOTATIONS | {"type", "enum", "const"}
TEXT_KEYS = ANNOTATIONS | {"type", "minLength", "maxLength"}


@dataclass(frozen=True, slots=True)
class Choices:
    """The schemas of which a value has one: references and alternatives are followed."""

    schemas: list[Schema]
    is_exact: bool  # else something is said beside them, or what they refer to is not there


@dataclass(frozen=True, slots=True)
class TextBounds:
    """How many characters a text has."""

    least: int = 0
    most: int | None = None

    def pattern(self) -> str:
        """A regular expression of what stands before the end of a value: the text with a newline or, if it does not end
        with one, without.
        """
        most = "" if self.most is None else self.most
        whole = rf"(.|\n){{{self.least},{most}}}\n"
        if self.most == 0:
            return whole + "?"
        last = "" if self.most is None else self.most - 1
        unended = rf"(.|\n){{{max(self.least - 1, 0)},{last}}}[^\n]"
        return f"({whole}|{unended})" if self.least else f"({whole}|{unended})?"


ANY_BOUNDS = TextBounds()


def element_rules(name: str, arguments: ArgumentsSchema) -> list[str]:
    """Rules, of which the first has this name, for the arguments of a tool as elements: in the order of the schema.

    A schema may say no more of its object, and of texts, than can be held. Of a tool that is not strict, what else it
    says is left out; of a strict one it raises InvalidArgument naming `tools`.
    """
    try:
        return property_rules(name, arguments)
    except InvalidArgument:
        if arguments.is_strict:
            raise
        return [f"{name}: any_element*"]


def property_rules(name: str, arguments: ArgumentsSchema) -> list[str]:
    """The rules of `element_rules`. Raises InvalidArgument naming `tools` if there can be none for each argument."""
    schema = arguments.schema
    check_properties(schema, ELEMENT_KEY)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not properties:
        return [f'{name}: ""' if schema.get("additionalProperties") is False else f"{name}: any_element*"]
    size = RulesSize()
    rules = [f"{name}: {name}_next_0"]
    for place, (key, value) in enumerate(properties.items()):
        rules += size.checked(element_rule(f"{name}_{place}", key, value, arguments))
        left_out = "" if key in required else f" | {name}_next_{place + 1}"
        rules.append(f"{name}_next_{place}: {name}_{place} {name}_next_{place + 1}{left_out}")
    return [*rules, f'{name}_next_{len(properties)}: ""']


def element_rule(name: str, key: str, value: Any, arguments: ArgumentsSchema) -> list[str]:
    """Rules, of which the first has this name, for one argument; `value` is its schema."""
    before = quoted(f"{PARAMETER}{key}>\n")
    types = types_of(value, arguments.schema)
    if types is not None and "string" not in types:
        return [f"{name}: {before} {arguments.json_of(value)} {quoted(AFTER_VALUE)}"]
    choices = choices_of(value, arguments.schema)
    texts = listed_texts(choices, types, is_strict=arguments.is_strict)
    if texts:
        return [f"{name}: {before} ({' | '.join(quoted(text + AFTER_VALUE) for text in texts)})"]
    bounds = text_bounds(choices, types, is_strict=arguments.is_strict)
    if bounds is None and arguments.is_strict:
        raise InvalidArgument.field(
            "tools", f"this model's calls cannot be held to the schema of {key!r}: it is a text"
        )
    if bounds is None or bounds == ANY_BOUNDS:
        return [f"{name}: {before} element_text"]
    pattern = bounds.pattern()
    if types is not None and "null" in types:
        pattern = rf"({pattern}|null\n?)"
    return [
        f"{name}: {before} {name}_value {quoted(chr(10))}",
        f"{name}_value[lazy]: {name.upper()}_TEXT {quoted(END_OF_VALUE)}",
        rf"{name.upper()}_TEXT: /{pattern}/ & ~/(.|\n)*{MARK}(.|\n)*/",
    ]


def choices_of(value: Any, root: Schema) -> Choices:
    """The schemas of which a value has one, where `value` is its schema, a part of `root`. Each is looked at once."""
    found: list[Schema] = []
    is_exact = True
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if each is True:
            each = {}
        if not isinstance(each, dict) or len(seen) == MAX_SCHEMAS:
            is_exact = False
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        inner = alternatives_in(each)
        if inner is None and isinstance(each.get("$ref"), str):
            inner = [referred(each["$ref"], root)]
        if inner is None or own_types(each) is not None:
            found.append(each)
            continue
        is_exact = is_exact and each.keys() <= UNION_KEYS and len(each.keys() - ANNOTATIONS) == 1
        waiting += reversed(inner)
    return Choices(found, is_exact)


def listed_texts(choices: Choices, types: set[str] | None, *, is_strict: bool) -> list[str]:
    """The texts of which one is written, if the values are listed; empty if they are not, or some would not be read as
    what they are, or a strict schema says more of them.
    """
    texts: list[str] = []
    for schema in choices.schemas:
        if is_strict and not (choices.is_exact and schema.keys() <= LISTING_KEYS):
            return []
        values = listed_values(schema)
        if values is None:
            return []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value)
            if END_OF_VALUE in text or argument_text(text, types) != json.dumps(value, ensure_ascii=False):
                return []
            texts.append(text)
    return list(dict.fromkeys(texts))


def listed_values(schema: Schema) -> list[Any] | None:
    """The values of a schema that lists them, those that are of its types; None if it does not."""
    types = own_types(schema)
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif types == {"null"}:
        values = [None]
    else:
        return None
    return [value for value in values if types is None or not types.isdisjoint(kinds_of(value))]


def kinds_of(value: Any) -> set[str]:
    """The types of JSON that a value has."""
    kind = JSON_TYPES[type(value)]
    return {kind, "number"} if kind == "integer" else {kind}


def text_bounds(choices: Choices, types: set[str] | None, *, is_strict: bool) -> TextBounds | None:
    """How long the texts are that fit; None if that is not known, or if a strict schema says more of them, or of what
    is read as no text, than can be held.
    """
    texts = [schema for schema in choices.schemas if may_be_text(schema)]
    if len(texts) != 1 or (is_strict and not (choices.is_exact and texts[0].keys() <= TEXT_KEYS)):
        return None
    if types is None:
        return bounds_of(texts[0]) if len(choices.schemas) == 1 and "type" not in texts[0] else None
    return bounds_of(texts[0]) if types <= READ_AS_TEXTS else None


def may_be_text(schema: Schema) -> bool:
    """Whether a schema allows texts, and does not list them."""
    types = own_types(schema)
    return listed_values(schema) is None and (types is None or "string" in types)


def bounds_of(schema: Mapping[str, Any]) -> TextBounds | None:
    """The lengths of texts of a schema; None if it does not say them as it must."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if type(least) is not int or least < 0 or not (most is None or (type(most) is int and most >= least)):
        return None
    types = schema.get("type", [])
    if isinstance(types, list) and not all(isinstance(each, str) for each in types):
        return None
    return TextBounds(least, most)
