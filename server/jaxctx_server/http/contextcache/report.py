"""How much of a kept context a request could use, and why not all of it: `cache` in the body, `x-session-cache`.

| field | meaning |
|---|---|
| status | created; hit: all that could be used was; partial; miss: nothing was |
| reason | why it is no hit: prompt_changed, salt_changed, model_revision_changed, evicted |
| stored_tokens | that the context had |
| reused_tokens | of these, those that the prompt begins with |
| missed_tokens | that could have been used too, had the prompt not changed |
| first_difference | the first token of the prompt, from 0, that differs from the context's |
| recomputed_tokens | whose keys and values were lost, or are those of another model, so that they were computed again |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxctx_server.http.tokens import common_length


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What became of a kept context in one request."""

    status: str
    reason: str | None = None
    stored_tokens: int = 0
    reused_tokens: int = 0
    missed_tokens: int = 0
    first_difference: int | None = None
    recomputed_tokens: int = 0

    def with_recomputed(self, tokens: int, why: str) -> "CacheReport":
        """The same, with so many tokens that had to be computed again, and why."""
        if tokens == 0:
            return self
        reason = self.reason or why
        return replace(
            self, status="partial" if self.status == "hit" else self.status, reason=reason, recomputed_tokens=tokens
        )

    def json(self) -> dict[str, Any]:
        """The field `cache` of a body."""
        return {
            "status": self.status,
            "reason": self.reason,
            "stored_tokens": self.stored_tokens,
            "reused_tokens": self.reused_tokens,
            "missed_tokens": self.missed_tokens,
            "first_difference": self.first_difference,
            "recomputed_tokens": self.recomputed_tokens,
        }

    def header(self) -> str:
        """The header `x-session-cache`."""
        parts = [self.status]
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        if self.status != "created":
            parts += [f"stored={self.stored_tokens}", f"reused={self.reused_tokens}", f"missed={self.missed_tokens}"]
        if self.first_difference is not None:
            parts.append(f"first-difference={self.first_difference}")
        return "; ".join(parts)


CREATED = CacheReport(status="created")


def appended(stored_tokens: int) -> CacheReport:
    """Of a request that appends to all that the context has."""
    return CacheReport(status="hit", stored_tokens=stored_tokens, reused_tokens=stored_tokens)


def unusable(reason: str, stored_tokens: int, prompt_tokens: int) -> CacheReport:
    """Of a context that cannot be used at all."""
    missed = min(stored_tokens, prompt_tokens)
    return CacheReport(status="miss", reason=reason, stored_tokens=stored_tokens, missed_tokens=missed)


def compared(stored: Sequence[int], prompt: Sequence[int]) -> CacheReport:
    """Of a whole prompt. Both are token ids."""
    common = common_length(stored, prompt)
    usable = min(len(stored), len(prompt))
    if common == usable:
        return CacheReport(status="hit", stored_tokens=len(stored), reused_tokens=common)
    return CacheReport(
        status="partial" if common else "miss",
        reason="prompt_changed",
        stored_tokens=len(stored),
        reused_tokens=common,
        missed_tokens=usable - common,
        first_difference=common,
    )
