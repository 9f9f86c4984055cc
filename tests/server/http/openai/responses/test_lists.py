"""Pages of items."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.responses.lists import page_of_items

ITEMS: list[dict[str, Any]] = [{"id": str(number)} for number in range(30)]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, range(29, 9, -1), True),
        ({"order": "asc"}, range(20), True),
        ({"order": "asc", "limit": "100"}, range(30), False),
        ({"order": "asc", "after": "27"}, (28, 29), False),
        ({"order": "asc", "before": "2"}, (0, 1), False),
        ({"order": "desc", "after": "2"}, (1, 0), False),
        ({"order": "asc", "after": "3", "before": "9", "limit": "2"}, (4, 5), True),
        ({"order": "asc", "after": "29"}, (), False),
    ],
)
def test_pages(query: dict[str, str], ids: Any, has_more: bool) -> None:
    page = page_of_items(ITEMS, query)
    wanted = [str(number) for number in ids]
    assert [item["id"] for item in page["data"]] == wanted
    assert page["has_more"] == has_more
    assert (page["first_id"], page["last_id"]) == ((wanted[0], wanted[-1]) if wanted else (None, None))


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "", "1.5", "\u0664", "9" * 30])
def test_limits_that_are_none(limit: str) -> None:
    with pytest.raises(InvalidArgument):
        page_of_items(ITEMS, {"limit": limit})
