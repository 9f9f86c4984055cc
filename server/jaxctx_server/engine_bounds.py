"""How many engines there may be: a setting of `jaxctx-serve ray`, checked when settings are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """How many engines there may be."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> EngineBounds:
        """Of "LEAST" or "LEAST:MOST". Raises ValueError for anything else, and for no engines at all."""
        least, _, most = text.partition(":")
        bounds = EngineBounds(int(least), int(most or least))
        if not 1 <= bounds.least <= bounds.most:
            raise ValueError(text)
        return bounds
