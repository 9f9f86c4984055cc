"""What an engine is asked, as plain data. Validated already; see `interface` for the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose namespace a request runs in, and until when it may wait and run (None: for ever)."""

    tenant: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long an object is to live from now on. A sliding one starts again with every use, a fixed one never does."""

    seconds: float | None  # None: for ever
    sliding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
    """A new, empty context. `context_id` chosen by the client makes a retry safe (same id: ALREADY_EXISTS)."""

    context_id: str | None = None
    salt: str = ""  # contexts with different salts never share pages
    priority: int = 0  # higher runs first; -100..100
    manual_commit: bool = False  # full pages commit only by `commit_pages`
    pinned: bool = False  # never a victim under memory pressure; counts against the tenant's pin budget
    pin_s: float | None = None  # pinned for so long; None: until it is taken back
    ttl: Ttl = Ttl(None)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Defaults sample from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: chosen by the engine and reported


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Continue a context. With n > 1 the context is flushed and forked n times; each fork is continued, it is not."""

    context_id: str
    max_tokens: int | None = None  # None: the server's default
    min_tokens: int = 0
    n: int = 1
    sampling: Sampling = Sampling()
    logprobs: bool = False  # of every returned token
    top_logprobs: int = 0  # alternatives beside each, 0..20
    stop: Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the matched stop string in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int  # which of the pass's tokens
    sample: Sampling | None = None  # draw from it; without penalties and logit_bias
    logprob_ids: Sequence[int] = ()  # log probabilities of these
    top: int = 0  # the most likely ones, up to 64
    logits: bool = False  # all of it
    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """One pass over explicit tokens, which join the context; what it had buffered is computed first.

    A token's position defaults to its index in the context. Its mask is the ranges `[start, stop)` of indices that it
    sees, ascending, apart and within `0 .. its index`; empty: all of these. Default positions and full masks are the
    same as none at all.
    """

    context_id: str
    tokens: Sequence[int]
    positions: Sequence[int] = ()  # of all tokens, or none
    masks: Sequence[Sequence[tuple[int, int]]] = ()  # of all tokens, or none
    keep_working: bool = False  # full pages stay working, so that `truncate` reaches them, until the next computation
    outputs: Sequence[PassOutput] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Keep a context's present state under a name.

    Raises AlreadyExists if the name is taken, unless `overwrite_version` is its latest version (else Aborted with
    VERSION_MISMATCH); earlier versions are kept as history.
    """

    context_id: str
    name: str
    durable: bool = False  # acknowledged when it would survive a loss of power; else in memory, until the server ends
    overwrite_version: int | None = None
    ttl: Ttl = Ttl(None)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A new context from a snapshot. It inherits salt and manual_commit; the rest is as for a new context."""

    name: str
    version: int | None = None  # None: the latest
    take: bool = False  # delete the name in the same moment; of two racing takes one wins, the other is NotFound
    recompute: bool = False  # accept a snapshot of other weights, and compute its tokens anew
    context_id: str | None = None
    priority: int = 0
    pinned: bool = False
    pin_s: float | None = None
    ttl: Ttl = Ttl(None)
