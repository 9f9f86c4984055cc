"""Checks of single fields. Nothing is raised before the whole request has been looked at.

Each check takes the field's path and its value as decoded. It returns the value in its proper type, the default if the
field was not sent (None), or, after noting a violation, some value of that type with which the rest can be checked on.
Descriptions say what would be accepted; they repeat numbers, never texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jaxctx.errors import FieldViolation, InvalidArgument

MAX_VIOLATIONS = 16  # reported of one request
CONTEXT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONTEXT_ID_RULE = "must be 1 to 64 characters of A-Z a-z 0-9 . _ -, the first a letter or digit"
D = TypeVar("D")


class Checks:
    """The checks of one request, and what they found."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, path: str, description: str) -> None:
        """Note that a field is wrong."""
        if len(self._violations) < MAX_VIOLATIONS:
            self._violations.append(FieldViolation(path, description))

    def done(self) -> None:
        """Raise InvalidArgument if anything was wrong."""
        if self._violations:
            message = "; ".join(f"{each.field}: {each.description}" for each in self._violations)
            raise InvalidArgument(message, violations=self._violations)

    # --- scalars -------------------------------------------------------------------------------------------------

    def integer(self, path: str, value: object, low: int, high: int, default: D) -> int | D:
        """A whole number from `low` to `high`."""
        if value is None:
            return default
        if type(value) is int and low <= value <= high:
            return value
        self.refuse(path, f"must be a whole number from {low} to {high}{_but(value)}")
        return high

    def number(
        self, path: str, value: object, low: float, high: float, default: float, *, above: bool = False
    ) -> float:
        """A finite number from `low` (with `above`: greater than it) to `high`."""
        if value is None:
            return default
        if type(value) in (int, float) and low <= value <= high and not (above and value == low):  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        bounds = f"above {low:g} and up to {high:g}" if above else f"from {low:g} to {high:g}"
        self.refuse(path, f"must be a number {bounds}{_but(value)}")
        return high

    def flag(self, path: str, value: object, default: D) -> bool | D:
        """True or false."""
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refuse(path, "must be true or false")
        return False

    def string(self, path: str, value: object, low_bytes: int, high_bytes: int, default: str = "") -> str:
        """Text of so many bytes in UTF-8."""
        text = default if value is None else value
        size = utf8_size(text) if isinstance(text, str) else None
        if size is not None and low_bytes <= size <= high_bytes:
            return str(text)
        if isinstance(text, str) and size is None:
            self.refuse(path, "must be Unicode text; it has a lone surrogate")
        elif low_bytes and not value:
            self.refuse(path, "must not be empty")
        else:
            self.refuse(path, f"must be text of {low_bytes} to {high_bytes} bytes{_but(size)}")
        return "?" * max(low_bytes, 1)

    def context_id(self, path: str, value: object) -> str:
        """The id of a context. Required."""
        if isinstance(value, str) and CONTEXT_ID.fullmatch(value):
            return value
        self.refuse(path, CONTEXT_ID_RULE)
        return "invalid"

    # --- collections ---------------------------------------------------------------------------------------------

    def items(self, path: str, value: object, high: int, *, low: int = 0) -> Sequence[object]:
        """A list of so many entries, as it came."""
        if value is None:
            value = ()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            self.refuse(path, "must be a list")
        elif low <= len(value) <= high:
            return value
        elif not value:
            self.refuse(path, "must not be empty")
        else:
            self.refuse(path, f"must have {low} to {high} entries, not {len(value)}")
        return ()

    def mapping(self, path: str, value: object, high: int) -> Mapping[object, object]:
        """A map of up to `high` entries, as it came."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(path, "must be a map")
        elif len(value) > high:
            self.refuse(path, f"must have up to {high} entries, not {len(value)}")
        else:
            return value
        return {}

    def token_ids(self, path: str, value: object, vocab_size: int, high: int, *, low: int = 0) -> list[int]:
        """A list of ids of the vocabulary."""
        ids = list(self.items(path, value, high, low=low))
        if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):  # type: ignore[type-var, operator]
            return ids  # type: ignore[return-value]
        for place, token in enumerate(ids):
            if not (type(token) is int and 0 <= token < vocab_size):
                self.refuse(f"{path}[{place}]", f"must be a token id from 0 to {vocab_size - 1}{_but(token)}")
                if len(self._violations) == MAX_VIOLATIONS:
                    break
        return []


def utf8_size(text: str) -> int | None:
    """Bytes of `text` in UTF-8; None if it has lone surrogates."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def _but(value: object) -> str:
    """`, not 7` for numbers, which a caller may see again; nothing for anything else."""
    return f", not {value:.6g}" if type(value) is float else f", not {value}" if _short_int(value) else ""


def _short_int(value: object) -> bool:
    return type(value) is int and abs(value) < 10**20
