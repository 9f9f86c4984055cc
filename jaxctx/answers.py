"""What is told of contexts, snapshots and engines, as plain data: an engine answers it, and a client shows it.

Generated from the messages of protos/jaxctx/v1 that answer, with their field names and units; `jaxctx.codec`
translates. Moments are in UTC, log probabilities natural and of the model's own distribution. By hand is only what no
message says.
"""

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from jaxctx.v1.answers import *  # noqa: F403


def moment(unix_s: float) -> datetime:
    """As answers tell it."""
    return datetime.fromtimestamp(unix_s, UTC)


def named(kind: type[Any], *sources: object) -> dict[str, Any]:
    """What the sources, the first that has it, call by the names of the fields of answers of this class."""
    names = [each.name for each in fields(kind)]
    return {name: getattr(source, name) for source in reversed(sources) for name in names if hasattr(source, name)}
