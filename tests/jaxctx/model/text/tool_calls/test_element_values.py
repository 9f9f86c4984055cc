"""Types that schemas allow, however they refer to each other, and what a text means by them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.model.text.json_schemas import References
from jaxctx.model.text.tool_calls import element_values
from jaxctx.model.text.tool_calls.element_values import MAX_SCHEMAS, SchemaTypes, argument_text

DEFINITIONS: dict[str, Any] = {
    "whole": {"type": "integer"},
    "again": {"$ref": "#/$defs/again"},
    "tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/whole"}]},
}


def types_of(schema: Any, root: Any) -> set[str] | None:
    return SchemaTypes(References(root)).allowed(schema)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"enum": ["a", None, True]}, {"string", "null", "boolean"}),
        ({"$ref": "#/$defs/whole", "description": "how many"}, {"integer"}),
        ({"$ref": "#/$defs/tree"}, {"integer", "null"}),
        ({"$ref": "#/$defs/tree/anyOf/0"}, {"null"}),
        ({"$ref": "#"}, {"object"}),
        ({"oneOf": [{"type": "string"}, {"anyOf": [{"$ref": "#/$defs/whole"}]}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"anyOf": [{"type": "string"}, True]}, None),
        ({"anyOf": []}, None),
        ({"anyOf": 5}, None),
        ({"$ref": "#/$defs/again"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": "#/$defs/tree/anyOf/9"}, None),
        ({"$ref": "#whole"}, None),
        ({"$ref": "https://example.com/x"}, None),
        ({"$ref": 5}, None),
        ({}, None),
        (True, None),
        (5, None),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str] | None) -> None:
    assert types_of(schema, {"type": "object", "$defs": DEFINITIONS}) == types


def test_every_schema_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often others refer to it: by the ways to it there would be 10**16 here."""
    depth, branching = 16, 10
    root: Any = {"$defs": {str(depth): {"type": "integer"}}}
    for level in range(depth):
        root["$defs"][str(level)] = {"anyOf": [{"$ref": f"#/$defs/{level + 1}"} for _ in range(branching)]}
    looks = 0
    own_types = element_values.own_types

    def counted(schema: Any) -> set[str] | None:
        nonlocal looks
        looks += 1
        assert looks < 1000
        return own_types(schema)

    monkeypatch.setattr(element_values, "own_types", counted)
    assert types_of({"$ref": "#/$defs/0"}, root) == {"integer"}
    assert looks <= depth * (branching + 1) + 2


def test_so_many_schemas_are_looked_at() -> None:
    chain: Any = {str(level): {"$ref": f"#/{level + 1}"} for level in range(MAX_SCHEMAS - 1)}
    chain |= {str(MAX_SCHEMAS - 1): {"type": "integer"}}
    assert types_of(chain["0"], chain) == {"integer"}
    assert types_of({"$ref": "#/0"}, chain) is None
    # Whatever was asked before.
    types, too_long = SchemaTypes(References(chain)), {"$ref": "#/0"}
    assert types.allowed(too_long) is None
    assert types.allowed(chain["0"]) == types.allowed(chain["1"]) == {"integer"}
    assert types.allowed(too_long) is None


def test_a_schema_that_many_refer_to_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values, references = 1000, 100
    shared: Any = {"enum": list(range(values))}
    root: Any = {"properties": [{"$ref": "#/$defs/a"} for _ in range(references)], "$defs": {"a": shared}}
    looked: list[int] = []
    types = SchemaTypes(References(root), looked.append)
    own_types, named = element_values.own_types, list[Any]()
    monkeypatch.setattr(element_values, "own_types", lambda schema: named.append(schema) or own_types(schema))
    assert all(types.allowed(schema) == {"integer"} for schema in root["properties"])
    assert sum(schema is shared for schema in named) == 1
    assert values < sum(looked) <= values + 3 * references + 2


@pytest.mark.parametrize(
    ("written", "types", "read"),
    [
        ("1e999", {"number"}, "1e999"),
        (" [-1e999] ", {"array"}, "[-1e999]"),
        ("1e999", {"string"}, '"1e999"'),
        ("1e999", {"string", "number"}, '"1e999"'),
        ("1e999", None, '"1e999"'),
        ("1e999x", {"number"}, '"1e999x"'),
        ("NaN", {"number"}, '"NaN"'),
        ('["\\ud800"]', {"array"}, '["\\ud800"]'),
        ("1", {"string", "integer"}, '"1"'),
        ("null", {"string", "null"}, "null"),
        ("{'a': True}", {"object"}, '{"a": true}'),
    ],
)
def test_what_a_text_means(written: str, types: set[str] | None, read: str) -> None:
    assert argument_text(written, types) == read
