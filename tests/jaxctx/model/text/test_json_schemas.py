"""Objects that list their properties have no others, and only where something valid is left."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from jaxctx.model.text import json_schemas
from jaxctx.model.text.json_schemas import (
    LENIENT,
    MAX_DEPTH,
    STYLE,
    References,
    closed_objects,
    readable,
    referred,
    standalone,
    written_tightly,
)

INTEGER = {"type": "integer"}


def of(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": INTEGER}, **fields}


def test_an_object_and_those_in_it_are_closed() -> None:
    schema = of(properties={"a": of(), "b": {"type": "array", "items": of()}}, **{"$defs": {"c": {"anyOf": [of()]}}})
    closed = closed_objects(schema)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["items"]["additionalProperties"] is False
    assert closed["$defs"]["c"]["anyOf"][0]["additionalProperties"] is False
    assert "additionalProperties" not in schema  # which is the caller's


def test_an_object_without_properties_has_none() -> None:
    assert closed_objects({"type": "object", "properties": {}})["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        of(additionalProperties=True),
        of(additionalProperties=INTEGER),
        of(patternProperties={"^x": INTEGER}),
        of(required=["b"]),
        of(minProperties=2),
        of(allOf=[{"properties": {"b": INTEGER}}]),
        of(anyOf=[{"properties": {"b": INTEGER}}]),
        {"allOf": [of(), {"properties": {"b": INTEGER}}]},
        {"$defs": {"c": of()}, "properties": {"b": INTEGER}, "$ref": "#/$defs/c"},
        of(unevaluatedProperties=False),
        {"not": of()},
        of(properties=5),
        of(required=5),
    ],
)
def test_what_may_have_others_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed_objects(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = of(properties={"not": INTEGER, "allOf": INTEGER})
    assert closed_objects(schema) == {**schema, "additionalProperties": False}


def test_a_schema_that_is_too_deep_stays_as_it_is() -> None:
    schema: dict[str, Any] = of()
    for _ in range(MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    assert closed_objects(schema) == schema


def test_its_own_options_for_white_space_are_kept() -> None:
    assert written_tightly(of())["x-guidance"] == STYLE
    own = {"whitespace_flexible": True}
    assert written_tightly(of(**{"x-guidance": own}))["x-guidance"] == own
    assert written_tightly(of(**{"x-guidance": own}), is_strict=False)["x-guidance"] == {**own, **LENIENT}


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^(?!x).*$", r"(?=.*\d)a", r"(?<=a)b", r"(?<!a)b", r"(a)\1"),
        *(r"(?P<n>a)(?P=n)", r"\bfoo\b", r"\Aa\Z", r"(?<n>a)\k<n>"),
    ],
)
def test_what_is_not_strict_loses_patterns_that_cannot_be_read(pattern: str) -> None:
    text = {"type": "string", "maxLength": 5, "pattern": pattern}
    schema = of(
        properties={"a": text, "pattern": {"anyOf": [text]}},
        allOf=[{"items": text}],
        **{"$defs": {"c": of(patternProperties={pattern: text, "^b": text}, additionalProperties=False)}},
    )
    found = written_tightly(schema, is_strict=False)
    plain = {"type": "string", "maxLength": 5}
    assert found["properties"] == {"a": plain, "pattern": {"anyOf": [plain]}}
    assert found["allOf"] == [{"items": plain}]
    assert found["$defs"]["c"] == of()
    assert found["x-guidance"] == {**STYLE, **LENIENT}
    assert written_tightly(schema) == {**schema, "x-guidance": STYLE}


@pytest.mark.parametrize("pattern", ["^[a-z]+$", r"(?:a|b)\d\.\w{2,3}", r"(?P<n>a)(?<m>b)", r"a\\d"])
def test_patterns_that_can_be_read_stay(pattern: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"type": "string", "pattern": pattern}}}
    assert readable(schema) == schema


ROOT: dict[str, Any] = {
    "$id": "https://example.com/root",
    "properties": {"a": {"$ref": "#"}, "b/ ~": INTEGER, "c": {"anyOf": [INTEGER, True]}},
    "$defs": {"x": {"items": {"$ref": "#/$defs/x"}}, "unused": INTEGER},
}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("#", ROOT),
        ("#/properties/c/anyOf/0", INTEGER),
        ("#/properties/c/anyOf/1", True),
        ("#/properties/b~1%20~0", INTEGER),
        ("#/properties/c/anyOf/2", None),
        ("#/properties/c/anyOf/-1", None),
        ("#/properties/c/anyOf/" + "9" * 5000, None),
        ("#/properties/c/anyOf/0/type/x", None),
        ("#x", None),
        ("x", None),
        ("/properties", None),
    ],
)
def test_what_a_reference_names(reference: str, found: Any) -> None:
    assert referred(reference, ROOT) == found


def alone(schema: Any, root: Any = ROOT) -> dict[str, Any]:
    return standalone(schema, References(root), lambda _: None)


def test_a_part_has_what_it_refers_to() -> None:
    assert alone(INTEGER) == INTEGER
    assert alone({"$ref": []}) == {"$ref": []}
    assert alone({"$ref": "#/$defs/none", "enum": [{"$ref": "#"}]}) == {
        "$ref": "#/$defs/none",
        "enum": [{"$ref": "#"}],
    }
    assert alone({"items": {"$ref": "#/$defs/x"}, "$defs": {"0": INTEGER}}) == {
        "items": {"$ref": "#/$defs/0"},
        "$defs": {"0": {"items": {"$ref": "#/$defs/0"}}},
    }
    assert alone({"$ref": "#", "title": "T"}) == {
        "$ref": "#/$defs/0",
        "title": "T",
        "$defs": {"0": {"properties": {**ROOT["properties"], "a": {"$ref": "#/$defs/0"}}}},
    }
    assert alone({"allOf": [{"$ref": "#/properties/c/anyOf/1"}]})["$defs"] == {"0": True}
    assert ROOT["properties"]["a"] == {"$ref": "#"}  # which is the caller's


def test_what_is_named_in_many_ways_is_copied_once() -> None:
    """A body of 36 KB took 10 s, and one of 74 KB 51 s and 0.9 GB."""
    spellings = ["#/$defs/" + "".join(letters) for letters in product(("a", "%61"), repeat=4)]
    names = [{"$ref": spelling} for spelling in spellings]
    root = {"$defs": {"aaaa": {"prefixItems": names}}}
    looked: list[int] = []
    found = standalone({"items": names[0]}, References(root), looked.append)
    assert found == {"items": {"$ref": "#/$defs/0"}, "$defs": {"0": {"prefixItems": [{"$ref": "#/$defs/0"}] * 16}}}
    assert len(looked) == 1 + 1 + 1 + 16


def test_schemas_inside_of_each_other_are_looked_at_before_they_are_copied() -> None:
    """Each that is named has all that are in it, so that they are many together."""
    depth = 50
    inner: dict[str, Any] = {"type": "array", "items": INTEGER, "enum": [[]] * 100}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    names = [{"$ref": "#/$defs/a" + "/items" * level} for level in range(depth + 1)]
    root = {"$defs": {"a": inner}}
    looked: list[int] = []
    standalone({"prefixItems": names}, References(root), looked.append)
    assert sum(looked) > 100 * depth + 3 * depth**2 / 2

    def stop(count: int) -> None:
        looked.append(count)
        if sum(looked) > 1000:
            raise OverflowError

    looked.clear()
    with pytest.raises(OverflowError):
        standalone({"prefixItems": names}, References(root), stop)
    assert sum(looked) <= 1000 + 105


def test_a_reference_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []

    def counted(reference: str, root: Any) -> Any:
        followed.append(reference)
        return referred(reference, root)

    monkeypatch.setattr(json_schemas, "referred", counted)
    references = References(ROOT)
    for reference in ("#/$defs/unused", "#/none") * 3:
        assert references.target(reference) == (INTEGER if reference == "#/$defs/unused" else None)
    assert followed == ["#/$defs/unused", "#/none"]
