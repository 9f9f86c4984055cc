"""Random arguments: what is saved, under which names, and for how long."""

from __future__ import annotations

from random import Random

from jaxctx.lifetime import Lifetime
from jaxctx.store import ContextRecord, SnapshotVersion
from tests.jaxctx.store.builders import PAGE_BYTES, described, lineage

from .oracle import Oracle, ending

TENANTS = ("t", "", "é")
NAMES = ("a", "a/b", "../a")
NEVER = 99  # a number that no version gets


def draw_name(draw: Random, oracle: Oracle) -> tuple[str, str]:
    """A tenant and a name, more often than not one that is there."""
    there = sorted(oracle.names)
    return draw.choice(there) if there and draw.random() < 0.7 else (draw.choice(TENANTS), draw.choice(NAMES))


def draw_overwrite(draw: Random, oracle: Oracle, name: tuple[str, str]) -> int | None:
    """Most often the right one."""
    versions = oracle.names.get(name)
    right = versions[-1].version.version if versions else None
    return draw.choice((right, right, right, right, None, 1, NEVER))


def draw_lineage(draw: Random, tenant: str) -> ContextRecord:
    """Of few kinds, so that many begin alike; often with a partly filled last page, or with buffered tokens."""
    tokens = [draw.randrange(2), *range(draw.randrange(18))]
    if draw.random() < 0.4:
        tokens[-1] += 50
    seq_len = len(tokens) - (draw.randrange(len(tokens) + 1) if draw.random() < 0.3 else 0)
    overrides = {draw.randrange(seq_len): b"m"} if seq_len and draw.random() < 0.2 else {}
    salt = draw.choice(("", "", "", "x"))
    return lineage(tokens, seq_len=seq_len, identity=tenant.encode(), salt=salt, attention_overrides=overrides)


def draw_version(
    draw: Random, tenant: str, name: str, of: ContextRecord, now: float, held: object = None
) -> SnapshotVersion:
    """As the engine would describe it."""
    return described(
        name,
        tenant,
        held=held,
        tokens=len(of.tokens),
        seq_len=of.seq_len,
        pages=of.pages,
        size_bytes=of.pages * PAGE_BYTES,
        salt=of.salt,
        lifetime=draw_lifetime(draw, now),
        labels=draw_labels(draw),
    )


def draw_lifetime(draw: Random, now: float) -> Lifetime:
    return ending(draw.choice((None, None, 2, 5, 20)), draw.random() < 0.5, now)


def draw_labels(draw: Random) -> dict[str, str]:
    return {"k": str(draw.randrange(9))} if draw.random() < 0.5 else {}


def draw_attachment(draw: Random) -> bytes:
    """Often none. As long as a page, and unlike any other, so that it is recognised among the objects."""
    return draw.randbytes(PAGE_BYTES) if draw.random() < 0.4 else b""


def draw_max_versions(draw: Random) -> int | None:
    return draw.choice((None, None, None, 1, 2, 9))
