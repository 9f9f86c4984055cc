"""Scheduler: which requests run, which rows the next step has, and what a finished step changes.

The scheduler decides. It calls nobody back and never touches the device: it returns its decisions as data
(`scheduler_output`), and the engine core carries them out. It looks for cached prefixes before anything is computed,
and takes pages before any row is scheduled. Called on the step thread.

    submit ──▶ queue ──admit──▶ running ──▶ ended
                 ▲                │
                 └────preempt─────┘

Each part has a module of its own:

    queue            which request is next                  admission   which requests begin to run, and preemption
    active_requests  which requests wait and run            restore     pages that come back from other tiers
    page_budget      pages that can still be promised       deadlines   which requests cannot be in time
    drafts           guessed tokens                         forecast    how long requests take

A full queue is shared: the tenant with most requests in it gives up its latest one for a tenant that has fewer.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxctx.cache.block_manager import BlockManager, Ready
from jaxctx.cache.context_cache import Context, ContextCache
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.sequences import DraftSequences
from jaxctx.engine.scheduler.active_requests import ActiveRequests
from jaxctx.engine.scheduler.admission import Admission
from jaxctx.engine.scheduler.deadlines import MIN_WAIT_S, DeadlineReview
from jaxctx.engine.scheduler.drafts import NO_DRAFTS, NO_PROPOSAL, Drafts, Proposal, propose_drafts
from jaxctx.engine.scheduler.forecast import StepCosts
from jaxctx.engine.scheduler.page_budget import Claim, PageBudget
from jaxctx.engine.scheduler.prompt_lookup import MIN_NGRAM, MIN_NGRAM_ALONE
from jaxctx.engine.scheduler.restore import MAX_PAGES_WHEN_IDLE, PageRestoration
from jaxctx.engine.scheduler.scheduler_output import (
    Batch,
    ScheduledRequest,
    SchedulerEvent,
    SchedulerOutput,
    SchedulerStats,
)
from jaxctx.errors import ResourceExhausted


class Scheduler:
    """See the module docstring."""

    def __init__(
        self,
        *,
        cache: ContextCache,
        block_manager: BlockManager,
        config: EngineConfig,
        model_id: str,
        smallest_step_rows: int,
        max_forward_rows: int,
        max_forward_outputs: int,
        clock: Callable[[], float],
        windows: Collection[int] = (),
        draft_sequences: DraftSequences | None = None,
    ) -> None:
        """`smallest_step_rows`: rows of the smallest step that is compiled; `max_forward_…`: of a custom-mask forward.

        `model_id` is the model's name in what events report of contexts. `clock` is the clock of deadlines, in seconds.
        `windows`: those that layers of the model have, in tokens. `draft_sequences`: of the draft model, if there is
        one.
        """
        self.num_in_flight = 0  # steps that were made and whose results have not been processed
        self._cache = cache
        self._block_manager = block_manager
        self._config = config
        self._smallest_step_rows = smallest_step_rows
        self._max_forward_rows = max_forward_rows
        self._max_forward_outputs = max_forward_outputs
        self._clock = clock
        self._active = ActiveRequests(cache, block_manager, config.max_batch, model_id)
        self.running = self._active.running
        self.writers = self._active.writers
        self._budget = PageBudget(cache, block_manager, self.running)
        self._deadlines = DeadlineReview(self._active, cache, config, clock)
        self._restoration = PageRestoration(self._active, cache, block_manager, config, windows)
        self._admission = Admission(
            self._active,
            cache,
            block_manager,
            self._budget,
            self._deadlines,
            self._restoration,
            config,
            clock,
        )
        self._custom_mask_next = False  # whose turn it is, where there are standard rows and custom-mask rows
        self._waits_for_steps = False  # whether standard rows could go but for steps in flight
        self._custom_mask_turn = 0  # of the request that was served last
        self._step_seconds = 0.0  # that all processed steps took
        self._tokens_computed = 0
        self._tokens_drafted = 0
        self._tokens_accepted = 0
        self._draft_sequences = draft_sequences
        self._to_draft: Mapping[Request, int] = {}  # a round of the draft model that the present call decided
        self._is_drafting = False  # whether a round was decided and its guesses have not come
        self._drafted: Mapping[Request, Sequence[int]] | None = None  # guesses that have come, for the next step
        self._round_began: float | None = None  # when the draft model began with these, by the clock
        self._tokens_drafted_by_model = 0
        self._tokens_accepted_by_model = 0
        self._sent_at: deque[float] = deque()  # when each step in flight was made
        self._processed_at = 0.0  # when the results of the last step came
        self._accepted_since_step = 0  # accepted drafts that are not yet counted as tokens of a step

    # Questions.

    @property
    def waiting(self) -> int:
        """Requests that do not run now."""
        return self._active.waiting

    @property
    def has_restored(self) -> bool:
        """Whether the last `schedule` brought pages back, so that calling it again may do more at once."""
        return self._restoration.progressed

    @property
    def moving_pages(self) -> int:
        """Pages that one context may move between tiers before the next step, whose rows others may wait for."""
        return MAX_PAGES_WHEN_IDLE if self._is_idle() else self._config.moving_pages

    @property
    def pages_reserved(self) -> int:
        """Pages that running requests were promised and have not taken yet."""
        return self._budget.pages_reserved

    @property
    def step_costs(self) -> StepCosts:
        """How long steps took until now. Forecasts are made from it."""
        return self._deadlines.forecast.costs

    def writer_of(self, context: Context) -> Request | None:
        """The request that has not ended and writes to this context, if there is one."""
        return self.writers.get(context)

    def requests(self) -> Collection[Request]:
        """All requests that have not ended."""
        return self.writers.values()

    def overdue(self, now: float) -> Sequence[Request]:
        """Requests whose deadline has passed, once each: their caller has given up."""
        return self._active.deadlines.due(now)

    def next_due(self, now: float) -> float:
        """Seconds in which no deadline passes, and no waiting request is to be checked again.

        To be asked after `review`, which takes out what was due.
        """
        deadline, review = self._active.deadlines.next, self._active.reviews.next
        seconds = math.inf if deadline is None else deadline - now
        return seconds if review is None else min(seconds, max(review - now, MIN_WAIT_S))

    def pages_reserved_for(self, tenant: str) -> int:
        """Pages that a tenant's running requests were promised and have not taken yet."""
        return sum(request.reserved_pages for request in self.writers.values() if request.context.tenant == tenant)

    def stats(self) -> SchedulerStats:
        """Load now, and counts since the start."""
        return SchedulerStats(
            running=len(self.running),
            waiting=self.waiting,
            pages_reserved=self._budget.pages_reserved,
            tokens_computed=self._tokens_computed,
            tokens_cached=self._restoration.tokens_cached,
            tokens_restored=self._restoration.tokens_restored,
            tokens_drafted=self._tokens_drafted,
            tokens_accepted=self._tokens_accepted,
            tokens_drafted_by_model=self._tokens_drafted_by_model,
            tokens_accepted_by_model=self._tokens_accepted_by_model,
            preemptions=self._active.preemptions,
            suspensions=self._budget.suspensions,
            tokens_queried=self._restoration.tokens_queried,
            requests_admitted=self._admission.requests_admitted,
            queue_seconds=self._admission.queue_seconds,
            step_seconds=self._step_seconds,
        )

    # Requests come, change and go.

    def submit(self, request: Request) -> Sequence[SchedulerEvent]:
        """Queue a request. Returns events: in a full queue, another tenant's latest request may have failed for it.

        Raises ResourceExhausted (NEVER_FITS, DEADLINE_UNREACHABLE or QUEUE_FULL), and then nothing has changed.
        """
        needed = self._block_manager.pages_for(request.worst_case_tokens)
        if needed > self._config.pages:
            message = f"needs {needed} pages in the worst case; the engine has {self._config.pages}"
            raise ResourceExhausted(message, reason="NEVER_FITS")
        self._deadlines.expect(request, self._admission.usable_slots)
        if self.waiting >= self._config.queue_limit:
            full = ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=1.0)
            victim = self._find_queue_victim(request)
            if victim is None:
                raise full
            self._active.fail(victim, full)
        request.submitted_at = self._clock()
        self._active.add(request)
        return self._active.take_events()

    def _find_queue_victim(self, request: Request) -> Request | None:
        """The latest request of the tenant that has most waiting ones, if this request's tenant would have fewer."""
        tenant, longest = self._active.queue.longest(request.priority)
        own = sum(not each.runs and each.tenant == request.tenant for each in self.writers.values())
        if tenant == request.tenant or longest <= own + 1:
            return None
        return self._active.queue.latest(request.priority, tenant)

    def end(self, request: Request) -> None:
        """Take a request out, wherever it is; its context keeps what was computed. Results in flight are ignored."""
        self._active.end(request)

    def observe_output(self, request: Request) -> None:
        """Learn the length of an output that has ended by itself: similar outputs may have about as many tokens."""
        self._deadlines.observe_output(request)

    def review(self, now: float) -> Sequence[SchedulerEvent]:
        """End requests that cannot be in time any more and take steps from others."""
        self._deadlines.review(now)
        return self._active.take_events()

    def reprioritise(self, context: Context) -> None:
        """After a change of the context's priority: move its waiting request in the queue."""
        request = self.writers.get(context)
        if request is not None and self._active.queue.remove(request):
            self._active.queue.push(request)
        self.reconsider()

    def reconsider(self) -> None:
        """After a change that may let the head of the queue be admitted, such as another suspendable context."""
        self._active.note_change()

    def claim_pages(self, pages: int) -> Claim:
        """Make so many pages claimable, beside those promised to running requests, by suspending contexts if needed."""
        return self._budget.claim(pages)

    def take_events(self) -> Sequence[SchedulerEvent]:
        """Events that no call has returned because it raised."""
        return self._active.take_events()

    # Steps.

    def schedule(self, ready: Ready) -> SchedulerOutput:
        """Admit what fits and make the next step: one row of every decoding request first, prompt chunks after.

        Custom-mask rows have steps of their own, which take turns with the others. `ready` says whether the data of a
        host slot has arrived.

        Where the draft model is to guess first, there is no standard step, but a round of guesses in `to_draft`. Call
        `take_drafts` when they have come: until then there is no standard step either.
        """
        self._to_draft = {}
        if self._draft_sequences is not None:
            self._draft_sequences.end_unused()
        self._admission.admit()
        self._restoration.restore(self._is_idle(), ready)
        batch = self._make_batch()
        if batch is not None:
            self.num_in_flight += 1
            self._sent_at.append(self._began(batch))
            self._restoration.step_made()
        elif not self._is_drafting and not self.num_in_flight:
            self._drafted = self._round_began = None  # the requests of the round have ended before its step
        return SchedulerOutput(
            batch,
            self._active.take_slots_to_load(),
            self._active.take_events(),
            to_draft=self._to_draft,
            to_follow=() if batch is None else self._requests_to_follow(),
        )

    def _began(self, batch: Batch) -> float:
        """When the work for a step began: with the guesses that it has, if a draft model made them."""
        if batch.outputs or self._round_began is None:  # a custom-mask forward has no guesses
            return self._clock()
        began, self._round_began = self._round_began, None
        return began

    def take_drafts(self, drafted: Mapping[Request, Sequence[int]]) -> None:
        """The draft model's guesses have come, for those requests of the round for which it could make any."""
        self._is_drafting = False
        self._drafted = drafted

    def process_output(self, batch: Batch) -> list[ScheduledRequest]:
        """Mark the rows of a finished step as computed; returns the requests in it whose run has not ended since."""
        self.num_in_flight -= 1
        self._measure(batch)
        live = [each for each in batch.scheduled if each.run_number == each.request.run_number]
        for scheduled in live:
            request = scheduled.request
            context, rows = request.context, scheduled.rows - len(scheduled.drafts)
            # 0 if the row only computed the logits of a token that had its KV.
            computed = scheduled.position + rows - context.seq_len
            self._cache.mark_computed(context, computed, hold=request.forward.keep_working)
            self._tokens_computed += rows
        return live

    def update_acceptance(self, scheduled: ScheduledRequest, accepted: int) -> None:
        """Note that `accepted` drafts of a processed step were right: its request continues after them."""
        request = scheduled.request
        self._tokens_drafted += len(scheduled.drafts)
        self._tokens_accepted += accepted
        self._accepted_since_step += accepted
        self._tokens_computed += accepted
        if scheduled.drafted_by_model:
            assert request.draft_pace is not None
            self._tokens_drafted_by_model += len(scheduled.drafts)
            self._tokens_accepted_by_model += accepted
            request.draft_pace.update(request.context.length, len(scheduled.drafts), accepted)
        elif request.prompt_lookup is not None:
            request.prompt_lookup.update_acceptance(request.context, accepted)
        request.dispatch_end = request.context.length
        request.next_position, request.samples_left = request.dispatch_end - 1, request.tokens_left

    def _is_idle(self) -> bool:
        """Whether no step is in flight, and none can be made."""
        if self.num_in_flight:
            return False
        return not any(request.rows_ready and not request.must_wait for request in self.running)

    def _make_batch(self) -> Batch | None:
        """The next step, or None. Custom-mask and standard steps take turns."""
        self._custom_mask_next = not self._custom_mask_next
        if self._custom_mask_next:
            return self._custom_mask_batch() or self._standard_batch()
        self._waits_for_steps = False
        batch = self._standard_batch()
        if self._waits_for_steps:  # it is their turn until they are done: more steps in flight would go on for ever
            self._custom_mask_next = True
            return None
        return batch or self._custom_mask_batch()

    def _custom_mask_batch(self) -> Batch | None:
        """A step of custom-mask rows, of the running request that has waited longest; as many as one forward holds."""
        for request in sorted(self.running, key=lambda each: each.custom_mask_turn):
            rows = request.next_custom_mask_rows(self._max_forward_rows)
            if rows and not request.must_wait:
                request.custom_mask_turn = self._custom_mask_turn = self._custom_mask_turn + 1
                stop = request.next_position + rows
                outputs = [index for index in request.forward.outputs if request.next_position <= index < stop]
                if len(outputs) > self._max_forward_outputs:
                    del outputs[self._max_forward_outputs :]
                    rows = outputs[-1] + 1 - request.next_position
                scheduled = self._take_rows(request, 0, rows, 0, outputs)
                return Batch([scheduled], rows, max(len(outputs), 1))
        return None

    def _standard_batch(self) -> Batch | None:
        """A step of standard rows, of all running requests; as many as one step holds."""
        if self._is_drafting:
            return None
        # Once for both: a reader may take outputs at any time, from another thread.
        running = [request for request in self.running if not request.must_wait]
        proposal = self._propose_drafts(running)
        if (proposal.drafts or proposal.to_draft) and self.num_in_flight:
            self._waits_for_steps = True  # drafts must follow the tokens that are still on the device
            return None
        if proposal.to_draft:
            self._to_draft, self._is_drafting = proposal.to_draft, True
            self._round_began = self._clock()
            return None
        self._drafted = None
        row_limit = self._config.max_batch_tokens
        batch: list[ScheduledRequest] = []
        row = samples = 0
        # The sort is stable: decoding rows first, each group first come, first served.
        for request in sorted(running, key=_is_prefilling):
            rows = request.next_standard_rows(row_limit - row)
            if not rows:
                continue
            scheduled = self._take_rows(request, row, rows, samples, drafts=proposal.drafts.get(request, NO_DRAFTS))
            batch.append(scheduled)
            row += scheduled.rows
            samples += len(scheduled.output_positions)
        return Batch(batch, row) if batch else None

    def _propose_drafts(self, running: Sequence[Request]) -> Proposal:
        """Drafts by request, for the rows that would pad the next step, if all of its requests are decoding."""
        ready = [each for each in running if each.next_standard_rows(1)]
        spare = self._config.padding(len(ready))
        if not spare or not all(request.is_decoding for request in ready):
            return NO_PROPOSAL
        rows_are_free = len(ready) != self._smallest_step_rows
        min_ngram = MIN_NGRAM if rows_are_free else MIN_NGRAM_ALONE
        return propose_drafts(ready, spare, self._config.draft_tokens, min_ngram, self._draft_sequences, self._drafted)

    def _requests_to_follow(self) -> Sequence[Request]:
        """Running requests of which the draft model lacks tokens, if a step of all of them has rows for guesses."""
        sequences = self._draft_sequences
        if sequences is None or self._is_drafting or not self._config.padding(len(self.running)):
            return ()
        return [request for request in self.running if sequences.wants_to_follow(request)]

    def _take_rows(
        self,
        request: Request,
        first_row: int,
        rows: int,
        sample_offset: int,
        output_positions: Sequence[int] = (),
        drafts: Drafts = NO_DRAFTS,
    ) -> ScheduledRequest:
        """The request's next `rows` rows, and its drafts, as a part of the step that is made; its progress moves on.

        Gives the context pages for their KV. `output_positions` are those of a custom-mask forward. In a standard step
        the last known token and the drafts after it are sampled.
        """
        position, guesses = request.next_position, len(drafts.tokens)
        rows += guesses
        request.dispatch_end += guesses
        request.samples_left -= guesses
        self._grow(request, position + rows)
        request.next_position += rows
        if request.next_position == request.dispatch_end and request.samples_left > 0:
            output_positions = _take_samples(request, guesses)
        return ScheduledRequest(
            request=request,
            run_number=request.run_number,
            first_row=first_row,
            rows=rows,
            position=position,
            output_positions=output_positions,
            sample_offset=sample_offset,
            drafts=drafts.tokens,
            drafted_by_model=drafts.by_model,
        )

    def _grow(self, request: Request, tokens: int) -> None:
        """Give the request's context working pages for its first `tokens` tokens, out of the promised pages."""
        context = request.context
        pages_before = context.working_pages
        self._cache.grow(context, tokens - context.seq_len)
        taken = context.working_pages - pages_before
        request.taken_pages += taken
        request.reserved_pages -= taken

    def _measure(self, batch: Batch) -> None:
        """Learn how long a step took, from when it was made, or from when the step before it was done, if later."""
        now = self._clock()
        seconds = now - max(self._sent_at.popleft(), self._processed_at)
        self._processed_at = now
        self._step_seconds += seconds
        decoding = decoding_rows = 0
        for scheduled in batch.scheduled:
            samples_one = scheduled.rows - len(scheduled.drafts) == 1 and len(scheduled.output_positions)
            if samples_one and scheduled.request.output is not None:
                decoding += 1
                decoding_rows += scheduled.rows
        tokens, self._accepted_since_step = decoding + self._accepted_since_step, 0
        self._deadlines.observe_step(
            now, seconds, decoding=decoding, tokens=tokens, prompt_rows=batch.rows - decoding_rows
        )


def _take_samples(request: Request, drafts: int) -> range:
    """The positions that are sampled in the step that has the request's last row and `drafts` drafts behind it."""
    request.samples_left -= 1
    if request.samples_left > 0 and not drafts:
        request.dispatch_end += 1  # the next token will be on the device; after drafts it is unknown where it is
    return range(request.next_position - 1 - drafts, request.next_position)


def _is_prefilling(request: Request) -> bool:
    return not request.is_decoding
