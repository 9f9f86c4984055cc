"""What the contract's rules leave to one server."""

from dataclasses import dataclass
from typing import Self

from jaxctx.answers import EngineInfo, named

MANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of its model and of its configuration, by the names that the rules call them."""

    vocab_size: int
    max_context_tokens: int
    default_max_tokens: int
    queue_limit: int  # requests that may wait

    @classmethod
    def of(cls, info: EngineInfo, *, queue_limit: int) -> Self:
        """The limits of an engine."""
        return cls(queue_limit=queue_limit, **named(cls, info))

    @classmethod
    def of_core(cls, *, queue_limit: int) -> Self:
        """Whatever some engine might do; each checks its own."""
        return cls(queue_limit=queue_limit, vocab_size=MANY, max_context_tokens=MANY, default_max_tokens=MANY)
