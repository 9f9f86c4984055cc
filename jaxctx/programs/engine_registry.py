"""Engines that programs can use: which of them answer, what each runs and holds, and how much capacity it has.

An engine that answers is registered. It is lost when it reports that it is unavailable, or has not answered for three
heartbeats; when it answers again it gets a new handle with another epoch. All work of the old handle ends with it, so
that none of its results can arrive late. Load figures are those of the last heartbeat, corrected by what the dispatcher
has done since.
"""

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from jaxctx.engine.interface import Caller, ProgramEngine
from jaxctx.errors import NotFound, Unavailable
from jaxctx.types import Criterion, EngineStats

HEARTBEAT_S = 1.0
MISSED_HEARTBEATS = 3  # after which an engine is lost
DEFAULT_MODEL_KEPT_S = (
    300.0  # how long a model that no engine serves any more stays the default one: one may start again
)
# Tasks of these criteria need few others beside them, because each further task delays every token of all of them.
LATENCY_SENSITIVE = (Criterion.TIME_PER_OUTPUT_TOKEN, Criterion.LATENCY)
LATENCY_BOUND = 4  # tasks at once on an engine that runs one of these
PROMPT_BLOCK = 64  # characters; about a page of tokens
MAX_REMEMBERED_BLOCKS = 1 << 16  # of the prompts that an engine has seen

# Encode(caller, text, at_start) returns the tokens of a text; with special ones if it stands at a sequence's start.
Encode = Callable[[Caller, str, bool], Awaitable[Sequence[int]]]


class TaskLoad(Protocol):
    """What decides whether an engine has capacity for a task. Tasks are `tasks.Task`."""

    criterion: Criterion
    prompt_blocks: Sequence[bytes]  # digests of the prompt up to the end of each whole block

    def estimate_tokens(self, default_max_tokens: int) -> int:
        """Return about how many tokens the task's context will have in the end."""


class EngineHandle:
    """One engine from its registration until it is lost, as the dispatcher sees it."""

    def __init__(self, engine_id: str, epoch: int, engine: ProgramEngine, encode: Encode, latency_bound: int) -> None:
        self.id = engine_id
        self.epoch = epoch
        self.engine = engine
        self.encode = encode
        self.latency_bound = min(latency_bound, engine.info.max_batch)
        self.running: set[TaskLoad] = set()  # tasks that the dispatcher has placed here
        # Contexts of constant prefixes, by tenant, adapter's content and text; "" for a prefix that is shorter than a
        # page. They end by their own time to live, or sooner where there are too many.
        self.prefixes: dict[tuple[str, str, str], str] = {}
        self.stats: EngineStats | None = None  # as of the last heartbeat
        self.draining = False  # running tasks may finish, and no new ones begin
        self.forwarded = 0  # calls of clients that a router has forwarded to this engine and that have not ended
        self._seen_blocks: OrderedDict[bytes, None] = OrderedDict()
        self._other_requests = 0  # requests on the engine that are not tasks of ours
        self._other_tokens = 0  # tokens promised to them

    def update_load(self, stats: EngineStats) -> None:
        """Take the load figures of a heartbeat."""
        self.stats = stats
        self.draining = self.draining or stats.draining
        promised_tokens = stats.pages_reserved * self.engine.info.page_size  # idle contexts can be suspended
        own_tokens = sum(self._tokens_of(task) for task in self.running)
        self._other_requests = max(0, stats.running + stats.waiting - len(self.running))
        self._other_tokens = max(0, promised_tokens - own_tokens)

    def serves(self, model_id: str) -> bool:
        """Whether the engine computes the model of this name, or has an adapter of this name."""
        return model_id == self.engine.info.model_id or model_id in self.engine.adapter_revisions

    @property
    def load(self) -> float:
        """About how much of the engine's batch places, plus how much of its pages, is in use: 0 to 2 and above."""
        pages_share = self.stats.pages_held / max(1, self.stats.pages_total) if self.stats else 0.0
        requests = len(self.running) + max(self._other_requests, self.forwarded)
        return requests / self.engine.info.max_batch + pages_share

    @property
    def task_limit(self) -> int:
        """How many tasks the engine may run at once, given the criteria of those that it runs."""
        return min([self.engine.info.max_batch, *(self._limit_of(task) for task in self.running)])

    @property
    def free_places(self) -> int:
        """How many tasks at most the engine has capacity for, however small they are."""
        if self.draining:
            return 0
        at_least = 0 if self.running else 1  # as `count_fitting` says
        return max(at_least, self.engine.info.max_batch - len(self.running) - self._other_requests)

    def count_fitting(self, tasks: Sequence[TaskLoad]) -> int:
        """Return how many of these tasks, from the first, the engine has capacity for.

        An engine that runs nothing takes one task of any size: the engine itself decides whether it can run it.
        """
        if self.free_places == 0:  # most engines of a busy server: not worth adding up what they run
            return 0
        limit = self.task_limit
        requests = len(self.running) + self._other_requests
        tokens = self._other_tokens + sum(self._tokens_of(task) for task in self.running)
        capacity = self.engine.info.pages_total * self.engine.info.page_size
        for count, task in enumerate(tasks):
            limit = min(limit, self._limit_of(task))
            requests += 1
            tokens += self._tokens_of(task)
            runs_something = bool(self.running) or count > 0
            if runs_something and (requests > limit or tokens > capacity):
                return count
        return len(tasks)

    def impact(self, task: TaskLoad) -> tuple[int, bool, int]:
        """Return the cost of placing the task here, for comparison: the engine with the least cost is the best one.

        It consists of the places that later tasks would lose, then of whether the task takes a place from
        latency-sensitive ones; of equal engines the busiest is the best, so that others stay free.
        """
        lost_places = self.task_limit - min(self.task_limit, self._limit_of(task))
        takes_sensitive_place = self.task_limit < self._limit_of(task)
        return lost_places, takes_sensitive_place, -len(self.running) - self._other_requests

    def count_cached_characters(self, task: TaskLoad) -> int:
        """Return how many characters at the start of the task's prompt it has seen: about as many are cached."""
        blocks = 0
        for digest in task.prompt_blocks:
            if digest not in self._seen_blocks:
                break
            blocks += 1
        return blocks * PROMPT_BLOCK

    def remember_prompt(self, task: TaskLoad) -> None:
        """Note that the task's prompt goes through this engine. The latest MAX_REMEMBERED_BLOCKS are kept."""
        for digest in task.prompt_blocks:
            self._seen_blocks[digest] = None
            self._seen_blocks.move_to_end(digest)
        while len(self._seen_blocks) > MAX_REMEMBERED_BLOCKS:
            self._seen_blocks.popitem(last=False)

    def _limit_of(self, task: TaskLoad) -> int:
        """How many tasks may run at once beside this one, itself included."""
        return self.latency_bound if task.criterion in LATENCY_SENSITIVE else self.engine.info.max_batch

    def _tokens_of(self, task: TaskLoad) -> int:
        return task.estimate_tokens(self.engine.info.default_max_tokens)


class EngineRegistry:
    """Engines by id, and their heartbeats.

    `on_change` is called when an engine was registered or reported its load, `on_lost` with the handle of a lost one.
    Engines are asked for their load every `heartbeat_s` seconds, and are lost after `silence_s` without an answer.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        on_lost: Callable[[EngineHandle], None],
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handles: dict[str, EngineHandle] = {}
        self.max_context_tokens: dict[str, int] = {}  # by model, of every model that an engine has ever served
        self.lost = 0  # handles that have ended, in all
        self.silence_s = MISSED_HEARTBEATS * heartbeat_s
        self._on_change = on_change
        self._on_lost = on_lost
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._lost_at: dict[str, float] = {}  # by model, when it last lost an engine
        self._epochs = itertools.count(1)

    def register(
        self, engine_id: str, engine: ProgramEngine, encode: Encode, *, latency_bound: int = LATENCY_BOUND
    ) -> EngineHandle:
        """Return a new handle of this engine. An earlier one that has not ended is lost."""
        earlier = self.handles.get(engine_id)
        if earlier is not None:
            self.lose(earlier)
        handle = EngineHandle(engine_id, next(self._epochs), engine, encode, latency_bound)
        self.handles[engine_id] = handle
        model_id = engine.info.model_id
        longest = self.max_context_tokens.get(model_id, 0)
        self.max_context_tokens[model_id] = max(longest, engine.info.max_context_tokens)
        self._on_change()
        return handle

    def lose(self, handle: EngineHandle) -> None:
        """End this handle. A later one of the same engine stays."""
        if self.handles.get(handle.id) is handle:
            del self.handles[handle.id]
            self.lost += 1
            self._lost_at[handle.engine.info.model_id] = self._clock()
            self._on_lost(handle)

    def serving(self, model_id: str) -> list[EngineHandle]:
        """Return the engines that compute a model, or have an adapter of this name, in the order in which they came."""
        return [handle for handle in self.handles.values() if handle.serves(model_id)]

    def find_model(self, model_id: str) -> tuple[str, int]:
        """Return the name of a model or an adapter ("": the default model's) and its longest context in tokens.

        Raises NotFound for a model that no engine has served, nor has an adapter of that name, Unavailable before any
        engine came.
        """
        name = model_id or self._default_model()
        if name in self.max_context_tokens:
            return name, self.max_context_tokens[name]
        for handle in self.serving(model_id):
            return model_id, handle.engine.info.max_context_tokens
        if not self.max_context_tokens:
            raise self.no_engine_error()
        raise NotFound("no engine serves such a model", reason="MODEL_NOT_FOUND")

    def _default_model(self) -> str:
        """The first model that came, of those that are served or were until DEFAULT_MODEL_KEPT_S ago; else of all."""
        served = {handle.engine.info.model_id for handle in self.handles.values()}
        since = self._clock() - DEFAULT_MODEL_KEPT_S
        kept = (name for name in self.max_context_tokens if name in served or self._lost_at.get(name, since) > since)
        return next(kept, next(iter(self.max_context_tokens), ""))

    def no_engine_error(self) -> Unavailable:
        """Return the error for calls that come while there is no engine."""
        message = "no engine is there now" if self.max_context_tokens else "no engine has come yet"
        return Unavailable(message, reason="ENGINE_LOST", retry_after_s=1.0)

    async def watch(
        self,
        engine_id: str,
        engine: ProgramEngine,
        encode: Encode,
        *,
        patient: bool = False,
        end_calls: Callable[[], None] | None = None,
    ) -> None:
        """Ask an engine for its load at every heartbeat, and keep it registered while it answers. Never returns.

        With `patient` there is no time limit for an answer: an engine in this process may compute one step for longer
        than `silence_s`. `end_calls` ends the calls to the engine that are under way, whenever it has not answered: it
        answers nothing else then.
        """
        handle = self.register(engine_id, engine, encode)
        try:
            while True:
                try:
                    async with asyncio.timeout(None if patient else self.silence_s):
                        stats = await engine.stats()
                except Exception:  # whatever it is: the engine does not answer
                    self.lose(handle)
                    if end_calls is not None:
                        end_calls()
                else:
                    if self.handles.get(engine_id) is not handle:
                        handle = self.register(engine_id, engine, encode)
                    handle.update_load(stats)
                    self._on_change()
                await asyncio.sleep(self._heartbeat_s)
        finally:
            self.lose(handle)
