"""Rules for arguments that are elements: what fits, `element_reader` reads as values of the schema of a strict tool.

JSON      of the schema, where that allows no text
listed    one of some values (enum, const), each of which is read as it is
text      of so many characters, without </parameter>; beside it null, and other values that are then texts
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.arguments import ANNOTATIONS, ArgumentsSchema, RulesSize, check_properties
from jaxctx.model.text.tool_calls.element_reader import END_OF_VALUE, PARAMETER
from jaxctx.model.text.tool_calls.element_values import (
    JSON_TYPES,
    MAX_SCHEMAS,
    SchemaTypes,
    argument_text,
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
ANY_VALUE: Schema = {}  # one, as what is found of schemas is kept by their identity
READ_AS_TEXTS = frozenset(("string", "boolean", "integer", "number", "null"))  # beside texts, but for null itself
UNION_KEYS = ANNOTATIONS | {"anyOf", "oneOf", "$ref"}
LISTING_KEYS = ANNOTATIONS | {"type", "enum", "const"}
CHARACTERS_A_LOOK = 4  # of listed values, which are read to see what they mean
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


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that fit a schema that allows texts."""

    listed: list[str]  # one of these, if there are any
    bounds: TextBounds | None  # else of such a length; None: it is not known what fits


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
    size, writer, required = RulesSize(), ElementWriter(arguments), set(required)
    rules = [f"{name}: {name}_next_0"]
    for place, (key, value) in enumerate(properties.items()):
        rules += size.checked(writer.rules(f"{name}_{place}", key, value))
        left_out = "" if key in required else f" | {name}_next_{place + 1}"
        rules.append(f"{name}_next_{place}: {name}_{place} {name}_next_{place + 1}{left_out}")
    return [*rules, f'{name}_next_{len(properties)}: ""']


def listed_rule(name: str, texts: Sequence[str]) -> str:
    """A rule for one of these texts and the end of a value. It is one terminal, as each that is in a rule of its own
    counts where a value begins, and llguidance follows 2000 there.
    """
    return f"{name}: ({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {quoted(AFTER_VALUE)}"


class ElementWriter:
    """Writes rules for the arguments of one tool. What is found out of a schema is kept: many arguments may refer to
    the same one.
    """

    def __init__(self, arguments: ArgumentsSchema) -> None:
        self._arguments = arguments
        self._look = arguments.work.look
        self._types = SchemaTypes(arguments.references, self._look)
        self._texts: dict[tuple[int, bool], Texts] = {}  # by the identity of schemas, and whether they say all
        self._listed: dict[int, str] = {}  # names of rules for listed texts, by the identity of `Texts`

    def rules(self, name: str, key: str, value: Any) -> list[str]:
        """Rules, of which the first has this name, for one argument; `value` is its schema."""
        before = quoted(f"{PARAMETER}{key}>\n")
        types = self._types.allowed(value)
        if types is not None and "string" not in types:
            return [f"{name}: {before} {self._arguments.json_of(value)} {quoted(AFTER_VALUE)}"]
        texts = self._texts_of(value, types)
        if texts.listed:
            if id(texts) in self._listed:
                return [f"{name}: {before} {self._listed[id(texts)]}"]
            listed = self._listed[id(texts)] = f"{name.upper()}_LISTED"
            return [f"{name}: {before} {listed}", listed_rule(listed, texts.listed)]
        bounds = texts.bounds
        if bounds is None and self._arguments.is_strict:
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

    def _texts_of(self, value: Any, types: set[str] | None) -> Texts:
        """The texts that fit an argument; `value` is its schema, `types` are what that allows."""
        schema, says_all = self._types.followed(value)
        found = self._texts.get((id(schema), says_all))
        if found is None:
            choices = self._choices(schema, says_all)
            found = Texts(self._listed_texts(choices, types), self._text_bounds(choices, types))
            self._texts[id(schema), says_all] = found
        return found

    def _choices(self, schema: Any, says_all: bool) -> Choices:
        """The schemas of which a value has one, where `schema` is its own. Each is looked at once."""
        found: list[Schema] = []
        is_exact = says_all
        waiting, seen = [schema], set[int]()
        while waiting:
            each = waiting.pop()
            if each is True:
                each = ANY_VALUE
            if not isinstance(each, dict) or len(seen) == MAX_SCHEMAS:
                return Choices([], is_exact=False)  # there are others, of which nothing is known
            if id(each) in seen:
                continue
            seen.add(id(each))
            self._look(1)
            inner = None if self._types.own(each) is not None else self._types.alternatives(each)
            if inner is None:
                found.append(each)
                continue
            is_exact = is_exact and each.keys() <= UNION_KEYS and len(each.keys() - ANNOTATIONS) == 1
            waiting += reversed(inner)
        return Choices(found, is_exact)

    def _listed_texts(self, choices: Choices, types: set[str] | None) -> list[str]:
        """The texts of which one is written, if the values are listed; empty if they are not, or some would not be read
        as what they are, or a strict schema says more of them.
        """
        texts: list[str] = []
        for schema in choices.schemas:
            if self._arguments.is_strict and not (choices.is_exact and schema.keys() <= LISTING_KEYS):
                return []
            values = self._listed_values(schema)
            if values is None:
                return []
            for value in values:
                text = value if isinstance(value, str) else json.dumps(value)
                self._look(1 + len(text) // CHARACTERS_A_LOOK)
                if END_OF_VALUE in text or argument_text(text, types) != json.dumps(value, ensure_ascii=False):
                    return []
                texts.append(text)
        return list(dict.fromkeys(texts))

    def _listed_values(self, schema: Schema) -> list[Any] | None:
        """The values of a schema that lists them, those that are of its types; None if it does not."""
        if not self._lists_values(schema):
            return None
        types = self._types.own(schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            values = [None]
        self._look(len(values))
        return [value for value in values if types is None or not types.isdisjoint(kinds_of(value))]

    def _lists_values(self, schema: Schema) -> bool:
        """Whether a schema says which values there are."""
        return "const" in schema or isinstance(schema.get("enum"), list) or self._types.own(schema) == {"null"}

    def _text_bounds(self, choices: Choices, types: set[str] | None) -> TextBounds | None:
        """How long the texts are that fit; None if that is not known, or if a strict schema says more of them, or of
        what is read as no text, than can be held.
        """
        texts = [schema for schema in choices.schemas if self._may_be_text(schema)]
        says_more = not (choices.is_exact and len(texts) == 1 and texts[0].keys() <= TEXT_KEYS)
        if len(texts) != 1 or (self._arguments.is_strict and says_more):
            return None
        bounds = bounds_of(texts[0])
        if types is None:
            # Any value fits, and quotes and lists are read as such: a bound of texts says nothing of what is written.
            is_any = len(choices.schemas) == 1 and "type" not in texts[0] and bounds == ANY_BOUNDS
            return bounds if is_any else None
        return bounds if types <= READ_AS_TEXTS else None

    def _may_be_text(self, schema: Schema) -> bool:
        """Whether a schema allows texts, and does not list them."""
        types = self._types.own(schema)
        return not self._lists_values(schema) and (types is None or "string" in types)


def kinds_of(value: Any) -> set[str]:
    """The types of JSON that a value has."""
    kind = JSON_TYPES[type(value)]
    return {kind, "number"} if kind == "integer" else {kind}


def bounds_of(schema: Mapping[str, Any]) -> TextBounds | None:
    """The lengths of texts of a schema; None if it does not say them as it must."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if type(least) is not int or least < 0 or not (most is None or (type(most) is int and most >= least)):
        return None
    types = schema.get("type", [])
    if isinstance(types, list) and not all(isinstance(each, str) for each in types):
        return None
    return TextBounds(least, most)
