"""Pages of lists: `limit`, `page_token` and `next_page_token`.

The page token is the id of the last entry of the page before, so that a list may change between two pages. To know
whether there is a next page, one entry more than the page holds is looked for (`entries_to_find`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

PAGE_SIZE = 100  # entries of a page where the request asks for no number
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    entries: list[T]
    next_page_token: str  # empty on the last page


def entries_to_find(limit: int) -> int:
    """How many entries to look for, given the `limit` of a request (0: PAGE_SIZE): those of the page and one more."""
    return (limit or PAGE_SIZE) + 1


def page_by_id(entries: Iterable[T], id_of: Callable[[T], str], *, page_token: str, found: int) -> Page[T]:
    """The page behind `page_token` of entries that are ordered by their id.

    `found` is how many entries were looked for. An id that occurs more than once is there once, as the last of them.
    """
    by_id = {id_of(entry): entry for entry in entries if id_of(entry) > page_token}
    ordered = [by_id[each] for each in sorted(by_id)]
    page_size = found - 1
    page = ordered[:page_size]
    return Page(page, id_of(page[-1]) if len(ordered) > page_size else "")


def page_by_version(entries: Iterable[T], version_of: Callable[[T], int], *, page_token: str, found: int) -> Page[T]:
    """The page behind `page_token` of versions of one object, the latest first. `found` as in `page_by_id`."""
    below = int(page_token) if page_token else None
    by_version = {version_of(entry): entry for entry in entries if below is None or version_of(entry) < below}
    ordered = [by_version[each] for each in sorted(by_version, reverse=True)]
    page_size = found - 1
    page = ordered[:page_size]
    return Page(page, str(version_of(page[-1])) if len(ordered) > page_size else "")
