"""The engines there are: each in one of its lives, with what it runs, what it holds, and how much room it has.

An engine that answers is registered, and lost when it says that it is unavailable or has not answered for three
beats; when it answers again that is another life of it, with another epoch. Whatever ran in a life ends with it, so
that nothing of it can come late. Figures of load are those of the last beat, corrected by what was done since.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from jaxctx.engine.interface import ProgramEngine
from jaxctx.errors import NotFound, Unavailable
from jaxctx.programs.calls import BLOCK, Task
from jaxctx.types import Criterion, EngineStats

BEAT_S = 1.0
MISSED = 3  # beats after which an engine is lost
# Tasks of these want few others beside them, as each makes every token of all of them later.
FEW_AT_ONCE = (Criterion.TIME_PER_OUTPUT_TOKEN, Criterion.LATENCY)
LATENCY_BOUND = 4  # tasks at once where there is one of these
MOST_BLOCKS = 1 << 16  # remembered of an engine
CHARACTERS_A_TOKEN = 3  # about; engines count exactly

# Tokens of a text; with special ones, if it stands at the start of a sequence (True).
Encode = Callable[[str, bool], Awaitable[Sequence[int]]]


class EngineHandle:
    """One life of an engine, as the dispatcher knows it."""

    def __init__(self, engine_id: str, epoch: int, engine: ProgramEngine, encode: Encode, latency_bound: int) -> None:
        self.id = engine_id
        self.epoch = epoch
        self.engine = engine
        self.encode = encode
        self.latency_bound = min(latency_bound, engine.info.max_batch)
        self.running: dict[Task, asyncio.Task[None]] = {}
        # Contexts of constant prefixes, by tenant and text; "" for a short one. Their own time to live ends them.
        self.prefixes: dict[tuple[str, str], str] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._others, self._tokens_of_others = 0, 0  # what other doors run and hold
        self.stats: EngineStats | None = None  # as of the last beat
        self.draining = False  # what runs may end there, and nothing new begins
        self.forwarded = 0  # calls of clients that this router has it work on

    def beat(self, stats: EngineStats) -> None:
        """Its load as it says."""
        self.stats, self.draining = stats, self.draining or stats.draining
        promised = stats.pages_reserved * self.engine.info.page_size  # what idle contexts hold can be had
        self._others = max(0, stats.running + stats.waiting - len(self.running))
        self._tokens_of_others = max(0, promised - sum(map(self.tokens_of, self.running)))

    @property
    def load(self) -> float:
        """How much of its places and of its pages is in use; about."""
        held = self.stats.pages_held / max(1, self.stats.pages_total) if self.stats else 0.0
        return (len(self.running) + max(self._others, self.forwarded)) / self.engine.info.max_batch + held

    def bound_of(self, task: Task) -> int:
        """How many tasks this one bears beside it, itself included."""
        return self.latency_bound if task.criterion in FEW_AT_ONCE else self.engine.info.max_batch

    @property
    def bound(self) -> int:
        """Of what runs."""
        return min([self.engine.info.max_batch, *map(self.bound_of, self.running)])

    def tokens_of(self, task: Task) -> int:
        """That a task may need in the end; about."""
        wanted = task.chain.output.settings.max_tokens or self.engine.info.default_max_tokens
        appended = 0 if task.appended else task.characters // CHARACTERS_A_TOKEN
        return len(task.call.tokens) + appended + wanted

    def fitting(self, tasks: Sequence[Task]) -> int:
        """For how many of these, the first ones, there is room. One is always let in: the engine judges."""
        if self.draining:
            return 0
        bound, load = self.bound, len(self.running) + self._others
        tokens = self._tokens_of_others + sum(map(self.tokens_of, self.running))
        capacity = self.engine.info.pages_total * self.engine.info.page_size
        for fitting, task in enumerate(tasks):
            bound, load, tokens = min(bound, self.bound_of(task)), load + 1, tokens + self.tokens_of(task)
            if (self.running or fitting) and (load > bound or tokens > capacity):
                return fitting
        return len(tasks)

    def impact(self, task: Task) -> tuple[int, bool, int]:
        """What a task would cost its other users, least first: places that are lost to tasks of a later day; whether
        it takes one from tasks that want few beside them; and of equal engines, the busiest, so that others stay free.
        """
        lost = self.bound - min(self.bound, self.bound_of(task))
        return lost, self.bound < self.bound_of(task), -len(self.running) - self._others

    def cached(self, task: Task) -> int:
        """Characters at the start of a task's prompt that went through this engine; the latest are remembered."""
        unseen = (n for n, digest in enumerate(task.blocks) if digest not in self._seen)
        return next(unseen, len(task.blocks)) * BLOCK

    def remember(self, task: Task) -> None:
        """Its prompt goes through this engine."""
        for digest in task.blocks:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MOST_BLOCKS:
            self._seen.popitem(last=False)


class EngineRegistry:
    """The registry. `changed` is called when an engine came, `lost` with one that is gone, before it is forgotten.

    Engines are asked for their load every `beat_s` seconds, and lost after `silence_s` without an answer.
    """

    def __init__(
        self, changed: Callable[[], None], lost: Callable[[EngineHandle], None], beat_s: float = BEAT_S
    ) -> None:
        self.nodes: dict[str, EngineHandle] = {}
        self.models: dict[str, int] = {}  # longest sequence, of every model that an engine ever served
        self._changed, self._lost, self._beat_s = changed, lost, beat_s
        self.silence_s = MISSED * beat_s
        self._epochs = itertools.count(1)

    def register(
        self, engine_id: str, engine: ProgramEngine, encode: Encode, *, latency_bound: int = LATENCY_BOUND
    ) -> EngineHandle:
        """A new life of this engine; the one before it, if it has not ended, is lost."""
        if (before := self.nodes.get(engine_id)) is not None:
            self.lose(before)
        node = EngineHandle(engine_id, next(self._epochs), engine, encode, latency_bound)
        self.nodes[engine_id] = node
        longest = self.models.get(engine.info.model_id, 0)
        self.models[engine.info.model_id] = max(longest, engine.info.max_context_tokens)
        self._changed()
        return node

    def lose(self, node: EngineHandle) -> None:
        """This life is over. Nothing happens to a later one."""
        if self.nodes.get(node.id) is node:
            del self.nodes[node.id]
            self._lost(node)

    def serving(self, model_id: str) -> list[EngineHandle]:
        """The engines that compute a model, in the order in which they came."""
        return [node for node in self.nodes.values() if node.engine.info.model_id == model_id]

    def model(self, model_id: str) -> tuple[str, int]:
        """A model's name ("": the first one's) and longest sequence. NotFound; Unavailable before any engine came."""
        for name, longest in self.models.items():
            if model_id in ("", name):
                return name, longest
        if not self.models:
            raise self.none()
        raise NotFound("no engine serves such a model", reason="MODEL_NOT_FOUND")

    def none(self) -> Unavailable:
        """What there is to say while there are no engines."""
        message = "no engine is there now" if self.models else "no engine has come yet"
        return Unavailable(message, reason="ENGINE_LOST", retry_after_s=1.0)

    async def attend(self, engine_id: str, engine: ProgramEngine, encode: Encode, *, patient: bool = False) -> None:
        """Ask an engine for its load at every beat, and keep it registered while it answers. Never returns.

        `patient`: however long that takes; for one in this process, which may compute a single step for longer.
        """
        node = self.register(engine_id, engine, encode)
        try:
            while True:
                try:
                    async with asyncio.timeout(None if patient else self.silence_s):
                        stats = await engine.stats()
                except Exception:  # whatever it is, it does not answer
                    self.lose(node)
                else:
                    if self.nodes.get(engine_id) is not node:
                        node = self.register(engine_id, engine, encode)
                    node.beat(stats)
                    self._changed()
                await asyncio.sleep(self._beat_s)
        finally:
            self.lose(node)
