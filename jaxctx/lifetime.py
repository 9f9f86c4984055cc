"""Lifetime: when an object ends. Used for contexts, pins, snapshots and publications alike; imports nothing.

Time is unix seconds of whatever clock the caller reads. An object is readable before `at`, and never from then on;
nothing may delete it earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lifetime:
    """`at` is when it ends (None: never), `seconds` what was asked for, `sliding` whether a use starts it again."""

    at: float | None = None
    seconds: float | None = None
    sliding: bool = False

    @classmethod
    def begin(cls, seconds: float | None, sliding: bool, now: float) -> Lifetime:
        """From `now` on; `seconds` None: for ever."""
        return FOREVER if seconds is None else cls(now + seconds, seconds, sliding)

    def used(self, now: float) -> Lifetime:
        """After a use: a sliding one begins again. One that is over stays over."""
        if self.seconds is None or not self.sliding or self.over(now):
            return self
        return replace(self, at=now + self.seconds)

    def over(self, now: float) -> bool:
        """Whether it has ended."""
        return self.at is not None and now >= self.at


FOREVER = Lifetime()
