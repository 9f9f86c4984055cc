"""Core: the engine without its thread. Every method is called on the step thread, does its work at once and returns.

A fill or a generation becomes a `Request` for the scheduler. `dispatch` sends the next step to the device; `settle`
books a step's results when they have arrived. Up to `steps_in_flight` steps lie between the two, so the host prepares
step n+1 while the device computes step n.
"""

import logging
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from jaxctx import errors
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity
from jaxctx.cache.page_control import truncate
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.contexts.lifecycle import ContextLifecycle
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.contexts.quotas import Quotas
from jaxctx.engine.core.forward_pass import make_forward, marks
from jaxctx.engine.core.output import PRIMING_TOKENS, Output, OutputText
from jaxctx.engine.core.output_stream import ResultFuture
from jaxctx.engine.core.request import Request
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.batch import Batch, ScheduledRequest, write_batch
from jaxctx.engine.runner.kv_transfer import KVTransfer
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import read_output
from jaxctx.engine.scheduler.drafts import PromptLookup
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.errors import JaxctxError
from jaxctx.model.sampling import Sampled
from jaxctx.model.text import ModelText
from jaxctx.seeds import derive_seed
from jaxctx.types import EngineStats, FillResult, ForwardRequest, GenerateRequest, named
from jaxctx_kernels import build_attention_metadata

log = logging.getLogger("jaxctx.engine")
StepArrays: TypeAlias = tuple[Any, Any]  # logits of a pass or None, and int32 [samples, words]


class EngineCore:
    """State of one engine: cache, scheduler, device."""

    def __init__(
        self,
        config: EngineConfig,
        device: ModelRunner,
        text: ModelText,
        model: Identity,
        model_id: str,
        world: RuntimeDeps,
    ) -> None:
        self.config = config
        self.runner = device
        self.deps = world
        self.text = text
        memory = BlockManager(config.pages, config.page_size, config.host_pages, config.disk_pages)
        self.cache = ContextCache(memory, world.wall_clock, world.new_id)
        self.transfers = KVTransfer(device, config.disk_pages, config.disk_file)
        self.scheduler = Scheduler(
            cache=self.cache,
            config=config,
            smallest_step=device.shapes[0],
            largest_pass=device.custom_mask_shapes[-1],
            load_slot=self._load_slot,
            fail=self.fail,
            finish=self._finish,
            ready=self._arrived,
            clock=world.clock,
        )
        self.quotas = Quotas(config)
        self.lifecycle = ContextLifecycle(self.cache, self.scheduler, self.quotas, world.wall_clock)
        self.contexts = ContextOperations(
            config, self.cache, self.scheduler, self.lifecycle, self.quotas, model, model_id
        )
        self.draining = False
        self.steps = 0
        self.tokens_generated = 0

    def fill(
        self, caller: Caller, context_id: str, tokens: np.ndarray, defer: bool, reply: ResultFuture
    ) -> Request | FillResult:
        """Append int32 tokens and compute them, or with `defer` only keep them. A result if nothing is to compute."""
        context = self._room_for(caller, context_id, tokens)
        self.cache.append(context, tokens)
        if defer or context.length == 0 or not (context.buffered_tokens or context.suspended):
            self.lifecycle.notify_changed(context)
            return FillResult(resident=0, restored=0, computed=0, context=self.contexts.describe(context))
        return self._submit(Request(context, caller, reply), appended=len(tokens))

    def output_so_far(self, caller: Caller, request: GenerateRequest) -> tuple[list[int], list[int]]:
        """Of an output to resume: the last tokens before it, and the tokens that it has."""
        context = self._resumable(caller, request, request.context_id)
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
    ) -> Request:
        """Continue one context. The outputs of a request with n > 1 come here one by one, each with its fork's id.

        `resumed` is the text of an output that is resumed. Its tokens, those that `output_so_far` told, must still be
        the context's last ones.
        """
        context = self._resumable(caller, request, context_id)
        if context.length == 0:
            message = "an empty context cannot be continued: fill it first"
            raise errors.FailedPrecondition(message, reason="CONTEXT_EMPTY")
        text = resumed or OutputText(
            request, self.text, context.tokens(max(context.length - PRIMING_TOKENS, 0)).tolist()
        )
        if not np.array_equal(context.tokens(context.length - text.tokens), text.resumed):
            message = "the context changed while its output was to be resumed"
            raise errors.Aborted(message, reason="CONTEXT_BUSY", retry_after_s=0.1)
        room = self.config.max_context_tokens - context.length
        if room < 1:
            message = f"the context is full: it holds at most {self.config.longest}"
            raise errors.OutOfRange(message, reason="CONTEXT_TOO_LONG")
        seed = request.sampling.seed
        seed = self.deps.new_seed() if seed is None else derive_seed(seed, index)
        max_tokens = min(request.max_tokens or self.config.default_max_tokens, text.tokens + room)
        output = Output(request, index, context, text, seed, max_tokens)
        drafts = self.config.draft_tokens > 0 and not output.sampler.needs_history
        return self._submit(Request(context, caller, reply, output, PromptLookup() if drafts else None))

    def _resumable(self, caller: Caller, request: GenerateRequest, context_id: str) -> Context:
        """The context, if it may be generated into and is longer than the output that it is to have already."""
        context = self.contexts.writable(caller, context_id)
        if 0 < request.resume_tokens >= context.length:
            message = f"must be below the context's length, {context.length}"
            raise errors.InvalidArgument.field("resume_tokens", message)
        return context

    def resume(self, caller: Caller, context: Context, reply: ResultFuture) -> Request | FillResult:
        """Bring back, or compute, what had KV when a context was suspended or saved. A result if all of it has."""
        self.contexts.writable(Caller(context.tenant), context.id)
        if not context.suspended and context.seq_len >= context.computed:
            info = self.contexts.describe(context)
            return FillResult(resident=context.seq_len, restored=0, computed=0, context=info)
        return self._submit(Request(context, caller, reply, compute_to=context.computed))

    def forward(self, caller: Caller, request: ForwardRequest, tokens: np.ndarray, reply: ResultFuture) -> Request:
        """Compute explicit tokens, int32, at explicit positions under explicit masks."""
        context = self._room_for(caller, request.context_id, tokens)
        first = context.length
        self.cache.append(context, tokens, marks(request, first))
        passing = make_forward(request, first, self.deps.new_seed)
        return self._submit(Request(context, caller, reply, passing=passing), appended=len(tokens))

    def _room_for(self, caller: Caller, context_id: str, tokens: np.ndarray) -> Context:
        """The context, if it may be appended to."""
        self.raise_if_draining()
        context, most = self.contexts.writable(caller, context_id), self.config.max_context_tokens
        if context.length + len(tokens) > most:
            message = f"{context.length} + {len(tokens)} tokens; a context holds at most {self.config.longest}"
            raise errors.OutOfRange(message, reason="CONTEXT_TOO_LONG")
        return context

    def _submit(self, sequence: Request, appended: int = 0) -> Request:
        """To the scheduler; if it is refused, its context loses the tokens that were appended for it."""
        context, sequence.appended = sequence.context, appended
        try:
            self.lifecycle.check_growth(context, -(-sequence.worst_case_tokens // context.page_size))
            self.scheduler.submit(sequence)
        except JaxctxError:
            if appended:
                truncate(self.cache, context, appended)
            raise
        self.lifecycle.notify_changed(context)
        return sequence

    def raise_if_draining(self) -> None:
        """Refuse new work once a drain has begun."""
        if self.draining:
            raise errors.Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)

    def end(self, sequence: Request) -> None:
        """Stop a sequence wherever it is. What was settled stays in its context; pages beyond that are free now."""
        if not sequence.ended:
            self.scheduler.end(sequence)
            self.lifecycle.notify_changed(sequence.context)

    def fail(self, sequence: Request, error: JaxctxError) -> None:
        """End a sequence and tell its caller why. Refused before it ran, it leaves its context as it was before."""
        untouched = sequence.computed is None and not sequence.ended
        self.end(sequence)
        if untouched and sequence.appended and isinstance(error, errors.ResourceExhausted):
            truncate(self.cache, sequence.context, sequence.appended)
            self.lifecycle.notify_changed(sequence.context)
        sequence.reply.failed(error)

    def expire(self) -> float:
        """End what is over and fail sequences whose deadline has passed; returns seconds until there may be more."""
        soon, now = self.lifecycle.expire(), self.deps.clock()
        for sequence in list(self.scheduler.writers.values()):
            deadline = sequence.caller.deadline
            if deadline is not None and deadline <= now:
                self.fail(sequence, errors.DeadlineExceeded("the deadline passed"))
            elif deadline is not None:
                soon = min(soon, deadline - now, max(sequence.start_by - now, 0.05) if sequence.slot < 0 else soon)
        self.scheduler.review(now)
        return soon

    def fail_all(self, error: JaxctxError) -> None:
        """End everything, even if the books are in doubt: whatever else goes wrong, everybody gets an answer."""
        for sequence in list(self.scheduler.writers.values()):
            try:
                self.end(sequence)
            except Exception:
                log.exception("a sequence could not be ended")
            sequence.reply.failed(copy(error))  # raised by many tasks, each with a traceback of its own
        self.lifecycle.wake_watches()

    def dispatch(self) -> tuple[Batch, StepArrays] | None:
        """Admit, plan and send the next step: what it computes and where its output will be; None if nothing can."""
        batch = self.scheduler.schedule()
        self.carry_out()
        if batch is None:
            return None
        self.steps += 1
        shape = self.runner.select_bucket(batch.rows, batch.outputs)
        packed, views = self.runner.make_step_inputs(shape)
        build_attention_metadata(write_batch(batch, views, self.config.page_size), shape.metadata, views.metadata)
        return batch, self.runner.run(shape, packed, logits=batch.wants_logits)

    def carry_out(self) -> None:
        """Move the pages that are to be moved, ahead of every later step."""
        self.transfers.carry_out(self.cache.moves())

    def _arrived(self, slot: int) -> bool:
        if any(move.target == slot for move in self.cache.block_manager.tiers.moves):
            self.carry_out()  # so that the slot is not judged by what it held before
        return self.transfers.is_ready(slot)

    def _load_slot(self, sequence: Request) -> None:
        """Before a sequence's first step: tell its slot what penalties, bias and min_tokens need."""
        output, tokens = sequence.output, sequence.context.tokens()
        assert output is not None
        prompt, sampled = np.split(tokens, [len(tokens) - output.tokens])
        self.runner.load_slot(sequence.slot, prompt, sampled, output.request.sampling.logit_bias, output.stop_ids)

    def process_output(self, batch: Batch, landed: StepArrays) -> None:
        """Book a step's results, in numpy: contexts grow, readers get pieces, who is done leaves."""
        logits, packed = landed
        output = read_output(packed)
        for part in self.scheduler.process_output(batch):
            sequence = part.sequence
            try:
                self.lifecycle.notify_changed(sequence.context)
                if sequence.output is not None and part.asked:
                    self._take_samples(part, output)
                elif sequence.output is None:
                    sequence.rows |= sequence.passing.rows(part.asked, logits, output)  # again, if it was preempted
                    if sequence.context.seq_len >= sequence.prompt_end:
                        self._finish(sequence)
            except Exception:  # of one sequence's text or reply; its neighbours must not notice
                log.exception("a sequence failed")
                self.fail(sequence, errors.Internal("this request failed inside the server"))

    def _finish(self, sequence: Request) -> None:
        """A fill, pass or opening has all that it asked for."""
        self.end(sequence)
        sequence.reply.done(sequence.result(self.contexts.describe(sequence.context)))

    def _take_samples(self, part: ScheduledRequest, step: Sampled) -> None:
        """The token behind the last one, and one more behind each draft that was right."""
        sequence, row = part.sequence, part.place
        self._take_sample(sequence, step, row)
        for draft in part.drafts:
            if sequence.ended or step.tokens[row] != draft:
                break
            row += 1
            self.cache.mark_computed(sequence.context, 1)
            self._take_sample(sequence, step, row)
        if part.drafts:
            self.scheduler.update_acceptance(part, row - part.place)

    def _take_sample(self, sequence: Request, step: Sampled, row: int) -> None:
        output = sequence.output
        assert output is not None
        self.cache.append(sequence.context, [int(step.tokens[row])])
        self.tokens_generated += 1
        piece = output.push(step, row)
        if piece.finish is None:
            sequence.reply.piece(piece)
            return
        self.end(sequence)
        self.scheduler.finished(sequence)
        info = self.contexts.describe(sequence.context)
        sequence.reply.piece(replace(piece, seed=output.sampler.seed, usage=sequence.usage(), context=info))
        sequence.reply.done(None)

    def stats(self) -> EngineStats:
        """Load and memory now."""
        memory, tiers, scheduler = self.cache.block_manager, self.cache.block_manager.tiers, self.scheduler
        counters = named(EngineStats, scheduler, scheduler.budget, self.lifecycle, self.runner, self)
        others = {
            "pages_total": memory.pool.total,
            "pages_free": memory.pool.free,
            "pages_cached": memory.index.cached,
            "pages_held": memory.pool.total - memory.available,
            "contexts": len(self.cache.context_table),
            "running": len(scheduler.running),
            "host_pages_total": tiers.host.total,
            "host_pages_used": tiers.host.used,
            "disk_pages_total": tiers.disk.total,
            "disk_pages_used": tiers.disk.used,
            "publications": len(self.cache.publications),
            "snapshots": 0,  # the store counts them
        }
        return EngineStats(**counters | others)
