"""EngineCore: the engine without its thread. Every method is called on the step thread, does its work and returns.

A fill or a generation becomes a `Request` for the scheduler. `dispatch` carries out what the scheduler decides and
sends the next step to the device; `process_output` applies a step's results when they have arrived. Up to
`steps_in_flight` steps are between the two, so the host prepares step n+1 while the device computes step n.

    Request ──submit──▶ Scheduler ──schedule──▶ SchedulerOutput ──dispatch──▶ device
                            ▲                                                   │
                            └──────────process_output──────── results ◀─────────┘
"""

import logging
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxctx import errors
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity
from jaxctx.cache.page_control import take_back, truncate
from jaxctx.cache.tiers import MoveKind
from jaxctx.engine.adapters.table import AdapterTable
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.contexts.quotas import Quotas
from jaxctx.engine.core.forward_pass import attention_overrides, make_forward
from jaxctx.engine.core.output import PRIMING_TOKENS, Output, OutputText
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.draft_model import DraftModel, DraftRound
from jaxctx.engine.drafting.pace import DraftPace
from jaxctx.engine.grammar.compiler import PreparedMatcher
from jaxctx.engine.grammar.mask_worker import MaskWorker, MatcherStep, NextMask
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.batch import write_batch
from jaxctx.engine.runner.kv_transfer import KVTransfer
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import read_output, write_metadata
from jaxctx.engine.scheduler.prompt_lookup import PromptLookup
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.engine.scheduler.scheduler_output import (
    Batch,
    ContextSuspended,
    RequestFailed,
    RequestFinished,
    ScheduledRequest,
    SchedulerEvent,
)
from jaxctx.errors import JaxctxError
from jaxctx.model.sampling import Sampled
from jaxctx.model.text import ModelText
from jaxctx.seeds import derive_seed
from jaxctx.types import ContextInfo, EngineStats, FillResult, ForwardRequest, GenerateRequest

log = logging.getLogger("jaxctx.engine")
StepArrays: TypeAlias = tuple[Any, Any]  # logits of a custom-mask forward or None, and int32 [samples, words]


@dataclass(frozen=True, slots=True)
class _SampledToken:
    """A token that was sampled for an output with a format."""

    request: Request
    token: int


class EngineCore:
    """State of one engine: cache, scheduler, device."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        text: ModelText,
        model: Identity,
        model_id: str,
        deps: RuntimeDeps,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`model`: the identity of the engine's pages, without tenant and salt. `draft_model`: guesses tokens."""
        self.config = config
        self.runner = runner
        self.deps = deps
        self.text = text
        self.block_manager = BlockManager(config.pages, config.page_size, config.host_pages, config.disk_pages)
        self.cache = ContextCache(self.block_manager, deps.wall_clock, deps.new_id)
        self.transfers = KVTransfer(runner, config.disk_pages, config.disk_file)
        self.draft_model = draft_model
        largest_forward = runner.custom_mask_shapes[-1]
        self.scheduler = Scheduler(
            cache=self.cache,
            block_manager=self.block_manager,
            config=config,
            model_id=model_id,
            smallest_step_rows=runner.shapes[0].rows,
            max_forward_rows=largest_forward.rows,
            max_forward_outputs=largest_forward.samples,
            clock=deps.clock,
            windows=[window for window in largest_forward.mask_windows if window is not None],
            draft_sequences=None if draft_model is None else draft_model.sequences,
        )
        self.masks = MaskWorker()
        self.quotas = Quotas(config)
        self.lifecycle = ContextLifecycle(self.cache, self.scheduler, self.quotas, deps.wall_clock)
        slots = runner.adapter_slots
        self.adapters = AdapterTable(0 if slots is None else slots.count, self.cache)
        self.contexts = ContextOperations(
            config, self.cache, self.scheduler, self.lifecycle, self.quotas, self.adapters, model, model_id
        )
        self.draining = False
        self.steps = 0
        self.tokens_generated = 0
        self.prompt_tokens = 0  # that fills and forwards appended
        self._events: deque[SchedulerEvent] = deque()  # returned by the scheduler, not carried out yet
        self._to_draft: Mapping[Request, int] = {}  # what the scheduler wants guessed, not sent yet
        self._goes_on = False  # whether a step can be made at once, as no guesses will come
        self._to_follow: Sequence[Request] = ()  # what the draft model is to compute behind the next step
        self._post: Callable[[Callable[[], object]], None] = _run_at_once

    # Requests.

    def fill(
        self, caller: Caller, context_id: str, tokens: np.ndarray, defer: bool, reply: ResultFuture
    ) -> Request | FillResult:
        """Append int32 tokens and compute them; with `defer`, only append. A result if there is nothing to compute."""
        context = self._context_to_append(caller, context_id, tokens)
        self.cache.append(context, tokens)
        if defer or context.length == 0 or not (context.buffered_tokens or context.suspended):
            self.prompt_tokens += len(tokens)
            self.lifecycle.notify_changed(context)
            return FillResult(resident=0, restored=0, computed=0, context=self.contexts.describe(context))
        return self._submit(Request(context, caller, reply, appended_tokens=len(tokens)))

    def hold(self, caller: Caller, context_id: str) -> Context:
        """The context that a generation is going to flush and fork; see `ContextOperations.hold`."""
        self.raise_if_draining()
        return self.contexts.hold(caller, context_id)

    def flush_held(self, caller: Caller, context: Context, reply: ResultFuture) -> Request | None:
        """Compute what is buffered of a context that the caller holds. None if there is nothing to compute."""
        if not context.buffered_tokens:
            self.lifecycle.notify_changed(context)
            return None
        return self._submit(Request(context, caller, reply))

    def output_so_far(self, caller: Caller, request: GenerateRequest) -> tuple[list[int], list[int]]:
        """For an output that is resumed: the last tokens before it, and the tokens that it has."""
        context = self._context_to_generate(caller, request, request.context_id)
        begin = context.length - request.resume_tokens
        return context.tokens(max(begin - PRIMING_TOKENS, 0), begin).tolist(), context.tokens(begin).tolist()

    def generate(
        self,
        caller: Caller,
        request: GenerateRequest,
        context_id: str,
        index: int,
        reply: ResultFuture,
        resumed: OutputText | None = None,
        prepared: PreparedMatcher | None = None,
    ) -> Request:
        """Continue one context. The outputs of a request with n > 1 come here one by one, each with its fork's id.

        `resumed` is the text of an output that is resumed. Its tokens, those of `output_so_far`, must still be the last
        ones of the context. `prepared` says which tokens of an output may come next.
        """
        context = self._context_to_generate(caller, request, context_id)
        if context.length == 0:
            message = "an empty context cannot be continued: fill it first"
            raise errors.FailedPrecondition(message, reason="CONTEXT_EMPTY")
        text = resumed
        if text is None:
            before = context.tokens(max(context.length - PRIMING_TOKENS, 0)).tolist()
            text = OutputText(request, self.text, before)
        if not np.array_equal(context.tokens(context.length - text.tokens), text.resumed):
            message = "the context changed while its output was to be resumed"
            raise errors.Aborted(message, reason="CONTEXT_BUSY", retry_after_s=0.1)
        free_tokens = self.config.max_context_tokens - context.length
        if free_tokens < 1:
            message = f"the context is full: it holds at most {self.config.longest}"
            raise errors.OutOfRange(message, reason="CONTEXT_TOO_LONG")
        seed = request.sampling.seed
        seed = self.deps.new_seed() if seed is None else derive_seed(seed, index)
        max_tokens = min(request.max_tokens or self.config.default_max_tokens, text.tokens + free_tokens)
        output = Output(request, index, context, text, seed, max_tokens, prepared)
        may_draft = self.config.draft_tokens > 0 and not output.sampler.needs_history and prepared is None
        prompt_lookup = PromptLookup() if may_draft else None
        draft_pace = DraftPace() if may_draft and self.draft_model is not None else None
        return self._submit(Request(context, caller, reply, output, prompt_lookup, draft_pace))

    def resume(self, caller: Caller, context: Context, reply: ResultFuture) -> Request | FillResult:
        """Restore, or compute, the tokens that had KV when the context was suspended or saved.

        Returns a result if all of them have KV now. Raises NotFound if the context was closed since its caller got it;
        another one may have its id.
        """
        context.raise_if_closed()
        self.contexts.writable(Caller(context.tenant), context.id)
        if not context.suspended and context.seq_len >= context.computed:
            info = self.contexts.describe(context)
            return FillResult(resident=context.seq_len, restored=0, computed=0, context=info)
        return self._submit(Request(context, caller, reply, compute_to=context.computed))

    def forward(self, caller: Caller, request: ForwardRequest, tokens: np.ndarray, reply: ResultFuture) -> Request:
        """Compute explicit tokens, int32, at explicit positions under explicit masks."""
        context = self._context_to_append(caller, request.context_id, tokens)
        first = context.length
        self.cache.append(context, tokens, attention_overrides(request, first))
        forward = make_forward(request, first, self.deps.new_seed)
        return self._submit(Request(context, caller, reply, forward=forward, appended_tokens=len(tokens)))

    def _context_to_append(self, caller: Caller, context_id: str, tokens: np.ndarray) -> Context:
        """The context, if these tokens may be appended to it."""
        self.raise_if_draining()
        context = self.contexts.writable(caller, context_id)
        if context.length + len(tokens) > self.config.max_context_tokens:
            message = f"{context.length} + {len(tokens)} tokens; a context holds at most {self.config.longest}"
            raise errors.OutOfRange(message, reason="CONTEXT_TOO_LONG")
        return context

    def _context_to_generate(self, caller: Caller, request: GenerateRequest, context_id: str) -> Context:
        """The context, if it may be generated into and is longer than the part of an output that is resumed."""
        context = self.contexts.writable(caller, context_id)
        if 0 < request.resume_tokens >= context.length:
            message = f"must be below the context's length, {context.length}"
            raise errors.InvalidArgument.field("resume_tokens", message)
        return context

    def _submit(self, request: Request) -> Request:
        """Hand a request to the scheduler; if it is refused, its context loses the tokens that were appended for it."""
        context = request.context
        try:
            self.lifecycle.check_growth(context, -(-request.worst_case_tokens // context.page_size))
            events = self.scheduler.submit(request)
        except JaxctxError:
            if request.appended_tokens:
                truncate(self.cache, context, request.appended_tokens)
            raise
        self.prompt_tokens += request.appended_tokens
        self._carry_out_events(events)
        self.lifecycle.notify_changed(context)
        return request

    def raise_if_draining(self) -> None:
        """Raises Unavailable (DRAINING) once a drain has begun."""
        if self.draining:
            raise errors.Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)

    def begin_draining(self) -> None:
        """Refuse new work from now on."""
        self.draining = True
        self.lifecycle.wake_watches()

    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return len(self.scheduler.requests()) > 0

    def has_work(self) -> bool:
        """Whether any request has not ended, or an accepted call is still to make some."""
        return self.has_requests() or len(self.lifecycle.held) > 0

    # How requests end.

    def end(self, request: Request) -> None:
        """Stop a request in any state. What was computed stays in its context; other pages that it took become free."""
        if not request.ended:
            self.scheduler.end(request)
            self.lifecycle.notify_changed(request.context)

    def fail(self, request: Request, error: JaxctxError) -> None:
        """End a request with an error for its caller. If it is refused, its appended tokens are removed again."""
        self.end(request)
        self._answer_failed(RequestFailed(request, error))

    def fail_all(self, error: JaxctxError) -> None:
        """End every request with this error, even if the engine's state may be wrong: every caller gets an answer."""
        unanswered = list(self.scheduler.requests())
        for request in unanswered:
            try:
                self.end(request)
            except Exception:
                log.exception("a request could not be ended")
        # Also requests that the scheduler has ended, and whose event was not carried out before the failure.
        for event in [*self._events, *self.scheduler.take_events()]:
            if not isinstance(event, ContextSuspended):
                unanswered.append(event.request)
        self._events.clear()
        for request in unanswered:
            request.reply.set_error(copy(error))  # raised by many tasks, each with a traceback of its own
        self.lifecycle.wake_watches()

    def expire(self) -> float:
        """Close expired contexts, and end requests whose deadline has passed.

        Returns seconds until the next one may end.
        """
        soon, now = self.lifecycle.expire(), self.deps.clock()
        for request in self.scheduler.overdue(now):
            self.fail(request, errors.DeadlineExceeded("the deadline passed"))
        self._carry_out_events(self.scheduler.review(now))
        return min(soon, self.scheduler.next_due(now))

    def expire_contexts(self) -> None:
        """Close expired contexts, so that no command finds one."""
        self.lifecycle.expire()

    def _carry_out_events(self, events: Sequence[SchedulerEvent]) -> None:
        """Notify callers and watches of the scheduler's decisions, in their order."""
        if not events:
            return
        self._events.extend(events)
        while self._events:
            event = self._events[0]
            match event:
                case ContextSuspended(context):
                    self.lifecycle.notify_suspended(context)
                case RequestFailed(request):
                    self.lifecycle.notify_changed(request.context)
                    self._answer_failed(event)
                case RequestFinished(request, info):
                    self.lifecycle.notify_changed(request.context)
                    # The version counts this change, and not those of events that come after it.
                    self._answer_finished(request, replace(info, version=request.context.version))
            self._events.popleft()

    def _answer_failed(self, failed: RequestFailed) -> None:
        """Answer a request that has ended with its error. If it was refused, its appended tokens are removed again."""
        request, context = failed.request, failed.request.context
        # Nothing is computed either if it was preempted while its pages came back: then some of its tokens have KV.
        computed_nothing = request.computed_tokens is None
        if request.appended_tokens and computed_nothing and isinstance(failed.error, errors.ResourceExhausted):
            take_back(self.cache, context, context.length - request.appended_tokens)
            self.lifecycle.notify_changed(context)
        request.reply.set_error(failed.error)

    def _answer_finished(self, request: Request, info: ContextInfo) -> None:
        """Answer a fill, forward or opening that has ended; `info` describes its context as it ended."""
        request.reply.set_result(request.result(info))

    # Steps.

    def can_dispatch(self) -> bool:
        """Whether another step may be in flight."""
        return self.scheduler.num_in_flight < self.config.steps_in_flight

    def may_dispatch_again(self) -> bool:
        """Whether `dispatch`, although it sent nothing, may do more if called again: pages were restored, or a round of
        guesses was wanted and could not be sent.
        """
        return self.scheduler.has_restored or self._goes_on

    def dispatch(self) -> tuple[Batch, StepArrays] | None:
        """Carry out what the scheduler decides and send the next step; None if there is none.

        Returns what the step computes, and the device's arrays where its output will be.
        """
        self._goes_on = False
        batch = self.schedule()
        self.carry_out_moves()
        if batch is None:
            return None
        self.steps += 1
        shape = self.runner.select_bucket(batch.rows, batch.outputs)
        packed, views = self.runner.make_step_inputs(shape)
        segments = write_batch(batch, views, self.config.page_size, self.adapters.slot_of)
        write_metadata(segments, shape, views)
        masks = _masks_of(batch)
        if masks:
            self.runner.load_allowed(masks)
        arrays = self.runner.run(shape, packed, logits=batch.wants_logits)
        if self._to_follow and self.draft_model is not None:
            self.draft_model.catch_up(self._to_follow)
        return batch, arrays

    def dispatch_drafts(self) -> tuple[DraftRound, Sequence[Any]] | None:
        """Send the round of guesses that the last `dispatch` found to be wanted; None if there is none.

        Returns the round, and the device's arrays where its guesses will be.
        """
        to_draft, self._to_draft = self._to_draft, {}
        if not to_draft:
            return None
        assert self.draft_model is not None
        sent = self.draft_model.start(to_draft)
        if sent is None:  # no pages for any: the next step goes without
            self.scheduler.take_drafts({})
            self._goes_on = True
        return sent

    def process_drafts(self, round_: DraftRound, arrays: Sequence[Any]) -> None:
        """Take a round's guesses, as numpy arrays: the next step has them."""
        assert self.draft_model is not None
        self.scheduler.take_drafts(self.draft_model.finish(round_, arrays))

    def schedule(self) -> Batch | None:
        """The next step, or None. The scheduler's other decisions are carried out."""
        decided = self.scheduler.schedule(self._host_slot_ready)
        self._carry_out_events(decided.events)
        for request in decided.slots_to_load:
            self._load_slot(request)
        self._to_draft, self._to_follow = decided.to_draft, decided.to_follow
        return decided.batch

    def carry_out_moves(self) -> None:
        """Carry out the cache's page moves, before every later step."""
        self.transfers.carry_out(self.cache.moves())

    def _host_slot_ready(self, slot: int) -> bool:
        """Whether the data of a host slot will have arrived when all moves decided until now are carried out.

        Raises DataLoss if it never will.
        """
        match self.cache.pending_move_to_host(slot):
            case MoveKind.SAVE:
                return True  # from the device, in order with its steps
            case MoveKind.FETCH:
                return False  # the read from disk has not begun
            case _:
                return self.transfers.is_ready(slot)

    def _load_slot(self, request: Request) -> None:
        """Before a request's first step: load into its slot what penalties, bias and min_tokens need."""
        output, tokens = request.output, request.context.tokens()
        assert output is not None
        prompt, sampled = np.split(tokens, [len(tokens) - output.tokens])
        self.runner.load_slot(request.slot, prompt, sampled, output.request.sampling.logit_bias, output.stop_ids)

    def process_output(self, batch: Batch, arrays: StepArrays) -> None:
        """Apply a step's results, as numpy arrays: contexts grow, readers get pieces, finished requests end."""
        logits, packed = arrays
        sampled_by_tenant: dict[str, list[_SampledToken]] = {}  # tokens of outputs that go on and have a matcher
        sampled = read_output(packed)
        for scheduled in self.scheduler.process_output(batch):
            request = scheduled.request
            try:
                self.lifecycle.notify_changed(request.context)
                if request.output is None:
                    self._take_forward_answers(scheduled, logits, sampled)
                elif scheduled.output_positions:
                    self._take_samples(scheduled, sampled)
                    if request.awaits_mask and not request.ended:
                        token = _SampledToken(request, int(sampled.tokens[scheduled.sample_offset]))
                        sampled_by_tenant.setdefault(request.tenant, []).append(token)
            except Exception as exception:  # of one request's text or reply; its neighbours must not notice
                # Without the exception's message, which may quote the request.
                stack = "".join(traceback.format_tb(exception.__traceback__))
                log.error("a request failed with %s:\n%s", type(exception).__name__, stack)
                self.fail(request, errors.Internal("this request failed inside the server"))
        for tenant, tokens in sampled_by_tenant.items():
            self._compute_masks(tenant, tokens)

    def _compute_masks(self, tenant: str, tokens: Sequence[_SampledToken]) -> None:
        """Let the matchers of these outputs of one tenant take their tokens; `take_masks` gets the result."""
        steps: list[MatcherStep] = []
        for each in tokens:
            assert each.request.output is not None
            assert each.request.output.matcher is not None
            steps.append(MatcherStep(each.request.output.matcher, each.token))
        requests = [each.request for each in tokens]

        def done(masks: Sequence[NextMask]) -> None:  # on another thread
            self._post(partial(self.take_masks, requests, masks))

        self.masks.submit(tenant, steps, done)

    def take_masks(self, requests: Sequence[Request], masks: Sequence[NextMask]) -> None:
        """Let requests go on of which it is known now what may come next; one that cannot go on ends with its error."""
        for request, mask in zip(requests, masks, strict=True):
            if request.ended:
                continue
            if isinstance(mask, JaxctxError):
                self.fail(request, mask)
                continue
            assert request.output is not None
            request.output.next_mask = mask

    def _take_forward_answers(self, scheduled: ScheduledRequest, logits: Any, sampled: Sampled) -> None:
        """Apply computed rows of a fill, opening or forward; its last rows end it."""
        request = scheduled.request
        answers = request.forward.answers(scheduled.output_positions, logits, sampled)
        request.forward_answers |= answers  # after a preemption, some are computed again
        if request.context.seq_len >= request.prompt_end:
            self.end(request)
            self._answer_finished(request, self.contexts.describe(request.context))

    def _take_samples(self, scheduled: ScheduledRequest, sampled: Sampled) -> None:
        """Append the sampled token, and one more for each draft that was right."""
        request, row = scheduled.request, scheduled.sample_offset
        self._take_sample(request, sampled, row)
        for draft in scheduled.drafts:
            if request.ended or sampled.tokens[row] != draft:
                break
            row += 1
            self.cache.mark_computed(request.context, 1)
            self._take_sample(request, sampled, row)
        if scheduled.drafts:
            self.scheduler.update_acceptance(scheduled, row - scheduled.sample_offset)

    def _take_sample(self, request: Request, sampled: Sampled, row: int) -> None:
        """Append the token of one row to the context, and send its piece. The last piece ends the request."""
        output = request.output
        assert output is not None
        self.cache.append(request.context, [int(sampled.tokens[row])])
        self.tokens_generated += 1
        is_first = output.tokens == output.request.resume_tokens
        piece = output.push(sampled, row)
        if piece.finish is None:
            if output.matcher is not None:
                output.next_mask = None  # it was for this token
            request.reply.add_piece(replace(piece, usage=request.usage()) if is_first else piece)
            return
        self.end(request)
        self.scheduler.observe_output(request)
        info = self.contexts.describe(request.context)
        request.reply.add_piece(replace(piece, seed=output.sampler.seed, usage=request.usage(), context=info))
        request.reply.set_result(None)

    # For the step loop.

    def on_masks(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Call `post`, from any thread, with what the step thread is to do when masks of outputs are known."""
        self._post = post

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a page has arrived in host memory or is lost."""
        self.transfers.on_arrival = wake

    def count_compilations(self) -> AbstractContextManager[None]:
        """While entered, compilations on this thread count as ones after the engine was ready."""
        return self.runner.count_compilations()

    def close(self) -> None:
        """Stop the threads that move pages and compute masks. The step thread has ended."""
        self.transfers.close()
        self.masks.close()

    def stats(self) -> EngineStats:
        """Load and memory now; `snapshots` is 0, as the store counts them."""
        memory, scheduler = self.block_manager.stats(), self.scheduler.stats()
        return EngineStats(
            pages_total=memory.pages_total,
            pages_free=memory.pages_free,
            pages_cached=memory.pages_cached,
            pages_held=memory.pages_held,
            pages_reserved=scheduler.pages_reserved,
            contexts=len(self.cache.context_table),
            running=scheduler.running,
            waiting=scheduler.waiting,
            draining=self.draining,
            steps=self.steps,
            tokens_computed=scheduler.tokens_computed,
            tokens_cached=scheduler.tokens_cached,
            tokens_generated=self.tokens_generated,
            preemptions=scheduler.preemptions,
            suspensions=scheduler.suspensions,
            compilations_after_ready=self.runner.compilations_after_ready,
            functions_compiling=self.runner.functions_left,
            tokens_restored=scheduler.tokens_restored,
            host_pages_total=memory.host_pages_total,
            host_pages_used=memory.host_pages_used,
            disk_pages_total=memory.disk_pages_total,
            disk_pages_used=memory.disk_pages_used,
            snapshots=0,
            publications=len(self.cache.publications),
            expired=self.lifecycle.expired,
            tokens_drafted=scheduler.tokens_drafted,
            tokens_accepted=scheduler.tokens_accepted,
            tokens_drafted_by_model=scheduler.tokens_drafted_by_model,
            tokens_accepted_by_model=scheduler.tokens_accepted_by_model,
            tokens_queried=scheduler.tokens_queried,
            prompt_tokens=self.prompt_tokens,
            requests_admitted=scheduler.requests_admitted,
            queue_seconds=scheduler.queue_seconds,
            step_seconds=scheduler.step_seconds,
            adapters=self.adapters.count,
        )


def _masks_of(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """For each request of a step that samples a token out of some only: its slot, and what it may sample."""
    masks: list[tuple[int, np.ndarray]] = []
    for scheduled in batch.scheduled:
        output = scheduled.request.output
        if scheduled.output_positions and output is not None and output.next_mask is not None:
            masks.append((scheduled.request.slot, output.next_mask))
    return masks


def _run_at_once(command: Callable[[], object]) -> None:
    command()
