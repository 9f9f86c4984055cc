"""Core: the engine without its thread. Every method is called on the step thread, does its work at once and returns.

A fill or a generation becomes a `Sequence` for the scheduler. `dispatch` sends the next step to the device; `settle`
books a step's results when they have arrived. Up to `steps_in_flight` steps lie between the two, so the host prepares
step n+1 while the device computes step n.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass

import jax
import numpy as np

from jaxctx.cache.contexts import Context, ContextCache, Identity
from jaxctx.engine.batch import Batch, Part, write_part
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.delivery import fill_result, last_piece, token_piece
from jaxctx.engine.device import MAX_BIAS, MAX_STOPS, Device, SlotHistory
from jaxctx.engine.interface import Caller, ContextInfo, EngineStats, FillResult, GenerateRequest, PlanResult
from jaxctx.engine.operations import ContextOperations
from jaxctx.engine.output import Output
from jaxctx.engine.scheduler import Scheduler
from jaxctx.engine.sequence import Reply, Sampler
from jaxctx.engine.sequence import Sequence as Work
from jaxctx.engine.step import StepOutput, read_output
from jaxctx.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    JaxctxError,
    OutOfRange,
    Unavailable,
)
from jaxctx.model.text import ModelText
from jaxctx_kernels import plan_attention

log = logging.getLogger("jaxctx.engine")


@dataclass(frozen=True, slots=True)
class World:
    """What the engine would otherwise take from the outside: clocks and chance."""

    clock: Callable[[], float]  # monotonic seconds, for deadlines
    wall_clock: Callable[[], float]  # unix seconds, for created_at and used_at
    new_id: Callable[[], str]  # 128 random bits
    new_seed: Callable[[], int]  # 63 random bits


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on the device: what it computes and where its output will be."""

    batch: Batch
    output: jax.Array


class EngineCore:
    """State of one engine: cache, scheduler, device, and who writes to which context."""

    def __init__(
        self, config: EngineConfig, device: Device, text: ModelText, model: Identity, vocab_size: int, world: World
    ) -> None:
        self._config = config
        self._device = device
        self._text = text
        self._vocab_size = vocab_size
        self._world = world
        self._writers: dict[Context, Work] = {}
        self.cache = ContextCache(
            pages=config.pages, page_size=config.page_size, clock=world.wall_clock, new_id=world.new_id
        )
        self.scheduler = Scheduler(self.cache, config, self._load_slot, self.fail)
        self.contexts = ContextOperations(
            config, self.cache, self.scheduler.budget, device.copy_pages, model, busy=self._writers
        )
        self.draining = False
        self._steps = 0
        self._generated = 0

    # --- requests ------------------------------------------------------------------------------------------------

    def fill(self, caller: Caller, context_id: str, tokens: np.ndarray, defer: bool, reply: Reply) -> Work | None:
        """Append int32 tokens and compute them, or with `defer` only keep them. None if there is nothing to compute."""
        self.raise_if_draining()
        self._raise_if_unknown(tokens)
        context = self.contexts.writable(caller, context_id)
        if context.length + len(tokens) > self._config.max_context_tokens:
            raise OutOfRange(
                f"{context.length} + {len(tokens)} tokens; a context holds at most {self._config.max_context_tokens}",
                reason="CONTEXT_TOO_LONG",
            )
        self.cache.append(context, tokens)
        if defer or context.length == 0 or not (context.buffered_tokens or context.suspended):
            reply.done(FillResult(resident=0, restored=0, computed=0, context=self.contexts.describe(context)))
            return None
        sequence = Work(context, caller, reply)
        try:
            return self._submit(sequence)
        except JaxctxError:
            self.cache.truncate(context, len(tokens))
            raise

    def generate(self, caller: Caller, request: GenerateRequest, context_id: str, index: int, reply: Reply) -> Work:
        """Continue one context. The outputs of a request with n > 1 come here one by one, each with its fork's id."""
        context = self.contexts.writable(caller, context_id)
        if context.length == 0:
            raise FailedPrecondition("an empty context cannot be continued: fill it first", reason="CONTEXT_EMPTY")
        room = self._config.max_context_tokens - context.length
        if room < 1:
            raise OutOfRange("the context has reached the model's limit", reason="CONTEXT_TOO_LONG")
        seed = request.sampling.seed
        seed = self._world.new_seed() if seed is None else (seed + index) % 2**63
        output = Output(request, self._text, tail=context.tokens(max(context.length - 8, 0)).tolist())
        if len(output.stop_ids) > MAX_STOPS:
            raise InvalidArgument.field("stop_token_ids", f"at most {MAX_STOPS}, the model's own included")
        if len(request.sampling.logit_bias) > MAX_BIAS:
            raise InvalidArgument.field("sampling.logit_bias", f"at most {MAX_BIAS} entries")
        sequence = Work(
            context,
            caller,
            reply,
            request=request,
            sampler=Sampler(request, seed),
            output=output,
            index=index,
            max_tokens=min(request.max_tokens or self._config.default_max_tokens, room),
        )
        return self._submit(sequence)

    def _submit(self, sequence: Work) -> Work:
        self.scheduler.submit(sequence)
        self._writers[sequence.context] = sequence
        return sequence

    def _raise_if_unknown(self, tokens: np.ndarray) -> None:
        """JAX does not check indices: an id beyond the vocabulary would silently be another token."""
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise InvalidArgument.field("tokens", f"ids must be 0 to {self._vocab_size - 1}")

    def fork(self, caller: Caller, context_id: str, ids: Iterable[str | None]) -> list[ContextInfo]:
        """One child per id, all or none; beside a writer, with what was settled."""
        parent = self.cache.get(caller.tenant, context_id)
        return [self.contexts.describe(child) for child in self.contexts.fork(parent, list(ids))]

    def plan(self, caller: Caller, tokens: np.ndarray, context_id: str | None, salt: str) -> PlanResult:
        """What a fill would find and need."""
        self._raise_if_unknown(tokens)
        return self.contexts.plan(caller, tokens, context_id, salt)

    def update(
        self,
        caller: Caller,
        context_id: str,
        priority: int | None,
        pinned: bool | None,
        labels: Mapping[str, str] | None,
    ) -> ContextInfo:
        """Change what is given of a context. A new priority holds for its waiting request too."""
        info = self.contexts.update(caller, context_id, priority, pinned, labels)
        writer = self._writers.get(self.cache.get(caller.tenant, context_id))
        if writer is not None:
            self.scheduler.reprioritise(writer)
        self.scheduler.reconsider()
        return info

    def now(self) -> float:
        """The clock of deadlines."""
        return self._world.clock()

    def raise_if_draining(self) -> None:
        """Refuse new work once a drain has begun."""
        if self.draining:
            raise Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)

    def close(self, caller: Caller, context_id: str) -> None:
        """Give up a context, ending its writer first."""
        context = self.cache.get(caller.tenant, context_id)
        writer = self._writers.get(context)
        if writer is not None:
            self.fail(writer, Cancelled("the context was closed"))
        self.cache.close(context)

    def end(self, sequence: Work) -> None:
        """Stop a sequence wherever it is. What was settled stays in its context; pages beyond that are free now."""
        if not sequence.ended:
            self.scheduler.end(sequence)
            self._writers.pop(sequence.context, None)

    def fail(self, sequence: Work, error: JaxctxError) -> None:
        """End a sequence and tell its caller why."""
        self.end(sequence)
        sequence.reply.failed(error)

    def expire(self) -> float | None:
        """Fail sequences whose deadline has passed; returns seconds until the next one."""
        now = self._world.clock()
        upcoming: list[float] = []
        for sequence in [s for s in self._writers.values() if s.caller.deadline is not None]:
            deadline = sequence.caller.deadline
            assert deadline is not None
            if deadline <= now:
                self.fail(sequence, DeadlineExceeded("the deadline passed"))
            else:
                upcoming.append(deadline - now)
        return min(upcoming, default=None)

    def fail_all(self, error: JaxctxError) -> None:
        """End everything, even if the books are in doubt: whatever else goes wrong, everybody gets an answer."""
        for sequence in list(self._writers.values()):
            try:
                self.end(sequence)
            except Exception:
                log.exception("a sequence could not be ended")
            sequence.reply.failed(copy(error))  # raised by many tasks, each with a traceback of its own

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._writers

    # --- steps ---------------------------------------------------------------------------------------------------

    def dispatch(self) -> Flight | None:
        """Admit, plan and send the next step; None if nothing can run now."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        shape = self._device.shape_for(batch.rows)
        packed, views = self._device.blank(shape)
        segments = [write_part(part, views, self._config.page_size) for part in batch.parts]
        plan_attention(segments, shape.plan, views.plan)
        self._steps += 1
        return Flight(batch, self._device.run(shape, packed))

    def _load_slot(self, sequence: Work) -> None:
        """Before a sequence's first step: tell its slot what penalties, bias and min_tokens need."""
        assert sequence.request is not None
        assert sequence.output is not None
        tokens = sequence.context.tokens()
        prompt = len(tokens) - sequence.output.tokens
        history = SlotHistory(
            tokens[:prompt], tokens[prompt:], sequence.request.sampling.logit_bias, sequence.output.stop_ids
        )
        self._device.load_slot(sequence.slot, history)

    def settle(self, flight: Flight, packed: np.ndarray) -> None:
        """Book a step's results: contexts grow, readers get their pieces, finished sequences leave."""
        output = read_output(packed)
        for part in self.scheduler.settle(flight.batch):
            try:
                self._deliver(part, output)
            except Exception:  # of one sequence's text or reply; its neighbours must not notice
                log.exception("a sequence failed")
                self.fail(part.sequence, Internal("this request failed inside the server"))

    def _deliver(self, part: Part, step: StepOutput) -> None:
        sequence = part.sequence
        if part.sample >= 0:
            self._take_sample(sequence, step, part.sample)
        elif sequence.output is None and sequence.rows_ready == 0 and sequence.context.buffered_tokens == 0:
            self.end(sequence)
            sequence.reply.done(fill_result(sequence, self.contexts.describe(sequence.context)))

    def _take_sample(self, sequence: Work, step: StepOutput, row: int) -> None:
        assert sequence.output is not None
        token = int(step.tokens[row])
        self.cache.append(sequence.context, [token])
        self._generated += 1
        emitted = sequence.output.push(token, last=sequence.tokens_left == 1)
        piece = token_piece(sequence, emitted, step, row)
        if emitted.finish is None:
            sequence.reply.piece(piece)
            return
        self.end(sequence)
        sequence.reply.piece(last_piece(sequence, emitted, piece, self.contexts.describe(sequence.context)))
        sequence.reply.done(None)

    # --- look ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Load and memory now."""
        pool, scheduler = self.cache.stats(), self.scheduler
        return EngineStats(
            pages_total=pool.total,
            pages_free=pool.free,
            pages_cached=pool.cached,
            pages_held=pool.held,
            pages_reserved=scheduler.budget.reserved,
            contexts=len(self.cache),
            running=len(scheduler.running),
            waiting=scheduler.waiting,
            steps=self._steps,
            tokens_computed=scheduler.tokens_computed,
            tokens_cached=scheduler.tokens_cached,
            tokens_generated=self._generated,
            preemptions=scheduler.preemptions,
            suspensions=scheduler.budget.suspensions,
            compilations_after_ready=self._device.compilations,
            draining=self.draining,
        )
