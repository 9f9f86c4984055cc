"""How many optional properties llguidance follows in JSON: any of them may be the next, and each has items in a row of
its parser, of which there may be 2000. A grammar with more compiles, and then fails in the middle of an output.
"""

from itertools import groupby
from typing import Any, NamedTuple

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Look, References, Schema, schemas_in

MAX_ITEMS = 1960  # in a row; what is around an object has some too
# Of an optional property, by what is required of its object: properties before it, behind it, none.
ITEMS_BEHIND_REQUIRED, ITEMS_BEFORE_REQUIRED, ITEMS_ALONE = 2, 3, 4
ITEMS_OF_OTHERS = 7  # of an object that may have other properties, where none is required first
MAX_DEPTH = 100  # of alternatives within each other, also by references
TOO_MANY = "have objects with more optional properties than can be followed"


def check_optional(document: Schema, references: References, look: Look) -> None:
    """Raise InvalidArgument naming `tools` if objects of a schema have more optional properties than can be followed.

    `references`: within the document. `look` is told of what is looked at.
    """
    items = _Items(references, look)
    waiting: list[Schema] = [document]
    while waiting:
        schema = waiting.pop()
        if max(items.later(schema), items.first(schema)) > MAX_ITEMS:
            raise InvalidArgument.field("tools", TOO_MANY)
        waiting += schemas_in(schema)
        waiting += schemas_of(schema.get("allOf"))


class _Parts(NamedTuple):
    """What a schema consists of. llguidance makes one object of what an object must match all of."""

    has_properties: bool  # of its own
    all_of: list[Schema]  # those of `allOf`, and what it refers to
    one_of: list[list[Schema]]  # lists of alternatives, of each of which it is one

    @property
    def are_merged(self) -> bool:
        """Whether there are several, whose properties are optional in one object."""
        return self.has_properties + len(self.all_of) + len(self.one_of) > 1


class _Beginning(NamedTuple):
    """Where a value of a schema begins."""

    alternatives: int
    items: int  # of all of them together

    def merged(self, other: "_Beginning") -> "_Beginning":
        """Of what is both: any alternative of the one with any of the other."""
        items = self.items * other.alternatives + other.items * self.alternatives
        return _Beginning(self.alternatives * other.alternatives, items)


NOTHING = _Beginning(1, 0)


class _Items:
    """Items in a row. Each schema is looked at once."""

    def __init__(self, references: References, look: Look) -> None:
        self._references = references
        self._look = look
        # By the identity of schemas.
        self._known_parts: dict[int, _Parts] = {}
        self._runs: dict[int, list[tuple[bool, int]]] = {}
        self._beginnings: dict[tuple[int, bool], _Beginning] = {}
        self._open: set[int] = set()  # that are being looked at
        self._circles = 0  # how often one of these was met again

    def later(self, schema: Schema) -> int:
        """Within an object of the schema, behind a property that is required."""
        parts = self._parts(schema)
        if parts.are_merged:
            return self._optional(schema, 0) * ITEMS_BEHIND_REQUIRED
        lengths = [length for is_required, length in self._runs_of(schema)[1:] if not is_required]
        return max(lengths, default=0) * ITEMS_BEHIND_REQUIRED

    def first(self, schema: Schema) -> int:
        """Where a value of the schema begins: of all alternatives."""
        return self._beginning(schema, is_alone=True, depth=0).items

    def _beginning(self, schema: Schema, *, is_alone: bool, depth: int) -> _Beginning:
        """`is_alone`: its properties are not merged with others."""
        key = id(schema), is_alone
        if key in self._beginnings:
            return self._beginnings[key]
        if id(schema) in self._open:  # alternatives of itself: they are counted already
            self._circles += 1
            return NOTHING
        self._open.add(id(schema))
        circles = self._circles
        beginning = self._of_parts(schema, is_alone=is_alone, depth=check_depth(depth))
        self._open.remove(id(schema))
        if circles == self._circles:  # what was left out may count when one begins elsewhere
            self._beginnings[key] = beginning
        return beginning

    def _of_parts(self, schema: Schema, *, is_alone: bool, depth: int) -> _Beginning:
        parts = self._parts(schema)
        is_alone = is_alone and not parts.are_merged
        beginning = _Beginning(1, self._own(schema, is_alone=is_alone)) if parts.has_properties else NOTHING
        for part in parts.all_of:
            beginning = beginning.merged(self._beginning(part, is_alone=is_alone, depth=depth))
        for alternatives in parts.one_of:
            each = [self._beginning(one, is_alone=is_alone, depth=depth) for one in alternatives]
            together = _Beginning(sum(one.alternatives for one in each), sum(one.items for one in each))
            beginning = beginning.merged(together)
        # What is too much stays too much: numbers of a product of a hundred parts would be long.
        return _Beginning(min(beginning.alternatives, MAX_ITEMS + 1), min(beginning.items, MAX_ITEMS + 1))

    def _own(self, schema: Schema, *, is_alone: bool) -> int:
        """Where an object of the schema's own properties begins."""
        runs = self._runs_of(schema)
        others = 0 if schema.get("additionalProperties") is False else ITEMS_OF_OTHERS
        if not is_alone:
            return others + ITEMS_ALONE * sum(length for is_required, length in runs if not is_required)
        is_required, length = runs[0]
        if is_required:
            return 1
        return others + length * (ITEMS_ALONE if len(runs) == 1 else ITEMS_BEFORE_REQUIRED)

    def _optional(self, schema: Schema, depth: int) -> int:
        """How many optional properties one object of the schema has at most."""
        parts = self._parts(schema)
        if id(schema) in self._open:
            return 0
        self._open.add(id(schema))
        depth = check_depth(depth)
        count = sum(length for is_required, length in self._runs_of(schema) if not is_required)
        count += sum(self._optional(part, depth) for part in parts.all_of)
        for alternatives in parts.one_of:
            count += max((self._optional(one, depth) for one in alternatives), default=0)
        self._open.remove(id(schema))
        return count

    def _parts(self, schema: Schema) -> _Parts:
        if id(schema) not in self._known_parts:
            self._known_parts[id(schema)] = self._find_parts(schema)
        return self._known_parts[id(schema)]

    def _find_parts(self, schema: Schema) -> _Parts:
        has_properties = isinstance(schema.get("properties"), dict) and bool(schema["properties"])
        all_of = list(filter(_says_something, schemas_of(schema.get("allOf"))))
        if isinstance(reference := schema.get("$ref"), str):
            all_of += schemas_of([self._references.target(reference)])
        one_of = [alternatives for name in ("anyOf", "oneOf") if (alternatives := schemas_of(schema.get(name)))]
        self._look(1 + len(all_of) + sum(map(len, one_of)))
        return _Parts(has_properties, all_of, one_of)

    def _runs_of(self, schema: Schema) -> list[tuple[bool, int]]:
        """The properties in their order: whether some that follow each other are required, and how many they are."""
        if id(schema) not in self._runs:
            properties, required = schema.get("properties"), schema.get("required")
            properties = properties if isinstance(properties, dict) else {}  # it may be no schema
            required = required if isinstance(required, list) else []
            self._look(len(properties) + len(required))
            names = {name for name in required if isinstance(name, str)}
            runs = groupby(name in names for name in properties)
            self._runs[id(schema)] = [(is_required, sum(1 for _ in run)) for is_required, run in runs]
        return self._runs[id(schema)]


def check_depth(depth: int) -> int:
    """The depth of what is within. Raises InvalidArgument naming `tools` if it is too large."""
    if depth >= MAX_DEPTH:
        raise InvalidArgument.field("tools", f"have schemas that name others, one after another, {MAX_DEPTH} times")
    return depth + 1


def schemas_of(values: Any) -> list[Schema]:
    """The schemas in what should be a list of them."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _says_something(schema: Schema) -> bool:
    """Whether a schema says which properties an object has."""
    return any(schema.get(name) for name in ("properties", "allOf", "anyOf", "oneOf", "$ref"))
