"""Pages of items, as lists of this API: `limit`, `order`, `after` and `before`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxctx.errors import InvalidArgument

Json = dict[str, Any]
DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of_items(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A page of items, which are in the order in which they were added. Raises InvalidArgument naming the field."""
    limit = page_limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidArgument.field("order", "must be asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if "after" in query:
        ordered = ordered[position_of(ordered, query["after"], "after") + 1 :]
    if "before" in query:
        ordered = ordered[: position_of(ordered, query["before"], "before")]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


def page_limit(text: str | None) -> int:
    """How many items a page has. Raises InvalidArgument."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise InvalidArgument.field("limit", f"must be a whole number from 1 to {MAX_LIMIT}")
    return int(text)


def position_of(items: Sequence[Json], item_id: str, field: str) -> int:
    """Where an item is. Raises InvalidArgument."""
    for position, item in enumerate(items):
        if item["id"] == item_id:
            return position
    raise InvalidArgument.field(field, "must be the id of an item of this list")
