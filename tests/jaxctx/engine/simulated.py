"""An engine without a device: the real core under a clock of its own, in which steps take what a model of them says.

Thousands of requests a second are seconds of work, and every run of a seed is the same. `Simulated.run` takes arrivals
at their times, sends steps as the step loop does, two in flight, and lets the clock jump to whatever comes next.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxctx.cache.context_cache import Identity
from jaxctx.engine.config import EngineConfig, RuntimeDeps
from jaxctx.engine.core.engine_core import EngineCore
from jaxctx.engine.interface import Caller
from jaxctx.engine.runner.step import OUTPUT
from jaxctx.engine.scheduler.scheduler_output import Batch
from jaxctx.errors import JaxctxError
from jaxctx.model.text import ModelText
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from tests.echo import EOS_ID, echo_text

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Ask:
    """One request: a prompt, and an output that ends by itself after `ends` tokens."""

    at: float
    tenant: str = ""
    prompt: int = 8
    max_tokens: int = 200
    ends: int | None = None  # None: `ignore_eos`
    timeout_s: float | None = 10.0
    priority: int = 0
    # What became of it.
    ended: float | None = None
    error: JaxctxError | None = None
    tokens: int = 0

    @property
    def in_time(self) -> bool:
        return self.error is None and self.ended is not None


@dataclass
class Reply:
    """Where a request's results go."""

    ask: Ask
    clock: Callable[[], float]

    def set_result(self, result: Any) -> None:
        self.ask.ended = self.clock()

    def set_error(self, error: Exception) -> None:
        assert isinstance(error, JaxctxError)
        self.ask.ended, self.ask.error = self.clock(), error

    def add_piece(self, piece: Any) -> None:
        self.ask.tokens += 1

    def backpressured(self) -> bool:
        return False


class Shapes:
    """What a core asks of a device that computes nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self.shapes = tuple(SimpleNamespace(rows=rows) for rows in (1, *config.row_buckets()))
        self.custom_mask_shapes = (SimpleNamespace(rows=16, samples=4, mask_windows=()),)
        self.page_shape, self.page_dtype, self.page_bytes = (1, 2, 1, config.page_size, 1), np.dtype(np.uint32), 4
        self.compilations_after_ready = 0
        self.functions_left = 0
        self.adapter_slots = None

    def load_slot(self, *slot: object) -> None:
        pass

    def copy_pages(self, sources: object, targets: object) -> None:
        pass


@dataclass
class Simulated:
    """See the module docstring. `step_s` says what a batch takes, in seconds."""

    config: EngineConfig
    step_s: Callable[[Batch, float], float]
    text: ModelText = field(default_factory=echo_text)

    def __post_init__(self) -> None:
        self.now = 1000.0
        ids, rng = itertools.count(), random.Random(1)
        world = RuntimeDeps(lambda: self.now, lambda: self.now, lambda: f"c{next(ids)}", lambda: rng.getrandbits(63))
        identity = Identity(namespace="", model_revision="simulated", kv_dtype="uint32")
        device: Any = Shapes(self.config)
        self.core = EngineCore(self.config, device, self.text, identity, "simulated", world)
        self.steps = 0
        self.tokens = 0
        self._ends: dict[Any, int] = {}  # of a context: the length at which it is ended by the model

    def submit(self, ask: Ask) -> None:
        """As a request by gRPC: a context, its prompt without computing it, and the output."""
        caller = Caller(ask.tenant, None if ask.timeout_s is None else self.now + ask.timeout_s)
        reply: Any = Reply(ask, lambda: self.now)
        context = self.core.contexts.create(caller, CreateContextRequest(priority=ask.priority))
        try:
            prompt = np.arange(ask.prompt, dtype=np.int32) + 7 * self.steps % 200
            self.core.fill(caller, context.id, prompt, True, reply)
            request = GenerateRequest(
                context_id=context.id, max_tokens=ask.max_tokens, ignore_eos=ask.ends is None, sampling=GREEDY
            )
            if ask.ends is not None:
                self._ends[context] = ask.prompt + ask.ends
            self.core.generate(caller, request, context.id, 0, reply)
        except JaxctxError as error:
            reply.set_error(error)
            self.core.contexts.close(caller, context.id)

    def run(self, asks: Iterable[Ask], until: float | None = None) -> list[Ask]:
        """All that became of them, by the time `until` after the start, or when nothing is left to do."""
        arrivals = sorted(asks, key=lambda ask: ask.at)
        waiting, start, device_free = list(reversed(arrivals)), self.now, self.now
        flying: list[tuple[float, int, Batch]] = []
        serial = itertools.count()
        while True:
            while waiting and start + waiting[-1].at <= self.now:
                self.submit(waiting.pop())
            soon = self.core.expire()
            while self.core.can_dispatch():
                batch = self.core.schedule()
                self.core.cache.moves()
                if batch is None:
                    break
                device_free = max(device_free, self.now) + self.step_s(batch, self.now - start)
                heapq.heappush(flying, (device_free, next(serial), batch))
            times = [each[0] for each in flying[:1]] + [start + ask.at for ask in waiting[-1:]]
            if not times and not self.core.has_requests():
                break
            self.now = max(self.now, min([*times, self.now + soon]))
            if until is not None and self.now - start >= until:
                break
            while flying and flying[0][0] <= self.now:
                self._finish_step(heapq.heappop(flying)[2])
        return arrivals

    def _finish_step(self, batch: Batch) -> None:
        self.steps += 1
        samples = sum(len(scheduled.output_positions) for scheduled in batch.scheduled)
        step = np.zeros(max(samples, 1), OUTPUT)
        step["f0" if "f0" in OUTPUT.names else "tokens"] = 65
        for scheduled in batch.scheduled:
            context = scheduled.request.context
            if self._ends.get(context, -1) == context.length + 1 and len(scheduled.output_positions):
                step["tokens"][scheduled.sample_offset] = EOS_ID
        before = self.core.tokens_generated
        self.core.process_output(batch, (None, step.view(np.int32).reshape(len(step), -1)))
        self.tokens += self.core.tokens_generated - before


def padded(batch: Batch, config: EngineConfig) -> int:
    """Rows that a step of this batch really has."""
    return next(rows for rows in (1, *config.row_buckets()) if rows >= batch.rows)


def with_config(**settings: Any) -> EngineConfig:
    return replace(
        EngineConfig(pages=4096, max_batch=32, max_batch_tokens=64, max_context_tokens=1024, draft_tokens=0), **settings
    )
