"""How many optional properties llguidance follows in JSON: any of them may be the next, and each has items in a row of
its parser, of which there may be 2000. A grammar with more compiles, and then fails in the middle of an output.
"""

from itertools import groupby
from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Look, References, Schema, schemas_in

MAX_ITEMS = 1960  # in a row; what is around an object has some too
# Of an optional property, by what is required of its object: properties before it, behind it, none.
ITEMS_BEHIND_REQUIRED, ITEMS_BEFORE_REQUIRED, ITEMS_ALONE = 2, 3, 4


def check_optional(document: Schema, references: References, look: Look) -> None:
    """Raise InvalidArgument naming `tools` if objects of a schema have more optional properties than can be followed.

    `references`: within the document. `look` is told of what is looked at.
    """
    items = _Items(references, look)
    waiting: list[Schema] = [document]
    while waiting:
        schema = waiting.pop()
        if max(items.later(schema), items.of_alternatives(schema)) > MAX_ITEMS:
            raise InvalidArgument.field("tools", "have objects with more optional properties than can be followed")
        waiting += schemas_in(schema)
        waiting += schemas_of(schema.get("allOf"))


class _Items:
    """Items in a row. Each schema is looked at once."""

    def __init__(self, references: References, look: Look) -> None:
        self._references = references
        self._look = look
        self._runs: dict[int, list[tuple[bool, int]]] = {}  # by the identity of schemas

    def later(self, schema: Schema) -> int:
        """Within an object of the schema itself, behind a property that is required."""
        lengths = [length for is_required, length in self._runs_of(schema)[1:] if not is_required]
        return max(lengths, default=0) * ITEMS_BEHIND_REQUIRED

    def of_alternatives(self, schema: Schema) -> int:
        """Where a value of the schema begins: of all alternatives, each of which counts once."""
        count, waiting, seen = 0, [schema], set[int]()
        while waiting and count <= MAX_ITEMS:
            each = waiting.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            count += self._first(each)
            inner = schemas_of(each.get("anyOf")) + schemas_of(each.get("oneOf"))
            reference = each.get("$ref")
            inner += schemas_of([self._references.target(reference)] if isinstance(reference, str) else [])
            self._look(1 + len(inner))
            waiting += inner
        return count

    def _first(self, schema: Schema) -> int:
        """Where an object of the schema itself begins."""
        runs = self._runs_of(schema)
        is_required, length = runs[0] if runs else (True, 0)
        if is_required:
            return 0
        return length * (ITEMS_ALONE if len(runs) == 1 else ITEMS_BEFORE_REQUIRED)

    def _runs_of(self, schema: Schema) -> list[tuple[bool, int]]:
        """The properties in their order: whether some that follow each other are required, and how many they are."""
        if id(schema) not in self._runs:
            properties, required = schema.get("properties"), schema.get("required")
            properties = properties if isinstance(properties, dict) else {}
            required = required if isinstance(required, list) else []
            self._look(len(properties) + len(required))
            names = {name for name in required if isinstance(name, str)}
            runs = groupby(name in names for name in properties)
            self._runs[id(schema)] = [(is_required, sum(1 for _ in run)) for is_required, run in runs]
        return self._runs[id(schema)]


def schemas_of(values: Any) -> list[Schema]:
    """The schemas in what should be a list of them."""
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
