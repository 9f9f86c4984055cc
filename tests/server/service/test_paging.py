"""Pages of lists and their tokens."""

import itertools
from collections.abc import Sequence

import pytest

from jaxctx_server.service.paging import PAGE_SIZE, Page, entries_to_find, page_by_id, page_by_version


def by_id(names: Sequence[str], page_token: str = "", limit: int = 2) -> Page[str]:
    return page_by_id(names, lambda name: name, page_token=page_token, found=entries_to_find(limit))


def test_one_entry_more_than_the_page_is_looked_for() -> None:
    assert entries_to_find(5) == 6
    assert entries_to_find(0) == PAGE_SIZE + 1


def test_a_page_is_in_order_and_names_the_next_one() -> None:
    assert by_id(["c", "a", "b"]) == Page(["a", "b"], "b")
    assert by_id(["c", "a", "b"], "b") == Page(["c"], "")
    assert by_id(["a", "b"]) == Page(["a", "b"], "")
    assert by_id([]) == Page([], "")


def test_of_several_entries_of_one_id_the_last_is_there() -> None:
    entries = [("a", 1), ("b", 1), ("a", 2)]
    page = page_by_id(entries, lambda entry: entry[0], page_token="", found=3)
    assert page == Page([("a", 2), ("b", 1)], "")


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_all_pages_together_are_the_list(limit: int) -> None:
    names = [f"{number:02}" for number in range(7)]
    read: list[str] = []
    token = ""
    for _ in itertools.count():
        page = by_id(names, token, limit)
        read += page.entries
        token = page.next_page_token
        if not token:
            break
    assert read == names


def test_versions_go_down() -> None:
    versions = [3, 12, 1, 11]
    assert page_by_version(versions, int, page_token="", found=3) == Page([12, 11], "11")
    assert page_by_version(versions, int, page_token="11", found=3) == Page([3, 1], "")
    assert page_by_version(versions, int, page_token="1", found=3) == Page([], "")
