"""Lifetime: when an object ends. Used for contexts, pins, snapshots and publications alike; imports nothing of ours.

Time is unix seconds of whatever clock the caller reads. An object is readable before `at`, and never from then on;
nothing may delete it earlier.
"""

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When an object expires: `at` (None: never); `seconds` were requested; `sliding`: every use starts them again."""

    at: float | None = None
    seconds: float | None = None
    sliding: bool = False

    @classmethod
    def begin(cls, seconds: float | None, sliding: bool, now: float) -> "Lifetime":
        """A lifetime of so many seconds from `now` on; None: for ever."""
        return FOREVER if seconds is None else cls(now + seconds, seconds, sliding)

    def anew(self, now: float) -> "Lifetime":
        """The same lifetime, started at `now`."""
        return self.begin(self.seconds, self.sliding, now)

    def used(self, now: float) -> "Lifetime":
        """The lifetime after a use at `now`: a sliding one starts again, unless it has ended."""
        return self.anew(now) if self.sliding and not self.over(now) else self

    def over(self, now: float) -> bool:
        """Whether it has ended."""
        return self.at is not None and now >= self.at


FOREVER = Lifetime()


class DeadlineQueue(Generic[T]):
    """Owners by their deadlines. Each owner has at most one; setting it again costs O(log n), however often."""

    def __init__(self) -> None:
        # (deadline, number); an entry is valid if its number has an owner, else it was replaced. There are no owners in
        # the heap: one that was replaced would be held in memory until it would have been due.
        self._heap: list[tuple[float, int]] = []
        self._numbers: dict[T, int] = {}
        self._owners: dict[int, T] = {}
        self._count = itertools.count()

    def set(self, owner: T, at: float | None) -> None:
        """Replace the owner's deadline; None: it has none any more."""
        if owner in self._numbers:
            del self._owners[self._numbers.pop(owner)]
        if at is None:
            return
        number = self._numbers[owner] = next(self._count)
        self._owners[number] = owner
        heapq.heappush(self._heap, (at, number))
        if len(self._heap) > 2 * len(self._owners) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._owners]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[T]:
        """The owners whose deadline has passed, in the order of deadlines; their deadlines are removed."""
        owners: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if number in self._owners:
                owners.append(self._owners.pop(number))
                del self._numbers[owners[-1]]
        return owners

    @property
    def next(self) -> float | None:
        """A time before which no deadline passes; None: there are no deadlines."""
        return self._heap[0][0] if self._heap else None
