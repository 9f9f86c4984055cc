"""Histogram: how many values were at most how large.

It is filled on the event loop, for every token of every stream, and shown under more than one name. A histogram of
prometheus_client takes a lock for each value and has one name.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Counts of values by size. Used on the event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper bounds of the buckets, in ascending order; the last bucket has none."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` values of this size."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def copy(self) -> "Histogram":
        """The counts as they are now."""
        copied = Histogram(self._bounds)
        copied._counts, copied.sum = self._counts.copy(), self.sum
        return copied

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bucket's upper bound, and how many values were at most that: what prometheus_client calls buckets."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
