"""What is told of contexts, snapshots and engines, as plain data: an engine answers it, and a client shows it.

Generated from the messages of protos/jaxctx/v1 that answer, with their field names and units; `jaxctx.codec`
translates. Moments are in UTC, log probabilities natural and of the model's own distribution. By hand is only what no
message says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from jaxctx.v1.answers import *  # noqa: F403
from jaxctx.v1.answers import ContextPages


def moment(unix_s: float) -> datetime:
    """As answers tell it."""
    return datetime.fromtimestamp(unix_s, UTC)


def named(kind: type[Any], *sources: object) -> dict[str, Any]:
    """What the sources, the first that has it, call by the names of the fields of answers of this class."""
    names = [each.name for each in fields(kind)]
    return {name: getattr(source, name) for source in reversed(sources) for name in names if hasattr(source, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLayout(ContextPages):
    """As an engine tells it: with the tokens, buffered ones included."""

    tokens: Sequence[int]
    ancestors: Sequence[tuple[str, int]]  # the parent first: ids, and tokens that each had when it was forked
