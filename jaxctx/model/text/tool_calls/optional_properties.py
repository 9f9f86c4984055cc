"""How many optional properties llguidance follows in JSON: any of them may be the next, and each has items in a row of
its parser, of which there may be 2000. A grammar with more compiles, and then fails in the middle of an output.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import DOCUMENT_KEYS, Look, References, Schema, schemas_in

MAX_ITEMS = 1960  # in a row; what is around an object has some too
# Of an optional property, by what is required of its object: properties before it, behind it, none.
ITEMS_BEHIND_REQUIRED, ITEMS_BEFORE_REQUIRED, ITEMS_ALONE = 2, 3, 4
ITEMS_OF_ANOTHER = 1  # alternative, behind what is required of several
ITEMS_OF_OTHERS = 7  # of an object that may have other properties, where none is required first
MAX_DEPTH = 100  # of objects that are merged with alternatives, within each other
MAX_REFERENCES = 8  # one after the other, to the values of a property
TOO_MANY = "an object has more optional properties than can be followed"


def check_optional(document: Schema, references: References, look: Look, field: str = "tools") -> None:
    """Raise InvalidArgument naming `field` if objects of a schema have more optional properties than can be followed.

    `references`: within the document; what nothing refers to does not count. `look` is told of what is looked at.
    """
    items = _Items(references, look, field)
    waiting, seen = [document], set[int]()
    while waiting:
        schema = waiting.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if max(items.later(schema), items.first(schema)) > MAX_ITEMS:
            raise InvalidArgument.field(field, TOO_MANY)
        waiting += schemas_in({name: each for name, each in schema.items() if name not in DOCUMENT_KEYS})
        waiting += schemas_of(schema.get("allOf"))
        if isinstance(reference := schema.get("$ref"), str):
            waiting += schemas_of([references.target(reference)])


class _Parts(NamedTuple):
    """What an object of a schema must match all of; llguidance makes one object of it.

    A schema is here what it refers to and what its `allOf` names too, each once.
    """

    with_properties: tuple[Schema, ...]
    one_of: tuple[tuple[Schema, ...], ...]  # lists of alternatives, of each of which it is one

    @property
    def are_merged(self) -> bool:
        """Whether there are several, whose properties are optional in one object."""
        return len(self.with_properties) + len(self.one_of) > 1

    @property
    def is_choice(self) -> bool:
        """Whether it is one of some alternatives, and nothing else."""
        return not self.with_properties and len(self.one_of) == 1


class _Beginning(NamedTuple):
    """Where a value of a schema begins."""

    alternatives: int
    items: int  # of all of them together

    def merged(self, other: "_Beginning") -> "_Beginning":
        """Of what is both: any alternative of the one with any of the other."""
        items = self.items * other.alternatives + other.items * self.alternatives
        return _Beginning(self.alternatives * other.alternatives, items).limited()

    def limited(self) -> "_Beginning":
        """What is too much stays too much: numbers of a product of a hundred parts would be long."""
        return _Beginning(min(self.alternatives, MAX_ITEMS + 1), min(self.items, MAX_ITEMS + 1))


NOTHING = _Beginning(1, 0)


class _Required(NamedTuple):
    """A property that an object must have."""

    name: str
    values: frozenset[str] | None  # JSON of those that it may have; None: any


class _Run(NamedTuple):
    """Properties that follow each other, all required or all optional."""

    length: int
    required: tuple[_Required, ...]  # empty if they are optional


class _LaterRun(NamedTuple):
    """Optional properties behind required ones."""

    before: tuple[_Required, ...]
    items: int


class _Items:
    """Items in a row. Each schema is looked at once, but for alternatives that are merged with themselves."""

    def __init__(self, references: References, look: Look, field: str) -> None:
        self._references = references
        self._look = look
        self._field = field  # of errors
        # By the identity of schemas, and of tuples of them.
        self._known_parts: dict[int, _Parts] = {}
        self._lists: dict[tuple[int, str], tuple[Schema, ...]] = {}
        self._runs: dict[int, list[_Run]] = {}
        self._beginnings: dict[tuple[int, bool], _Beginning] = {}
        self._later_of_choices: dict[int, int] = {}
        self._flat: dict[int, list[Schema]] = {}
        self._most_optional: dict[int, int] = {}
        self._open: set[int] = set()  # merged ones that are being looked at
        self._circles = 0  # how often one of these was met again

    def later(self, schema: Schema) -> int:
        """Within an object of the schema, behind a property that is required: of all alternatives that a text can still
        be one of.
        """
        parts = self._parts(schema)
        if parts.are_merged:
            return self._optional_of_one(schema) * ITEMS_BEHIND_REQUIRED
        if not parts.is_choice:
            return self._most_together([self._later_runs(each) for each in parts.with_properties])
        key = id(parts.one_of[0])
        if key not in self._later_of_choices:
            each = [self._later_runs(one) for one in self._alternatives(parts.one_of[0])]
            self._later_of_choices[key] = self._most_together(each)
        return self._later_of_choices[key]

    def _later_runs(self, schema: Schema) -> list[_LaterRun]:
        """Runs of optional properties behind required ones, of one that is no choice of others."""
        parts = self._parts(schema)
        if parts.are_merged:
            return []  # it is counted where it is looked at by itself
        found: list[_LaterRun] = []
        before: tuple[_Required, ...] = ()
        for run in (run for each in parts.with_properties for run in self._runs_of(each)):
            if run.required:
                before += run.required
            elif before:
                found.append(_LaterRun(before, run.length * ITEMS_BEHIND_REQUIRED + ITEMS_OF_ANOTHER))
        return found

    def _most_together(self, alternatives: Sequence[list[_LaterRun]]) -> int:
        """Items of the optional properties that may be next behind the same text, where they are most.

        Those have the same properties before them, and each of these a value that all of them may have. For each
        property its values tell how many that can be at most; what tells them apart best counts.
        """
        by_names: dict[tuple[str, ...], list[_LaterRun]] = {}
        for run in itertools.chain(*alternatives):
            by_names.setdefault(tuple(each.name for each in run.before), []).append(run)
        most = ITEMS_OF_ANOTHER
        for names, runs in by_names.items():
            if len(runs) == 1:
                most = max(most, runs[0].items)
            else:
                most = max(most, min(self._most_of_a_value(runs, place) for place in range(len(names))))
        return most - ITEMS_OF_ANOTHER

    def _most_of_a_value(self, runs: Sequence[_LaterRun], place: int) -> int:
        """Items of the runs that may follow one value of the property at a place before them."""
        of_any, by_value = 0, Counter[str]()
        for run in runs:
            values = run.before[place].values
            self._look(1 if values is None else len(values))
            if values is None:
                of_any += run.items
            else:
                by_value.update(dict.fromkeys(values, run.items))
        return of_any + max(by_value.values(), default=0)

    def _values_of(self, schema: Any) -> frozenset[str] | None:
        """JSON of the values of a schema that lists them; None if it may have others."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict):
                return None
            if "const" in schema:
                return frozenset((json.dumps(schema["const"], sort_keys=True),))
            if isinstance(values := schema.get("enum"), list):
                return frozenset(json.dumps(value, sort_keys=True) for value in values)
            reference = schema.get("$ref")
            schema = self._references.target(reference) if isinstance(reference, str) else None
        return None

    def first(self, schema: Schema) -> int:
        """Where a value of the schema begins: of all alternatives."""
        parts = self._parts(schema)
        found = self._beginning(parts.one_of[0], is_alone=True) if parts.is_choice else self._of_one(schema, True)
        return found.items

    def _alternatives(self, schemas: tuple[Schema, ...]) -> list[Schema]:
        """What a value that is one of these may be, once each: schemas that are no choice of others."""
        key = id(schemas)
        if key not in self._flat:
            self._flat[key] = self._find_alternatives(schemas)
        return self._flat[key]

    def _find_alternatives(self, schemas: tuple[Schema, ...]) -> list[Schema]:
        found: dict[int, Schema] = {}
        waiting, seen = [*schemas], set[int]()
        while waiting:
            schema = waiting.pop()
            self._look(1)
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            parts = self._parts(schema)
            if parts.is_choice:
                waiting += parts.one_of[0]
            elif parts.are_merged or not parts.with_properties:
                found[id(schema)] = schema
            else:
                found[id(parts.with_properties[0])] = schema  # by whatever references
        return [*found.values()]

    def _beginning(self, schemas: tuple[Schema, ...], *, is_alone: bool) -> _Beginning:
        """Of one of these. `is_alone`: its properties are not merged with others."""
        key = id(schemas), is_alone
        if key not in self._beginnings:
            circles = self._circles
            each = [self._of_one(one, is_alone) for one in self._alternatives(schemas)]
            found = _Beginning(sum(one.alternatives for one in each), sum(one.items for one in each)).limited()
            if circles != self._circles:  # what was left out may count when one begins elsewhere
                return found
            self._beginnings[key] = found
        return self._beginnings[key]

    def _of_one(self, schema: Schema, is_alone: bool) -> _Beginning:
        """Of one that is no choice of others."""
        parts = self._parts(schema)
        if id(schema) in self._open:  # a part of itself: it is counted already
            self._circles += 1
            return NOTHING
        is_alone = is_alone and not parts.are_merged
        beginning = _Beginning(1, sum(self._own(each, is_alone=is_alone) for each in parts.with_properties)).limited()
        self._begin(schema)
        for alternatives in parts.one_of:
            beginning = beginning.merged(self._beginning(alternatives, is_alone=False))
        self._open.remove(id(schema))
        return beginning

    def _begin(self, schema: Schema) -> None:
        """Look at what is within. Raises InvalidArgument naming the field if it is within too many others."""
        self._look(1)
        if len(self._open) >= MAX_DEPTH:
            raise InvalidArgument.field(self._field, f"have alternatives within each other, {MAX_DEPTH} times")
        self._open.add(id(schema))

    def _own(self, schema: Schema, *, is_alone: bool) -> int:
        """Where an object of the schema's own properties begins."""
        runs = self._runs_of(schema)
        others = 0 if schema.get("additionalProperties") is False else ITEMS_OF_OTHERS
        if not is_alone:
            return others + ITEMS_ALONE * sum(run.length for run in runs if not run.required)
        if runs[0].required:
            return 1
        return others + runs[0].length * (ITEMS_ALONE if len(runs) == 1 else ITEMS_BEFORE_REQUIRED)

    def _optional_of_one(self, schema: Schema) -> int:
        """How many optional properties one object has at most."""
        if id(schema) in self._most_optional:
            return self._most_optional[id(schema)]
        if id(schema) in self._open:
            self._circles += 1
            return 0
        parts, circles = self._parts(schema), self._circles
        runs = [run for each in parts.with_properties for run in self._runs_of(each)]
        count = sum(run.length for run in runs if not run.required)
        self._begin(schema)
        for alternatives in parts.one_of:
            count += max((self._optional_of_one(one) for one in self._alternatives(alternatives)), default=0)
        self._open.remove(id(schema))
        count = min(count, MAX_ITEMS + 1)
        if circles == self._circles:
            self._most_optional[id(schema)] = count
        return count

    def _parts(self, schema: Schema) -> _Parts:
        if id(schema) not in self._known_parts:
            self._known_parts[id(schema)] = self._find_parts(schema)
        return self._known_parts[id(schema)]

    def _find_parts(self, schema: Schema) -> _Parts:
        with_properties: list[Schema] = []
        one_of: list[tuple[Schema, ...]] = []
        waiting, seen = [schema], set[int]()
        while waiting:
            each = waiting.pop()
            self._look(1)
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each.get("properties"), dict) and each["properties"]:
                with_properties.append(each)
            for name in ("anyOf", "oneOf"):
                if alternatives := self._alternatives_of(each, name):
                    one_of.append(alternatives)
            waiting += schemas_of(each.get("allOf"))
            if isinstance(reference := each.get("$ref"), str):
                waiting += schemas_of([self._references.target(reference)])
        return _Parts(tuple(with_properties), tuple(one_of))

    def _alternatives_of(self, schema: Schema, name: str) -> tuple[Schema, ...]:
        """The same tuple for all who refer to the schema."""
        key = id(schema), name
        if key not in self._lists:
            self._lists[key] = tuple(schemas_of(schema.get(name)))
        return self._lists[key]

    def _runs_of(self, schema: Schema) -> list[_Run]:
        """The properties in their order."""
        if id(schema) not in self._runs:
            properties, required = schema.get("properties"), schema.get("required")
            properties = properties if isinstance(properties, dict) else {}  # it may be no schema
            required = required if isinstance(required, list) else []
            self._look(len(properties) + len(required))
            names = {name for name in required if isinstance(name, str)}
            runs: list[_Run] = []
            for is_required, group in itertools.groupby(properties, key=names.__contains__):
                listed = [*group]
                values = [_Required(name, self._values_of(properties[name])) for name in listed if is_required]
                runs.append(_Run(len(listed), tuple(values)))
            self._runs[id(schema)] = runs
        return self._runs[id(schema)]


def schemas_of(values: Any) -> list[Schema]:
    """The schemas in what should be a list of them."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
