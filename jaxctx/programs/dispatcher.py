"""The dispatcher: ready tasks wait in one queue, and each goes to the engine that suits it best when that has capacity.

The engine is chosen by these rules, in this order: the tasks of a group go to one engine; tasks with the same constant
prefix go to one engine; an engine that holds the longest part of the prompt is preferred; otherwise the engine on whose
users the task has the least impact. Tenants take turns; within one tenant, tasks that an older request needs go first.
All rules but the turns can be switched off (`Policy`), and every decision states its reason.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from jaxctx.errors import Internal, JaxctxError, ResourceExhausted, Unavailable
from jaxctx.programs.engine_registry import HEARTBEAT_S, EngineHandle, EngineRegistry
from jaxctx.programs.tasks import Task
from jaxctx.programs.tenant_queue import TenantQueue, UnitKey

log = logging.getLogger("jaxctx.programs")
MAX_WAITING = 1000  # tasks of a tenant
MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0  # after which a task that an engine refused is tried again
# A task may be the cause of engine failures. Each engine that is lost with it adds GENERATING_SCORE to its score if the
# engine was generating for it, else 1; the task fails at MAX_FAILURE_SCORE. Any output sets the score back to 0.
GENERATING_SCORE, MAX_FAILURE_SCORE = 4, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules that the dispatcher applies. Each is a setting of the server, `--dispatch-…`."""

    task_groups: bool = True
    same_prefix: bool = True
    cached_prefix: bool = True
    least_impact: bool = True  # else the first engine with capacity
    app_order: bool = True  # else in the order of becoming ready


@dataclass(frozen=True, slots=True)
class Placement:
    """A task that runs: on which engine, and the asyncio task that drives it."""

    engine: EngineHandle
    driver: asyncio.Task[None]


class Dispatcher:
    """The queue, and the tasks that run. Used on the event loop."""

    def __init__(
        self,
        run: Callable[[Task, EngineHandle], Awaitable[None]],
        *,
        policy: Policy | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`run` runs a task on an engine; the dispatcher reports its end to the task's graph.

        `heartbeat_s`: see `EngineRegistry`.
        """
        self.engines = EngineRegistry(self.schedule_dispatch, self._engine_lost, heartbeat_s)
        self.policy = policy or Policy()
        self._run = run
        self._queues: dict[str, TenantQueue] = {}  # by tenant
        self._current_turn = 0  # `turns_taken` of the tenant that was served last, before it was
        self._placements: dict[Task, Placement] = {}
        self._drivers: set[asyncio.Task[None]] = set()  # those that have not ended, cancelled ones too
        self._is_scheduled = False

    def submit(self, task: Task) -> None:
        """Queue a task that is ready. One that has ended is ignored; one too many of its tenant fails (QUEUE_FULL)."""
        if not task.ended and len(self._queue_of(task)) >= MAX_WAITING:
            error = ResourceExhausted("too many tasks wait for engines", reason="QUEUE_FULL", retry_after_s=1.0)
            task.call.results.fail(task, error)
            return
        self._put_back(task)

    def _put_back(self, task: Task) -> None:
        """Queue a task that was accepted, however many wait: its engine is gone, or could not take it."""
        if task.ended:
            return
        queue = self._queue_of(task)
        queue.add(task, task.request_number if self.policy.app_order else 0, self._unit_of(task))
        # A tenant without tasks saves up no turns.
        queue.turns_taken = max(queue.turns_taken, self._current_turn)
        self.schedule_dispatch()

    def regroup(self, task: Task) -> None:
        """Note that a task has joined a group, if it waits."""
        self._queue_of(task).set_unit(task, self._unit_of(task))

    def withdraw(self, task: Task) -> None:
        """Stop the task if it waits or runs, without reporting its end."""
        self._queue_of(task).discard(task)
        placement = self._placements.pop(task, None)
        if placement is not None:
            placement.engine.running.discard(task)
            placement.driver.cancel()
            self.schedule_dispatch()

    def schedule_dispatch(self) -> None:
        """Place waiting tasks once all callbacks of this turn of the event loop have run."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Place waiting tasks, one unit after the other, until no engine has a place for those that are left.

        The first task of each tenant and model is looked at, and what can be placed with it; not all that wait.
        """
        self._is_scheduled = False
        queues = [queue for queue in self._queues.values() if len(queue)]
        # No two are equal before it comes to the queue: tasks of one tenant have different turns.
        firsts: list[tuple[int, int, TenantQueue, Task]] = []
        for queue in queues:
            for model_id in queue.models:
                self._push_first(firsts, queue, model_id)
        full_models: set[str] = set()
        try:
            while firsts:
                _, _, queue, first = heappop(firsts)
                model_id = first.call.model_id
                if model_id in full_models:
                    continue
                if self._place(queue.unit(first, self._most_places(model_id))):
                    self._push_first(firsts, queue, model_id)
                else:  # the first task must wait, and no other of its model overtakes it
                    full_models.add(model_id)
        finally:
            for queue in queues:
                queue.end_dispatch()

    def _push_first(self, firsts: list[tuple[int, int, TenantQueue, Task]], queue: TenantQueue, model_id: str) -> None:
        """Add the first task of a tenant and model, if there is one, to those that may be placed next."""
        first = queue.first(model_id)
        if first is not None:
            heappush(firsts, (queue.turn(first), queue.number, queue, first))

    def _most_places(self, model_id: str) -> int:
        """How many tasks of a model one engine may take at most."""
        return max((engine.free_places for engine in self.engines.serving(model_id)), default=0)

    def _queue_of(self, task: Task) -> TenantQueue:
        tenant = task.call.tenant
        if tenant not in self._queues:
            self._queues[tenant] = TenantQueue(len(self._queues))
        return self._queues[tenant]

    def _unit_of(self, task: Task) -> UnitKey | None:
        """What the tenant's tasks that go to one engine with this one have too: its group, or its constant prefix."""
        call = task.call
        if self.policy.task_groups and task.group is not None:
            return task.group, call.model_id
        if not self.policy.same_prefix or call.prefix == "" or task.prompt_appended or call.tokens:
            return None
        return call.prefix, call.model_id

    def _place(self, unit: Sequence[Task]) -> int:
        """Start as many tasks of the unit, from the first, as the best engine has capacity for; return how many."""
        if not unit:
            return 0
        first = unit[0]
        capacity: dict[EngineHandle, int] = {}
        for engine in self.engines.serving(first.call.model_id):
            count = engine.count_fitting(unit)
            if count > 0:
                capacity[engine] = count
        if not capacity:
            return 0
        engine, reason = self._choose_engine(first, capacity)
        self._start(first, engine, reason)
        for task in unit[1 : capacity[engine]]:
            self._start(task, engine, f"with {first.output.id}: {reason}")
        return capacity[engine]

    def _choose_engine(self, task: Task, capacity: dict[EngineHandle, int]) -> tuple[EngineHandle, str]:
        """Return the engine for the first tasks of a unit, and the reason. `capacity`: how many each can take."""
        context = task.call.context
        if context is not None and context.engine in capacity:
            return context.engine, "its call's context is there"
        group = task.group if self.policy.task_groups else None
        if group is not None and group.engine is not None and group.engine in capacity:
            return group.engine, "its task group is there"
        largest = max(capacity.values())
        largest_engines = [engine for engine, count in capacity.items() if count == largest]
        chosen = largest_engines[0]
        if self.policy.least_impact:
            chosen = min(largest_engines, key=lambda engine: engine.impact(task))
        if self.policy.cached_prefix:
            candidates = largest_engines if group is not None else list(capacity)
            cached = {engine: engine.count_cached_characters(task) for engine in candidates}
            longest = max(cached.values())
            if longest > cached[chosen]:
                holders = [engine for engine in candidates if cached[engine] == longest]
                chosen = min(holders, key=lambda engine: engine.impact(task))
            if longest:
                return chosen, f"holds {longest} characters of its prompt"
        return chosen, "least impact" if self.policy.least_impact else "first with capacity"

    def _start(self, task: Task, engine: EngineHandle, reason: str) -> None:
        self._take(task)
        if task.group is not None:
            task.group.engine = engine
        if not task.call.tokens:
            engine.remember_prompt(task)
        task.engine_id = engine.id
        task.placement_reason = reason
        task.generating = False
        driver = asyncio.create_task(self._drive(task, engine))
        engine.running.add(task)
        self._placements[task] = Placement(engine, driver)
        self._drivers.add(driver)
        driver.add_done_callback(self._drivers.discard)

    def _take(self, task: Task) -> None:
        """Remove a task that is placed from those that wait."""
        queue = self._queue_of(task)
        self._current_turn = queue.turns_taken
        queue.take(task)

    async def _drive(self, task: Task, engine: EngineHandle) -> None:
        """Run a task on its engine and report the end."""
        error: JaxctxError | None = None
        try:
            await self._run(task, engine)
        except JaxctxError as raised:
            error = raised
        except Exception as raised:
            log.error("a task met a defect: %s", type(raised).__name__)  # its message may quote a prompt
            error = Internal("a task met a defect of the server")
        placement = self._placements.get(task)
        if placement is None or placement.driver is not asyncio.current_task():
            return  # the task was withdrawn, or its engine was lost: this result is too late
        if isinstance(error, Unavailable) and error.reason != "DRAINING":
            self.engines.lose(engine)
            return
        del self._placements[task]
        engine.running.discard(task)
        self.schedule_dispatch()
        if isinstance(error, Unavailable):
            engine.draining = True
            self._put_back(task)
        elif isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
            self._retry_later(task, error, error.retry_after_s)
        elif error is not None:
            task.call.results.fail(task, error)
        else:
            task.call.results.finish(task)

    def _retry_later(self, task: Task, error: ResourceExhausted, retry_after_s: float) -> None:
        """Queue a task again later that an engine refused for now. Each further refusal doubles the pause.

        A task that could not be done in time, and whose deadline passes before the next try, fails at once.
        """
        loop = asyncio.get_running_loop()
        task.refusals += 1
        backoff_s = MIN_RETRY_S * 2 ** min(task.refusals - 1, 20)
        pause_s = max(retry_after_s, min(backoff_s, MAX_RETRY_S))
        timer = task.deadline_timer
        passes_deadline = timer is not None and loop.time() + pause_s >= timer.when()
        if passes_deadline and error.reason == "DEADLINE_UNREACHABLE":
            task.call.results.fail(task, error)
        else:
            loop.call_later(pause_s, self._put_back, task)

    def _engine_lost(self, engine: EngineHandle) -> None:
        """Queue the tasks of a lost engine again. A task with which several engines in turn were lost fails."""
        lost = [(task, placement) for task, placement in self._placements.items() if placement.engine is engine]
        log.info("engine %s is gone, epoch %d, with %d tasks", engine.id, engine.epoch, len(lost))
        for task, placement in lost:
            del self._placements[task]
            engine.running.discard(task)
            if placement.driver is not asyncio.current_task():
                placement.driver.cancel()
            task.failure_score += GENERATING_SCORE if task.generating else 1
            if task.failure_score < MAX_FAILURE_SCORE:
                self._put_back(task)
            else:
                error = Unavailable("engines in turn were lost with it", reason="ENGINE_FAILED", retry_after_s=10.0)
                task.call.results.fail(task, error)
