"""One value of a request, and the checks of it. Nothing is raised before the whole request has been looked at.

Each check returns the value in its proper type, the default if it was not sent (None), or, after noting what is wrong,
some value of that type with which the rest can be checked on. Descriptions say what is accepted and repeat no texts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from jaxctx.errors import FieldViolation, InvalidArgument
from jaxctx_server.validate.limits import Limits

MAX_VIOLATIONS = 16  # reported of one request
CONTEXT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONTEXT_ID_RULE = "must be 1 to 64 characters of A-Z a-z 0-9 . _ -, the first a letter or digit"
D = TypeVar("D")
S = TypeVar("S", Mapping[object, object], Sequence[object])
T = TypeVar("T")


def validate(check: "Callable[[Field], T]", limits: Limits, request: Mapping[str, object] | Message) -> T:
    """What `check` makes of a request. Raises one InvalidArgument for everything that is wrong with it.

    `request` is a protobuf message, or maps the names of a message's fields to their values as a door decoded them, of
    any type and size. Nested messages are likewise. A field that is None or missing was not sent.
    """
    wrong: dict[str, str] = {}
    checked = check(Field("", request, limits, wrong))
    if wrong:
        message = "; ".join(f"{path}: {description}" for path, description in wrong.items())
        raise InvalidArgument(message, violations=[FieldViolation(*each) for each in wrong.items()])
    return checked


@dataclass(slots=True)  # not frozen, which would take three times as long to make: a pass may have many thousands
class Field:
    """A value, nothing of it believed, at its path in the request ("stop[3]"); the request itself is at ""."""

    path: str
    value: object
    limits: Limits
    wrong: dict[str, str]  # of the whole request: by path, what would be accepted

    def __getitem__(self, name: str) -> "Field":
        """A field of this message; one that was not sent if this is no message. Nothing is copied.

        Raises KeyError for a name that no field of a protobuf message has.
        """
        value = None
        if isinstance(self.value, Message):
            if not self.value.DESCRIPTOR.fields_by_name[name].has_presence or self.value.HasField(name):
                value = getattr(self.value, name)
        elif isinstance(self.value, Mapping):
            value = self.value.get(name)
        return Field(f"{self.path}.{name}" if self.path else name, value, self.limits, self.wrong)

    def at(self, step: str, value: object) -> "Field":
        """A part of this value, `step` further down the path."""
        return Field(self.path + step, value, self.limits, self.wrong)

    def refuse(self, description: str) -> None:
        """Note that the value is wrong. Of several things that are, the first is told."""
        if len(self.wrong) < MAX_VIOLATIONS:
            self.wrong.setdefault(self.path, description)

    def integer(self, low: int, high: int, default: D) -> int | D:
        """A whole number from `low` to `high`."""
        if self.value is None:
            return default
        if type(self.value) is int and low <= self.value <= high:
            return self.value
        self.refuse(f"must be a whole number from {low} to {high}{_but(self.value)}")
        return high

    def number(self, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A finite number from `low` (with `above`: greater than it) to `high`."""
        value = self.value
        if value is None:
            return default
        if type(value) in (int, float) and low <= value <= high and not (above and value == low):  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        bounds = f"above {low:g} and up to {high:g}" if above else f"from {low:g} to {high:g}"
        self.refuse(f"must be a number {bounds}{_but(value)}")
        return high

    def flag(self, default: D) -> bool | D:
        """True or false."""
        if self.value is None:
            return default
        if isinstance(self.value, bool):
            return self.value
        self.refuse("must be true or false")
        return False

    def text(self, low_bytes: int, high_bytes: int) -> str:
        """Text of so many bytes in UTF-8."""
        text = "" if self.value is None else self.value
        size = utf8_size(text) if isinstance(text, str) else None
        if isinstance(text, str) and size is not None and low_bytes <= size <= high_bytes:
            return text
        if isinstance(text, str) and size is None:
            self.refuse("must be Unicode text; it has a lone surrogate")
        elif low_bytes and not text:
            self.refuse("must not be empty")
        else:
            self.refuse(f"must be text of {low_bytes} to {high_bytes} bytes{_but(size)}")
        return ""

    def id(self) -> str:
        """The id of a context or publication. Required."""
        if isinstance(self.value, str) and CONTEXT_ID.fullmatch(self.value):
            return self.value
        self.refuse(CONTEXT_ID_RULE)
        return ""

    def optional_id(self) -> str | None:
        """The id of a context, if there is one."""
        return None if self.value is None else self.id()

    def message(self, description: str) -> bool:
        """Whether it is a message. Required; `description` says what it must be."""
        is_message = isinstance(self.value, Mapping | Message)
        if not is_message:
            self.refuse(description)
        return is_message

    def mapping(self, high: int) -> Mapping[object, object]:
        """A map of up to `high` entries, as it came."""
        return self._sized(Mapping, "a map", {}, 0, high)

    def sequence(self, high: int, *, low: int = 0) -> Sequence[object]:
        """A list of so many entries, as it came."""
        return self._sized(Sequence, "a list", (), low, high)

    def _sized(self, kind: Any, noun: str, empty: S, low: int, high: int) -> S:
        value = empty if self.value is None else self.value
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            self.refuse(f"must be {noun}")
        elif low <= len(value) <= high:
            checked: S = value
            return checked
        else:
            self.refuse(f"must have {low} to {high} entries, not {len(value)}" if value else "must not be empty")
        return empty

    def items(self, high: int, *, low: int = 0) -> "list[Field]":
        """The entries of such a list."""
        return [self.at(f"[{place}]", value) for place, value in enumerate(self.sequence(high, low=low))]

    def token_ids(self, high: int, *, low: int = 0) -> list[int]:
        """A list of so many ids of the vocabulary."""
        vocab_size = self.limits.vocab_size
        ids = list(self.sequence(high, low=low))
        if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):  # type: ignore[type-var, operator]
            return ids  # type: ignore[return-value]
        for place, token in enumerate(ids):
            if not (type(token) is int and 0 <= token < vocab_size):
                self.at(f"[{place}]", token).refuse(f"must be a token id from 0 to {vocab_size - 1}{_but(token)}")
            if len(self.wrong) == MAX_VIOLATIONS:
                break
        return []


def refuse_repeated(fields: Sequence[Field], values: Sequence[object]) -> None:
    """Refuse each of the fields whose value is that of one before it."""
    seen = set()
    for field, value in zip(fields, values, strict=True):
        if value in seen:
            field.refuse("must be different from those before it")
        seen.add(value)


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
    if type(value) is float:
        return f", not {value:.6g}"
    return f", not {value}" if type(value) is int and abs(value) < 10**20 else ""
