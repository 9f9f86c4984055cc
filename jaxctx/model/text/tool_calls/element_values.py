"""What the texts of elements mean: the types that a schema allows say whether 5 is a number or a text.

Schemas come from clients, and refer to each other as they like: each is looked at once, and of one value so many.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxctx.model.text.json_schemas import Schema, referred
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


def types_of(schema: Any, root: Schema) -> set[str] | None:
    """The types of JSON that a schema, a part of `root`, allows; None: not known, or any."""
    found: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict) or len(seen) == MAX_SCHEMAS:
            return None
        if id(each) in seen:
            continue
        seen.add(id(each))
        types, choices = own_types(each), alternatives_in(each)
        if types is not None:
            found |= types
        elif choices is not None:
            waiting += choices
        elif isinstance(each.get("$ref"), str):
            waiting.append(referred(each["$ref"], root))
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
            return list(schema[key])
    return None
