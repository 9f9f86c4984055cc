"""A scheduler without a device: its decisions are read, and steps are finished by the test."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.output import Output, OutputText
from jaxctx.engine.core.request import Request
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.scheduler import Scheduler
from jaxctx.engine.scheduler.scheduler_output import Batch, SchedulerOutput
from jaxctx.types import GenerateRequest, SamplingParams
from tests.echo import echo_text

CONFIG = EngineConfig(
    pages=16, page_size=4, max_batch=4, max_batch_tokens=16, max_context_tokens=64, draft_tokens=0, queue_limit=4
)


@dataclass
class Reply:
    """A reply whose reader is as far behind as the test says."""

    behind: bool = False

    def backpressured(self) -> bool:
        return self.behind


@dataclass
class SchedulerHarness:
    """A scheduler with its cache and a clock of its own."""

    config: EngineConfig
    now: float = 0.0
    _ids: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        blocks = BlockManager(self.config.pages, self.config.page_size, self.config.host_pages)
        self.cache = ContextCache(blocks, lambda: self.now, lambda: f"c{next(self._ids)}")
        self.scheduler = Scheduler(
            cache=self.cache,
            block_manager=blocks,
            config=self.config,
            model_id="model",
            smallest_step_rows=1,
            max_forward_rows=8,
            max_forward_outputs=2,
            clock=lambda: self.now,
        )

    def context(self, tokens: list[int], *, priority: int = 0, pinned: bool = False, computed: bool = False) -> Context:
        """A context with these tokens buffered, or with KV."""
        context = self.cache.create(Identity("", "model"))
        context.priority = priority
        self.cache.pin(context, pinned)
        self.cache.append(context, tokens)
        if computed:
            self.cache.grow(context, len(tokens))
            self.cache.mark_computed(context, len(tokens))
        return context

    def fill(self, tokens: list[int], *, tenant: str = "", priority: int = 0, **fields: Any) -> Request:
        """A fill, still to be submitted."""
        reply: Any = Reply()
        return Request(self.context(tokens, priority=priority), Caller(tenant), reply, **fields)

    def generation(
        self,
        tokens: list[int],
        max_tokens: int,
        *,
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Request:
        """A generation behind these tokens, still to be submitted."""
        context, reply = self.context(tokens, priority=priority), Reply()
        asked = GenerateRequest(
            context_id=context.id, max_tokens=max_tokens, ignore_eos=True, sampling=SamplingParams(**sampling)
        )
        output = Output(asked, 0, context, OutputText(asked, echo_text(), tokens), 1, max_tokens)
        caller = Caller(tenant, None if timeout_s is None else self.now + timeout_s)
        return Request(context, caller, reply, output)  # type: ignore[arg-type]

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule(lambda slot: True)

    def step(self) -> Batch:
        """Make a step, of which there must be one, and process it; every sample is token 65."""
        batch = self.schedule().batch
        assert batch is not None
        for scheduled in self.scheduler.process_output(batch):
            if scheduled.request.output is not None and scheduled.output_positions:
                self.cache.append(scheduled.request.context, [65])
        return batch


@pytest.fixture
def make_scheduler() -> Callable[..., SchedulerHarness]:
    def make(**settings: Any) -> SchedulerHarness:
        return SchedulerHarness(replace(CONFIG, **settings))

    return make


@pytest.fixture
def harness(make_scheduler: Callable[..., SchedulerHarness]) -> SchedulerHarness:
    return make_scheduler()
