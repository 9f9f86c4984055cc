"""DraftSequences: what the draft model has computed of each request, in contexts and pages of its own. No arrays.

A sequence follows the context of a running request. It finds pages that earlier sequences left, by their tokens, as
contexts do; it ends with the run of its request, and its full pages stay cached until others need them. What the
served model does to its contexts (forks, rewinds, suspensions) therefore changes nothing here.

    tokens of the request's context
    0            seq_len                  length
    ├──computed────┼──────to compute────────┤   guesses g1 g2 … gk
    │ the draft model has their KV          │   g1 … g(k-1) are computed beyond, in pages that commit nothing

What was sent to the device counts as computed at once, because it runs everything in the order in which it is sent.
Guesses are not tokens of the sequence: only when the served model has drawn them do they become some, and their KV is
there already. Wrong ones are overwritten. A request with a token that the draft model has no row for, as that of an
image, has no drafts from then on. A request for which there is no page has no sequence, and no drafts for a while;
nothing waits for pages here, and nobody is asked to give them up but sequences that have ended.

Called by the scheduler, which asks what is ready, and by `DraftModel`, on the step thread.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int32

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity, OutOfPages
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request

MAX_ROWS_BEHIND = 16  # tokens that a sequence may be behind when drafts are made; more are computed before


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of one sequence for a step of the draft model."""

    context: Context  # of the sequence
    tokens: Int32[np.ndarray, " rows"]
    position: int  # of the first row


@dataclass(slots=True, eq=False)
class _DraftSequence:
    context: Context
    run_number: int  # of the request's run that it belongs to
    guesses: list[int] = field(default_factory=list)  # whose KV lies behind the tokens with KV


class DraftSequences:
    """See the module docstring."""

    def __init__(
        self,
        config: EngineConfig,
        revision: str,
        vocab_size: int,
        kv_layout: str = "",
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`config`: of the draft model, which has rows for `vocab_size` tokens.

        `revision` and `kv_layout` tell its pages from those of another model.
        """
        self.config = config
        self._vocab_size = vocab_size
        self._revision, self._kv_layout = revision, kv_layout
        self.block_manager = BlockManager(config.pages, config.page_size)
        numbers = itertools.count()
        self.cache = ContextCache(self.block_manager, clock, lambda: f"draft_{next(numbers)}")
        self._sequences: dict[Request, _DraftSequence] = {}

    # Questions of the scheduler.

    def drafts_for(self, request: Request, limit: int) -> int:
        """How many guesses, up to `limit`, the draft model would make now behind the request's tokens; 0: none."""
        length = request.context.length
        limit = min(limit, self.config.max_context_tokens - length + 1)
        if request.draft_pace is None or limit <= 0:
            return 0
        count = request.draft_pace.count(length, limit)
        sequence = self._sequence_of(request) if count else None
        if sequence is None or sequence.context.buffered_tokens > MAX_ROWS_BEHIND:
            return 0
        return count

    def wants_to_follow(self, request: Request) -> bool:
        """Whether `catch_up` has anything to do for the request, or may have."""
        context = request.context
        if request.draft_pace is None or request.tokens_left < 2 or context.attention_overrides:
            return False
        if context.length > self.config.max_context_tokens or not request.draft_pace.count(context.length, 1):
            return False
        sequence = self._sequences.get(request)
        return sequence is None or sequence.context.length < context.length or sequence.context.buffered_tokens > 1

    # Changes.

    def end_unused(self) -> None:
        """End the sequences of runs that have ended, or have become too long: call it before every use."""
        for request, sequence in [*self._sequences.items()]:
            is_over = not request.runs or request.run_number != sequence.run_number
            if is_over or request.context.length > self.config.max_context_tokens:
                self._end(request)

    def catch_up(self, requests: Sequence[Request]) -> list[DraftRows]:
        """Rows for one step that computes tokens of these requests, the first of them first; begins their sequences.

        The last token of each is left, as the next guess is drawn behind it. Call `mark_sent` when the step was sent.
        """
        rows: list[DraftRows] = []
        left = self.config.max_batch_tokens
        for request in requests:
            if not left:
                break
            sequence = self._sequence_of(request) or self._begin(request)
            if sequence is None:
                continue
            count = min(sequence.context.buffered_tokens - 1, left)
            if count > 0 and (part := self._take(request, sequence, count)) is not None:
                rows.append(part)
                left -= count
        return rows

    def begin_drafts(self, request: Request, guesses: int, max_rows: int) -> DraftRows | None:
        """All rows that are left of the request's tokens, behind the last of which `guesses` guesses are drawn.

        None, if there is no page for them and the guesses, or if they are more than `max_rows`. Call `mark_sent` when
        the step was sent.
        """
        sequence = self._sequence_of(request)
        if sequence is None or not 0 < sequence.context.buffered_tokens <= max_rows:
            return None
        return self._take(request, sequence, sequence.context.buffered_tokens, ahead=guesses - 1)

    def mark_sent(self, rows: Sequence[DraftRows]) -> None:
        """These rows were sent: their tokens count as computed.

        Not before: a page that is merged with an equal one is free then, and another sequence must not take it while it
        is still to be written in the same step.
        """
        for each in rows:
            self.cache.mark_computed(each.context, len(each.tokens))

    def end_drafts(self, request: Request, length: int, guesses: Sequence[int]) -> None:
        """Note the guesses that were made behind the first `length` tokens: all but the last one have KV."""
        sequence = self._sequences.get(request)
        if sequence is not None and sequence.context.seq_len == sequence.context.length == length:
            sequence.guesses = [*guesses[:-1]]

    # Sequences.

    def _sequence_of(self, request: Request) -> _DraftSequence | None:
        """The request's sequence with all tokens of the request, if there is one.

        Guesses that the served model has drawn are computed tokens from now on. The last token is computed in any case,
        so that something can be drawn behind it.
        """
        sequence = self._sequences.get(request)
        if sequence is None:
            return None
        context = sequence.context
        new = request.context.tokens(context.length)
        if len(new) == 0:
            return sequence
        if not self._can_read(request, new):
            self._end(request)
            return None
        self.cache.append(context, new)
        right = 0
        while right < min(len(sequence.guesses), len(new) - 1) and sequence.guesses[right] == new[right]:
            right += 1
        self.cache.mark_computed(context, right)
        sequence.guesses = []
        return sequence

    def _begin(self, request: Request) -> _DraftSequence | None:
        """A new sequence with the cached pages of its tokens; None if there are enough sequences, or too few pages."""
        if len(self._sequences) == self.config.max_batch:
            return None
        tokens = request.context.tokens()
        if not self._can_read(request, tokens):
            return None
        if self.block_manager.pages_for(len(tokens) + 1) > self.block_manager.available:
            self._pause(request)
            return None
        identity: Identity = replace(
            request.context.identity, model_revision=self._revision, adapter="", kv_dtype=self._kv_layout
        )
        context = self.cache.create(identity)
        self.cache.append(context, tokens)
        self.cache.match(context, len(tokens) - 1)
        sequence = self._sequences[request] = _DraftSequence(context, request.run_number)
        return sequence

    def _take(self, request: Request, sequence: _DraftSequence, count: int, ahead: int = 0) -> DraftRows | None:
        """The sequence's next `count` rows, with pages for them and for `ahead` tokens more.

        None if there are too few pages: then the sequence has ended.
        """
        context = sequence.context
        try:
            self.cache.grow(context, count + ahead)
        except OutOfPages:
            self._end(request)
            self._pause(request)
            return None
        position = context.seq_len
        return DraftRows(context, context.tokens(position, position + count), position)

    def _end(self, request: Request) -> None:
        self.cache.close(self._sequences.pop(request).context)

    def _can_read(self, request: Request, tokens: Int32[np.ndarray, " tokens"]) -> bool:
        """Whether the draft model has rows for these tokens of a request. If not, it guesses nothing of it any more."""
        if tokens.max(initial=0) < self._vocab_size:
            return True
        assert request.draft_pace is not None
        request.draft_pace.end()
        return False

    def _pause(self, request: Request) -> None:
        assert request.draft_pace is not None
        request.draft_pace.wait_for_pages(request.context.length)
