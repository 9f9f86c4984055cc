"""JSON schemas as grammars of tools and of HTTP's structured output read them.

JSON is written as models were trained to write it, with one space behind ":" and "," and none elsewhere, so that a
model cannot go on with white space. An object whose schema lists properties has no others, unless the schema says
that it may: authors of schemas mean that, though the standard says otherwise, and a model that may invent names does
not stop. What comes out is valid by the schema as it was given.

llguidance follows most of the standard, and refuses a schema with anything else (`not`, `uniqueItems`, alternatives
that overlap, …). Where nobody said that an output must match its schema (`strict`), what cannot be followed is left out
of it instead: the output matches the rest.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
# Told of how many schemas, keys or values are looked at next; it raises what it likes if these are too many.
Look = Callable[[int], None]
STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Options of llguidance: leave out keywords and formats that it does not follow, and take oneOf for anyOf.
LENIENT: dict[str, Any] = {"lenient": True, "coerce_one_of": True}
# What llguidance's regular expressions do not have: looks around, references back, bounds of words and lines.
UNREADABLE = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9bBkAzZG]")
# With one of these anywhere, an object may have to match several schemas, each of which lists properties of its own.
COMBINING = frozenset(
    (
        *("allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "propertyNames", "$dynamicRef"),
    )
)
# With one of these beside its properties, an object has properties that are listed elsewhere.
ELSEWHERE = frozenset(("anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties"))
SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")
ONE_SCHEMA = ("items", "additionalProperties", "contains")
# Of a document: what its schemas refer to, and by which address.
DOCUMENT_KEYS = frozenset(("$defs", "definitions", "$schema", "$id"))
MAX_DEPTH = 64  # of schemas in schemas; a schema that is deeper stays as it is


def written_tightly(schema: Schema, *, is_strict: bool = True) -> dict[str, Any]:
    """The schema with closed objects and one space between parts. Its own options for white space are kept. Unless it
    is strict, what cannot be followed is left out.
    """
    closed = closed_objects(schema)
    options = closed.get("x-guidance", STYLE)
    if is_strict or not isinstance(options, dict):
        return {**closed, "x-guidance": options}
    return {**readable(closed), "x-guidance": {**options, **LENIENT}}


def readable(schema: Schema) -> dict[str, Any]:
    """The schema without regular expressions that llguidance cannot read; nor with what they say of properties."""
    copy = dict(schema)
    if is_unreadable(copy.get("pattern")):
        del copy["pattern"]
    by_pattern = copy.get("patternProperties")
    if isinstance(by_pattern, dict) and any(map(is_unreadable, by_pattern)):
        del copy["patternProperties"]
        copy.pop("additionalProperties", None)  # which would refuse properties that a pattern allows
    change_schemas_in(copy, readable)
    return copy


def is_unreadable(pattern: object) -> bool:
    """Whether this is a regular expression that llguidance cannot read, as far as that is seen at once."""
    return isinstance(pattern, str) and UNREADABLE.search(pattern) is not None


def closed_objects(schema: Schema) -> dict[str, Any]:
    """The schema, in which objects that list their properties have no others. It is unchanged if that is not sure to
    leave something that is valid.
    """
    if is_combined(schema, 0):
        return dict(schema)
    return closed(schema)


def closed(schema: Schema) -> dict[str, Any]:
    """A schema and those in it, closed."""
    copy = dict(schema)
    change_schemas_in(copy, closed)
    if lists_its_properties(schema):
        copy["additionalProperties"] = False
    return copy


def change_schemas_in(schema: dict[str, Any], change: Callable[[Schema], Schema]) -> None:
    """Put what `change` makes of the schemas that stand in a schema in their places. Their values are not changed."""
    for name in SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), dict):
            schema[name] = {key: change(each) if isinstance(each, dict) else each for key, each in schema[name].items()}
    for name in (*SCHEMA_LISTS, "allOf"):
        if isinstance(schema.get(name), list):
            schema[name] = [change(each) if isinstance(each, dict) else each for each in schema[name]]
    for name in ONE_SCHEMA:
        if isinstance(schema.get(name), dict):
            schema[name] = change(schema[name])


def lists_its_properties(schema: Schema) -> bool:
    """Whether an object of this schema can have the properties alone that are listed, and none is said to follow."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not ELSEWHERE.isdisjoint(schema):
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(least, int) or least > len(properties):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def is_combined(schema: Schema, depth: int) -> bool:
    """Whether objects may have to match several schemas at once, or the schema is too deep to say."""
    if depth > MAX_DEPTH or not COMBINING.isdisjoint(schema):
        return True
    if "properties" in schema and not {"anyOf", "oneOf", "$ref"}.isdisjoint(schema):
        return True
    return any(is_combined(each, depth + 1) for each in schemas_in(schema))


def schemas_in(schema: Schema) -> Iterator[Schema]:
    """The schemas that stand in a schema."""
    for name in SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from (each for each in schema[name].values() if isinstance(each, dict))
    for name in SCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from (each for each in schema[name] if isinstance(each, dict))
    for name in ONE_SCHEMA:
        if isinstance(schema.get(name), dict):
            yield schema[name]


def referred(reference: str, root: Schema) -> Any:
    """The schema that `#` or `#/…` names within `root`; None if it is not there."""
    pointer = unquote(reference.removeprefix("#"))
    if not reference.startswith("#") or not (pointer.startswith("/") or not pointer):
        return None
    found: Any = root
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


class References:
    """What the references within one schema name. Each is followed once, however many parts of the schema have it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}

    def target(self, reference: str) -> Any:
        """The schema that `#` or `#/…` names; None if it is not there."""
        if reference not in self._targets:
            self._targets[reference] = referred(reference, self._root)
        return self._targets[reference]


def standalone(schema: Schema, references: References, look: Look) -> dict[str, Any]:
    """A schema, a part of that of the references, as a document of its own: what it refers to is in its `$defs`.
    References to nothing stay as they are.

    One schema may be named in many ways, and stands there once. But those inside of each other are copied as often as
    they are named: `look` is asked before each is.
    """
    names: dict[int, str] = {}  # in `$defs`, by the identity of what is named
    waiting: list[Any] = []  # what is named, and not yet there

    def moved(part: Schema) -> dict[str, Any]:
        look(size_of(part))
        copy = {key: each for key, each in part.items() if key not in DOCUMENT_KEYS}
        change_schemas_in(copy, moved)
        reference = part.get("$ref")
        target = references.target(reference) if isinstance(reference, str) else None
        if target is not None:
            if id(target) not in names:
                names[id(target)] = str(len(names))
                waiting.append(target)
            copy["$ref"] = f"#/$defs/{names[id(target)]}"
        return copy

    document = moved(schema)
    definitions: dict[str, Any] = {}
    while waiting:
        target = waiting.pop()
        definitions[names[id(target)]] = moved(target) if isinstance(target, dict) else target
    return {**document, "$defs": definitions} if definitions else document


def size_of(schema: Schema) -> int:
    """How much a schema has beside what is in the schemas in it: itself, its keys, members of their values."""
    return 1 + len(schema) + sum(len(each) for each in schema.values() if isinstance(each, dict | list))
