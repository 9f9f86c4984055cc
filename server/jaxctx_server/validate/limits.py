"""What the contract's rules leave to one server."""

from dataclasses import dataclass
from typing import Self

from jaxctx.answers import EngineInfo, named

MANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of its model and of its configuration, by the names that the rules call them. A core has no model."""

    vocab_size: int = MANY
    max_context_tokens: int = MANY
    default_max_tokens: int = MANY
    queue_limit: int  # requests that may wait

    @classmethod
    def of(cls, info: EngineInfo, *, queue_limit: int) -> Self:
        """The limits of an engine."""
        return cls(queue_limit=queue_limit, **named(cls, info))
