"""Sequence: one request's way through the engine, bound to one context: a fill, a generation, a pass or an opening.

    waiting ──admit──▶ restoring ──▶ running ──last token settled──▶ done
       ▲                  │             │
       └────preempt───────┴─────────────┘

While it restores, pages that other tiers hold come back; then its rows begin with what no tier had. Most rows are
*usual*: a token at the position of its index, seeing all before it. Others go into steps of their own (`unusual`):
those whose tokens have marks, and those of a pass that are asked about.

A sequence counts three things that run ahead of each other: tokens *settled* (the host has seen the step's result; this
is the context's own `seq_len`), positions *dispatched* (`next`), and tokens *known* (dispatched samples included, whose
value may still be on the device). Steps in flight carry the epoch they were made in; preempting or ending a sequence
raises its epoch, so that late results are ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxctx.cache.contexts import Context
from jaxctx.engine.interface import Caller, GeneratePiece, GenerateRequest, PassOutput
from jaxctx.engine.output import Output
from jaxctx.errors import JaxctxError
from jaxctx.model.sampling import row_words

_arrivals = itertools.count()
POSITION_WORD = int(np.flatnonzero(row_words(position=1) != row_words(position=0))[0])


class Reply(Protocol):
    """Where a sequence's results go; called on the step thread, never blocks."""

    def piece(self, piece: GeneratePiece) -> None:
        """A part of an output (generations only)."""
        ...

    def done(self, result: Any) -> None:
        """The end: of a fill, pass or opening with its result, of a generation with None after its last piece."""
        ...

    def failed(self, error: JaxctxError) -> None:
        """The end, with an error. Nothing follows."""
        ...

    def lagging(self) -> bool:
        """Whether the reader is too far behind to take more."""
        ...


class Sampler:
    """A generation's sampling options as the step wants them: `row_words`, patched per token."""

    def __init__(self, request: GenerateRequest, seed: int) -> None:
        """`seed` is 64 bits; equal seeds draw equally at equal positions, in any batch."""
        s = request.sampling
        self.seed = seed
        self._options = {
            "temperature": s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "repetition": s.repetition_penalty,
            "presence": s.presence_penalty,
            "frequency": s.frequency_penalty,
            "seed": seed,
            "biased": bool(s.logit_bias),
            "logprobs": request.logprobs,
        }
        self._words = {
            suppress: row_words(**self._options, suppress=suppress)  # type: ignore[arg-type]
            for suppress in (False, True)
        }
        penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        # Whether the slot must know the sequence's past before its first step.
        self.needs_history = penalised or bool(s.logit_bias) or request.min_tokens > 0

    def write(self, row: np.ndarray, *, position: int, suppress: bool) -> None:
        """Fill int32 `row` `[ROW_WORDS]` for the token at `position`; `suppress` forbids stop tokens."""
        row[:] = self._words[suppress]
        row[POSITION_WORD] = position


@dataclass(frozen=True, slots=True)
class Pass:
    """What a forward pass asks: the tokens from index `start` on are its own, and some of their rows have outputs."""

    start: int
    outputs: Mapping[int, PassOutput]  # by index in the context
    samplers: Mapping[int, Sampler]  # of those that want a sample
    keep_working: bool


@dataclass(frozen=True, slots=True)
class PassRow:
    """What the step says of one token that was asked about. `logits` `[vocab]` only if the answer needs them."""

    asked: PassOutput
    logits: np.ndarray | None
    token_id: int | None
    seed: int | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its progress. Mutated by the scheduler only, on the step thread."""

    context: Context
    caller: Caller
    reply: Reply
    request: GenerateRequest | None = None  # of a generation
    sampler: Sampler | None = None
    output: Output | None = None
    index: int = 0  # which of the n outputs
    max_tokens: int = 0
    passing: Pass | None = None  # of a forward pass
    compute_to: int | None = None  # of an opening: so many tokens are to have KV, the rest stays buffered
    arrival: int = field(default_factory=lambda: next(_arrivals))

    epoch: int = 0

    # Progress of the present run, from admission to the end or to preemption.
    slot: int = -1
    prompt_end: int = 0  # tokens known on the host at admission
    known: int = 0  # positions below this may be dispatched
    next: int = 0  # first position not dispatched
    remaining: int = 0  # samples not dispatched
    restoring: bool = False  # pages of other tiers come back before its rows begin
    decoding: bool = False  # has dispatched its first sample
    unusual: Seq[tuple[int, int]] = ()  # ranges of indices that go into steps of their own, ascending
    read_only: bool = False  # the row at `next` is computed without writing its KV, which is there already
    reserved: int = 0  # pages promised and not yet taken
    taken: int = 0  # pages taken from those; what is left of them at the end is given back

    # Of the whole request.
    prompt_tokens: int = 0  # context length when the request came
    pending: int = 0  # of these, without KV when it was first admitted
    restored: int = 0  # of those, brought back from other tiers
    computed: int | None = None  # rows of the prompt that its first admission left to compute; None before that
    rows: list[PassRow] = field(default_factory=list)  # of a pass, those that have been answered
    ended: bool = False

    @property
    def running(self) -> bool:
        """Whether it holds a slot."""
        return self.slot >= 0

    @property
    def priority(self) -> int:
        """The context's."""
        return self.context.priority

    @property
    def rows_ready(self) -> int:
        """Rows that could go into the next step."""
        return self.known - self.next

    @property
    def prefilling(self) -> bool:
        """Whether prompt rows are still to be dispatched."""
        return not self.decoding and self.rows_ready > 0

    @property
    def resident(self) -> int:
        """Pending tokens that were found on the device."""
        return 0 if self.computed is None else max(self.pending - self.computed - self.restored, 0)

    @property
    def match_to(self) -> int:
        """Tokens of its context that may be looked up: those of a pass are computed."""
        if self.compute_to is not None:
            return self.compute_to
        return self.context.length if self.passing is None else self.passing.start

    def usual_rows(self) -> int:
        """Rows that could go into the next step beside those of others."""
        for start, stop in self.unusual:
            if self.next < stop:
                return min(self.rows_ready, max(start - self.next, 0))
        return self.rows_ready

    def unusual_rows(self) -> int:
        """Rows that could go into the next step by themselves."""
        for start, stop in self.unusual:
            if start <= self.next < stop:
                return min(self.rows_ready, stop - self.next)
        return 0

    @property
    def tokens_left(self) -> int:
        """Samples that the host has not seen; 0 for a fill."""
        return 0 if self.output is None else self.max_tokens - self.output.tokens

    @property
    def worst_case_tokens(self) -> int:
        """Tokens that will have KV when it ends: the last sampled one stays buffered."""
        wanted = self.context.length if self.compute_to is None else self.compute_to
        return wanted + max(self.tokens_left - 1, 0)
