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
from typing import Any

import jax
import numpy as np

from jaxctx.cache.contexts import Context, ContextCache, Identity
from jaxctx.engine import forward
from jaxctx.engine.answers import Change, ContextInfo, EngineStats, FillResult, PlanResult
from jaxctx.engine.archive import Archive
from jaxctx.engine.batch import Batch, Part, write_part
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.delivery import fill_result, last_piece, load, token_piece
from jaxctx.engine.device import MAX_BIAS, MAX_STOPS, Device, SlotHistory
from jaxctx.engine.forward import PassRows
from jaxctx.engine.lives import Lives
from jaxctx.engine.operations import ContextOperations
from jaxctx.engine.output import Output
from jaxctx.engine.passes import write_marks, write_outputs
from jaxctx.engine.requests import Caller, ForwardRequest, GenerateRequest, Ttl
from jaxctx.engine.scheduler import Scheduler
from jaxctx.engine.sequence import Reply, Sampler
from jaxctx.engine.sequence import Sequence as Work
from jaxctx.engine.step import StepOutput, read_output
from jaxctx.engine.transfers import Transfers
from jaxctx.errors import (
    Aborted,
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
    output: Any  # int32 [samples, OUTPUT_WIDTH]; of unusual rows (logits or None, the same)


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
            pages=config.pages,
            page_size=config.page_size,
            clock=world.wall_clock,
            new_id=world.new_id,
            host_slots=config.host_pages,
            disk_slots=config.disk_pages,
        )
        self.transfers = Transfers(device, config.disk_pages, config.disk_file)
        self.scheduler = Scheduler(
            self.cache, config, self._load_slot, self.fail, self._arrived, getattr(device, "pass_limits", (1, 1))
        )
        self.lives = Lives(config, self.cache, self.scheduler, self._writers, world.wall_clock, self.fail)
        self.contexts = ContextOperations(
            config, self.cache, self.scheduler.budget, model, busy=self._writers, lives=self.lives
        )
        self.archive = Archive(
            self.cache, self.contexts, device, model, config.max_context_tokens, world.wall_clock, world.new_id
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
        self._raise_if_too_long(context, len(tokens))
        self.cache.append(context, tokens)
        if defer or context.length == 0 or not (context.buffered_tokens or context.suspended):
            self.lives.changed(context)
            reply.done(FillResult(resident=0, restored=0, computed=0, context=self.contexts.describe(context)))
            return None
        sequence = Work(context, caller, reply)
        try:
            return self._submit(sequence)
        except JaxctxError:
            self.cache.control.truncate(context, len(tokens))
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

    def resume(self, caller: Caller, context: Context, reply: Reply) -> Work | None:
        """Bring back, or compute, what had KV when a context was suspended or saved. None if all of it has."""
        self.raise_if_draining()
        if context in self._writers:
            raise Aborted("another operation is writing to this context", retry_after_s=0.1)
        if not context.suspended and context.seq_len >= context.computed:
            info = self.contexts.describe(context)
            reply.done(FillResult(resident=context.seq_len, restored=0, computed=0, context=info))
            return None
        return self._submit(Work(context, caller, reply, compute_to=context.computed))

    def forward(self, caller: Caller, request: ForwardRequest, reply: Reply) -> Work:
        """Compute explicit tokens at explicit positions under explicit masks."""
        self.raise_if_draining()
        tokens = np.asarray(request.tokens, np.int32)
        self._raise_if_unknown(tokens)
        context = self.contexts.writable(caller, request.context_id)
        self._raise_if_too_long(context, len(tokens))
        first = context.length
        self.cache.append(context, tokens, forward.marks(request, first, self._config.max_context_tokens))
        passing = forward.make_pass(request, first, self._world.new_seed)
        try:
            return self._submit(Work(context, caller, reply, passing=passing))
        except JaxctxError:
            self.cache.control.truncate(context, len(tokens))
            raise

    def _submit(self, sequence: Work) -> Work:
        context = sequence.context
        self.lives.check_growth(context, -(-sequence.worst_case_tokens // context.page_size))
        self.scheduler.submit(sequence)
        self._writers[context] = sequence
        self.lives.changed(context)
        return sequence

    def _raise_if_too_long(self, context: Context, more: int) -> None:
        if context.length + more > self._config.max_context_tokens:
            raise OutOfRange(
                f"{context.length} + {more} tokens; a context holds at most {self._config.max_context_tokens}",
                reason="CONTEXT_TOO_LONG",
            )

    def _raise_if_unknown(self, tokens: np.ndarray) -> None:
        """JAX does not check indices: an id beyond the vocabulary would silently be another token."""
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._vocab_size):
            raise InvalidArgument.field("tokens", f"ids must be 0 to {self._vocab_size - 1}")

    def fork(self, caller: Caller, context_id: str, ids: Iterable[str | None]) -> list[ContextInfo]:
        """One child per id, all or none; beside a writer, with what was settled."""
        parent = self.cache.get(caller.tenant, context_id)
        children = self.contexts.fork(parent, list(ids))
        self.cache.touch(parent)
        for child in children:
            self.lives.changed(child, Change.FORKED)
        return [self.contexts.describe(child) for child in children]

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
        pin_s: float | None,
        ttl: Ttl | None,
        labels: Mapping[str, str] | None,
    ) -> ContextInfo:
        """Change what is given of a context. A new priority holds for its waiting request too."""
        info = self.contexts.update(caller, context_id, priority, pinned, pin_s, ttl, labels)
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
        self.lives.close(context)

    def end(self, sequence: Work) -> None:
        """Stop a sequence wherever it is. What was settled stays in its context; pages beyond that are free now."""
        if not sequence.ended:
            self.scheduler.end(sequence)
            self._writers.pop(sequence.context, None)
            self.lives.changed(sequence.context)

    def fail(self, sequence: Work, error: JaxctxError) -> None:
        """End a sequence and tell its caller why."""
        self.end(sequence)
        sequence.reply.failed(error)

    def expire(self) -> float | None:
        """End what is over and fail sequences whose deadline has passed; returns seconds until there is more."""
        soon = self.lives.reap()
        now = self._world.clock()
        upcoming = [] if soon is None else [soon]
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
        self.lives.watchers.wake_all()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._writers

    # --- steps ---------------------------------------------------------------------------------------------------

    def dispatch(self) -> Flight | None:
        """Admit, plan and send the next step; None if nothing can run now."""
        batch = self.scheduler.next_batch()
        self.carry_out()
        self._finish_restored()
        if batch is None:
            return None
        self._steps += 1
        if batch.unusual:
            return Flight(batch, self._run_pass(batch.parts[0]))
        shape = self._device.shape_for(batch.rows)
        packed, views = self._device.blank(shape)
        segments = [write_part(part, views, self._config.page_size) for part in batch.parts]
        plan_attention(segments, shape.plan, views.plan)
        return Flight(batch, self._device.run(shape, packed))

    def _run_pass(self, part: Part) -> tuple[jax.Array | None, jax.Array]:
        """Send a step of unusual rows; returns where its logits, if they are wanted, and its samples will be."""
        context, passing = part.sequence.context, part.sequence.passing
        shape = self._device.pass_shape_for(part.rows, max(len(part.outputs), 1))
        packed, views = self._device.blank(shape)
        segment = write_part(part, views, self._config.page_size)
        if context.marked:
            write_marks(views, part.position, part.rows, context.all_marks(part.position // self._config.page_size))
        wanted = False
        if passing is not None:
            write_outputs(views, part.position, part.outputs, passing.samplers)
            wanted = any(forward.needs_logits(passing.outputs[index]) for index in part.outputs)
        plan_attention([segment], shape.plan, views.plan)
        logits, output = self._device.run_pass(shape, packed, logits=wanted)
        return logits if wanted else None, output

    def carry_out(self) -> None:
        """Move the pages that are to be moved, ahead of every later step."""
        self.transfers.carry_out(self.cache.moves())

    def _arrived(self, slot: int) -> bool:
        self.carry_out()  # so that a slot is not judged by what it held before
        return self.transfers.ready(slot)

    def _finish_restored(self) -> None:
        """Answer those that had nothing left to compute."""
        complete, self.scheduler.complete = self.scheduler.complete, []
        for sequence in complete:
            if not sequence.ended:
                self._finish(sequence)

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

    def settle(self, flight: Flight, landed: Any) -> None:
        """Book a step's results, `flight.output` in numpy: contexts grow, readers get pieces, who is done leaves."""
        logits, packed = landed if flight.batch.unusual else (None, landed)
        output = read_output(packed)
        for part in self.scheduler.settle(flight.batch):
            try:
                part.sequence.rows += forward.rows(part, logits, output.tokens)
                self._deliver(part, output)
            except Exception:  # of one sequence's text or reply; its neighbours must not notice
                log.exception("a sequence failed")
                self.fail(part.sequence, Internal("this request failed inside the server"))

    def _deliver(self, part: Part, step: StepOutput) -> None:
        sequence = part.sequence
        self.lives.changed(sequence.context)
        if part.sample >= 0:
            self._take_sample(sequence, step, part.sample)
        elif sequence.output is None and sequence.context.seq_len >= sequence.prompt_end:
            self._finish(sequence)

    def _finish(self, sequence: Work) -> None:
        """A fill, pass or opening has all that it asked for."""
        self.end(sequence)
        info = self.contexts.describe(sequence.context)
        passed = sequence.passing is not None
        sequence.reply.done(PassRows(sequence.rows, info) if passed else fill_result(sequence, info))

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
        own = {"steps": self._steps, "tokens_generated": self._generated, "draining": self.draining}
        lives = {"expired": self.lives.expired, "publications": self.archive.published}
        return load(self.cache, self.scheduler, compilations_after_ready=self._device.compilations, **own, **lives)
