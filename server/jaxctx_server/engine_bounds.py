"""How many engines there may be: a setting of `jaxctx-serve ray`, checked when settings are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """How many engines there may be."""

    minimum: int
    maximum: int

    @staticmethod
    def parse(text: str) -> EngineBounds:
        """The bounds of the text "MIN" or "MIN:MAX". Raises ValueError for any other text, and for a MIN below 1."""
        minimum, _, maximum = text.partition(":")
        bounds = EngineBounds(int(minimum), int(maximum or minimum))
        if not 1 <= bounds.minimum <= bounds.maximum:
            raise ValueError(text)
        return bounds
