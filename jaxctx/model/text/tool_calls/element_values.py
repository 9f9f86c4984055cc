"""What the texts of elements mean: the types that a schema allows say whether 5 is a number or a text.

Schemas come from clients, and refer to each other as they like: each is looked at once, and of one value so many.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxctx.model.text.json_schemas import Look, References, Schema
from jaxctx.model.text.tool_calls.arguments import ANNOTATIONS
from jaxctx.model.text.tool_calls.json_scanner import Malformed, is_json
from jaxctx.model.text.tool_calls.keyword_arguments import python_value

JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
MAX_SCHEMAS = 1000  # that are looked at for one value
REFERENCE_KEYS = ANNOTATIONS | {"$ref"}
READ_BESIDE_TEXTS = frozenset(("object", "array", "null"))  # any other value is a text where texts are allowed


def argument_text(written: str, types: set[str] | None) -> str:
    """The JSON that a text means as a value of one of these types; None: of any.

    A text that is no value of another type stays one, so that who called can say what is wrong with it.
    """
    if types == {"string"}:
        return json.dumps(written, ensure_ascii=False)
    takes_texts = types is None or "string" in types
    try:
        value = python_value(written)
    except Malformed:
        # JSON has values that Python does not have, such as the number 1e999.
        return written.strip() if not takes_texts and is_json(written) else json.dumps(written, ensure_ascii=False)
    if types is not None and takes_texts and JSON_TYPES[type(value)] not in types & READ_BESIDE_TEXTS:
        return json.dumps(written, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


class SchemaTypes:
    """The types of JSON that schemas allow which are parts of one, as those of arguments. What is found is kept: many
    arguments may refer to the same schema, and that may list many values.
    """

    def __init__(self, references: References, look: Look = lambda _: None) -> None:
        """`references`: within the schema whose parts are asked for."""
        self._references = references
        self._look = look
        self._own: dict[int, set[str] | None] = {}  # by the identity of schemas
        self._allowed: dict[int, set[str] | None] = {}

    def allowed(self, schema: Any) -> set[str] | None:
        """The types that a schema allows; None: not known, or any."""
        schema, _ = self.followed(schema)
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._allowed:
            self._allowed[id(schema)] = self._union(schema)
        return self._allowed[id(schema)]

    def own(self, schema: Schema) -> set[str] | None:
        """The types that a schema itself names; None: none."""
        if id(schema) not in self._own:
            self._look(sum(len(schema[key]) for key in ("type", "enum") if isinstance(schema.get(key), list)))
            self._own[id(schema)] = own_types(schema)
        return self._own[id(schema)]

    def followed(self, schema: Any) -> tuple[Any, bool]:
        """What is behind references, one behind the other, and whether nothing else is said beside them. None: there is
        nothing, or they are too many.
        """
        says_no_more = True
        seen = set[int]()
        while len(seen) < MAX_SCHEMAS and id(schema) not in seen:
            seen.add(id(schema))
            self._look(1)
            if not isinstance(schema, dict) or not self._is_reference(schema):
                return schema, says_no_more
            says_no_more = says_no_more and schema.keys() <= REFERENCE_KEYS
            schema = self._references.target(schema["$ref"])
        return None, False

    def alternatives(self, schema: Schema) -> list[Any] | None:
        """The schemas of which a value has one, also the only one that a reference names; None: there are none."""
        choices = alternatives_in(schema)
        if choices is not None:
            self._look(len(choices))
            return choices
        return [self._references.target(schema["$ref"])] if isinstance(schema.get("$ref"), str) else None

    def _is_reference(self, schema: Schema) -> bool:
        named = isinstance(schema.get("$ref"), str)
        return named and self.own(schema) is None and alternatives_in(schema) is None

    def _union(self, schema: Schema) -> set[str] | None:
        """The types of a schema and of its alternatives, each of which is looked at once."""
        found: set[str] = set()
        waiting: list[Any] = [schema]
        seen = set[int]()
        while waiting:
            each = waiting.pop()
            if not isinstance(each, dict) or len(seen) == MAX_SCHEMAS:
                return None
            if id(each) in seen:
                continue
            seen.add(id(each))
            self._look(1)
            types = self.own(each)
            choices = None if types is not None else self.alternatives(each)
            if types is not None:
                found |= types
            elif choices is not None:
                waiting += choices
            else:
                return None
        return found or None


def own_types(schema: Schema) -> set[str] | None:
    """The types that a schema itself names; None: none."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {each for each in types if isinstance(each, str)}
    if "const" in schema:
        return {JSON_TYPES[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        return {JSON_TYPES[type(each)] for each in schema["enum"]}
    return None


def alternatives_in(schema: Schema) -> list[Any] | None:
    """The schemas of which a value has one; None: there are none."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            choices: list[Any] = schema[key]
            return choices
    return None
