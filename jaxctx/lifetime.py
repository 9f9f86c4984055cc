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
    """`at` is when it ends (None: never), `seconds` what was asked for, `sliding` whether a use starts it again."""

    at: float | None = None
    seconds: float | None = None
    sliding: bool = False

    @classmethod
    def begin(cls, seconds: float | None, sliding: bool, now: float) -> "Lifetime":
        """From `now` on; `seconds` None: for ever."""
        return FOREVER if seconds is None else cls(now + seconds, seconds, sliding)

    def anew(self, now: float) -> "Lifetime":
        """The same, begun at `now`."""
        return self.begin(self.seconds, self.sliding, now)

    def used(self, now: float) -> "Lifetime":
        """After a use: a sliding one begins again. One that is over stays over."""
        return self.anew(now) if self.sliding and not self.over(now) else self

    def over(self, now: float) -> bool:
        """Whether it has ended."""
        return self.at is not None and now >= self.at


FOREVER = Lifetime()


class DeadlineQueue(Generic[T]):
    """Who is due when. Everybody has one alarm at most; to set it anew costs O(log n), however often it is done."""

    def __init__(self) -> None:
        # When, number, owner; an alarm stands if that is the owner's number below.
        self._heap: list[tuple[float, int, T]] = []
        self._numbers: dict[T, int] = {}
        self._count = itertools.count()

    def set(self, owner: T, at: float | None) -> None:
        """Instead of the alarm that it had; None: never."""
        self._numbers.pop(owner, None)
        if at is None:
            return
        number = self._numbers[owner] = next(self._count)
        heapq.heappush(self._heap, (at, number, owner))
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [alarm for alarm in self._heap if self._numbers.get(alarm[2]) == alarm[1]]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[T]:
        """Whose alarm has come, in order; they have none any more."""
        owners: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, owner = heapq.heappop(self._heap)
            if self._numbers.get(owner) == number:
                del self._numbers[owner]
                owners.append(owner)
        return owners

    @property
    def next(self) -> float | None:
        """Nobody is due before this; None: nobody at all."""
        return self._heap[0][0] if self._heap else None
