"""What the fields of several quantisation methods have in common."""

from typing import Any

from jaxctx.model.config_reader import Reader, shown

LARGEST_GROUP = 2**20  # inputs; more than any matrix has


def refuse_unknown(read: Reader, known: frozenset[str]) -> None:
    """Raise CheckpointError for the first key that is not `known`, and says something."""
    for key, value in read.raw.items():
        if value and key not in known and not key.startswith("_"):
            read.refuse(key, f"{shown(value)} is not understood, and may change what the model computes")


def is_set(read: Reader, key: str) -> bool:
    """A flag, of which null means false."""
    return read.get(key) is not None and read.flag(key)


def whole(read: Reader, key: str, least: int, most: int, default: int | None = None) -> int:
    """An integer in these bounds; `default` if it is missing or null."""
    value: Any = default if read.get(key) is None else read.get(key)
    if type(value) is not int or not least <= value <= most:
        read.refuse(key, f"must be an integer from {least} to {most}, not {shown(value)}")
    return value


def group_size(read: Reader, key: str, default: int | None = None) -> int:
    """Inputs that share a scale; 0 for -1, which says that all do."""
    size = whole(read, key, -1, LARGEST_GROUP, default)
    if size == 0:
        read.refuse(key, "must be -1 or at least 1, not 0")
    return max(0, size)


def block_sizes(read: Reader, key: str) -> tuple[int, int]:
    """Output and input channels of a block: a list of two, or "128x128" as older files have it."""
    value = read.get(key)
    parts = value.split("x") if isinstance(value, str) else value
    sizes = [_as_size(part) for part in parts] if isinstance(parts, list) else []
    if len(sizes) != 2 or 0 in sizes:
        read.refuse(key, f"must be two integers from 1 to {LARGEST_GROUP}, not {shown(value)}")
    return sizes[0], sizes[1]


def _as_size(part: object) -> int:
    """An integer, or its digits, from 1 to LARGEST_GROUP; 0 for anything else."""
    if isinstance(part, str) and part.isascii() and part.isdigit() and len(part) < 9:
        part = int(part)
    return part if type(part) is int and 1 <= part <= LARGEST_GROUP else 0
