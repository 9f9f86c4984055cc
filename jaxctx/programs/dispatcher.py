"""The dispatcher: ready tasks wait in one queue, and go to the engine that suits them best when one has room.

In this order: a task group goes together; tasks with the same constant prefix go together; an engine that holds the
longest part of the prompt is preferred; else the one on whose users it has the least impact. Tenants take turns; within
one, what an older request needs goes first. All but the turns are switches (`Policy`); every decision says what
it rests on.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from jaxctx.errors import Internal, JaxctxError, ResourceExhausted, Unavailable
from jaxctx.programs.calls import Task
from jaxctx.programs.engine_registry import BEAT_S, EngineHandle, EngineRegistry

log = logging.getLogger("jaxctx.programs")
MOST_WAITING = 1000  # tasks of a tenant
RETRY_S = 0.05, 30.0  # after which a task that an engine refused is tried again, at least and at most
BEGUN, MAX_BLAME = 4, 12  # of a task for an engine that was lost with it, which else is 1, until something comes of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the dispatcher looks at. Each is a setting of the server, `--dispatch-…`."""

    task_groups: bool = True
    same_prefix: bool = True
    cached_prefix: bool = True
    least_impact: bool = True  # else the first engine with room
    app_order: bool = True  # else in the order of becoming ready


class Dispatcher:
    """The queue, and what runs. Lives on the event loop."""

    def __init__(
        self,
        run: Callable[[Task, EngineHandle], Awaitable[None]],
        *,
        policy: Policy | None = None,
        beat_s: float = BEAT_S,
    ) -> None:
        """`run` does a task on an engine; the task's graph is told how it went. `beat_s`: see `EngineRegistry`."""
        self.engines = EngineRegistry(self.look, self._lost, beat_s)
        self.policy = policy or Policy()
        self._run = run
        self._lanes: dict[str, dict[Task, None]] = defaultdict(dict)  # by tenant, in the order of becoming ready
        self._spent: dict[str, int] = defaultdict(int)  # places that each tenant has had
        self._turn = 0  # of these, before the latest one
        self._running: set[asyncio.Task[None]] = set()  # those that were cancelled and have not ended, too
        self._looking = False

    def submit(self, task: Task) -> None:
        """A task that is ready waits for an engine; one too many, or that ended, does not."""
        tenant, lane = task.call.tenant, self._lanes[task.call.tenant]
        if task.ended:
            return
        if len(lane) >= MOST_WAITING:
            full = ResourceExhausted("too many tasks wait for engines", reason="QUEUE_FULL", retry_after_s=1.0)
            task.call.graph.fail(task, full)
            return
        lane[task] = None
        self._spent[tenant] = max(self._spent[tenant], self._turn)  # who was away has saved up none
        self.look()

    def withdraw(self, task: Task) -> None:
        """Neither run it nor say how it went."""
        self._lanes[task.call.tenant].pop(task, None)
        for node in self.engines.nodes.values():
            if (running := node.running.pop(task, None)) is not None:
                running.cancel()
                self.look()

    def look(self) -> None:
        """Something changed: look, once all that happens in this moment has happened, what can go where."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._looking = False
        waiting = self._in_turn()
        while waiting:
            task = waiting[0]
            unit = [each for each in waiting if self._together(task, each)]
            placed = set(unit[: self._place(unit)])
            # Where the first in line must wait nobody overtakes it.
            model_id = None if placed else task.call.model_id
            waiting = [each for each in waiting if each not in placed and each.call.model_id != model_id]

    def _in_turn(self) -> list[Task]:
        lanes = {tenant: list(lane) for tenant, lane in self._lanes.items()}
        if self.policy.app_order:
            for lane in lanes.values():
                lane.sort(key=lambda task: task.serial)
        # The n-th task of a tenant comes when it has had n more places than it has had.
        turns = [(self._spent[tenant] + n, task) for tenant, lane in lanes.items() for n, task in enumerate(lane)]
        return [task for _, task in sorted(turns, key=lambda turn: turn[0])]

    def _together(self, task: Task, other: Task) -> bool:
        if task is other:
            return True
        if self.policy.task_groups and (task.group or other.group):
            return task.group is other.group and task.call.model_id == other.call.model_id
        a, b = task.call, other.call
        starting = not (task.appended or other.appended or a.tokens or b.tokens)
        same = (a.tenant, a.model_id, a.prefix) == (b.tenant, b.model_id, b.prefix)
        return self.policy.same_prefix and starting and same and a.prefix != ""

    def _place(self, unit: list[Task]) -> int:
        """Start as many of the unit, from the first, as the best engine for them has room for."""
        task = unit[0]
        fitting = {node: node.fitting(unit) for node in self.engines.serving(task.call.model_id)}
        fitting = {node: count for node, count in fitting.items() if count}
        if not fitting:
            return 0
        node, why = self._best(task, fitting)
        for each in unit[: fitting[node]]:
            self._start(each, node, why if each is task else f"with {task.chain.output.variable.id}: {why}")
        return fitting[node]

    def _best(self, task: Task, fitting: dict[EngineHandle, int]) -> tuple[EngineHandle, str]:
        """Of engines with room for so many of a unit, the one to take them; and why."""
        home, group = task.call.home, task.group if self.policy.task_groups else None
        if home is not None and home[0] in fitting:
            return home[0], "its call's context is there"
        if group is not None and group.engine in fitting:
            return group.engine, "its task group is there"
        roomy = [node for node, count in fitting.items() if count == max(fitting.values())]
        node = min(roomy, key=lambda node: node.impact(task)) if self.policy.least_impact else roomy[0]
        if self.policy.cached_prefix:
            cached = {each: each.cached(task) for each in (roomy if group else fitting)}
            longest = max(cached.values())
            if longest > cached[node]:
                node = min((each for each in cached if cached[each] == longest), key=lambda each: each.impact(task))
            if longest:
                return node, f"holds {longest} characters of its prompt"
        return node, "least impact" if self.policy.least_impact else "first with room"

    def _start(self, task: Task, node: EngineHandle, why: str) -> None:
        del self._lanes[task.call.tenant][task]
        self._turn = self._spent[task.call.tenant]
        self._spent[task.call.tenant] += 1
        if task.group is not None:
            task.group.engine = node
        if not task.call.tokens:
            node.remember(task)
        task.engine_id, task.why, task.begun = node.id, why, False
        running = node.running[task] = asyncio.create_task(self._attend(task, node))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _attend(self, task: Task, node: EngineHandle) -> None:
        error: JaxctxError | None = None
        try:
            await self._run(task, node)
        except JaxctxError as raised:
            error = raised
        except Exception as raised:
            log.error("a task met a defect: %s", type(raised).__name__)  # what it says may quote a prompt
            error = Internal("a task met a defect of the server")
        if task not in node.running:
            return  # withdrawn, or its engine was lost: this comes late
        if isinstance(error, Unavailable) and error.reason != "DRAINING":
            self.engines.lose(node)
            return
        del node.running[task]
        self.look()
        if isinstance(error, Unavailable):
            node.draining = True
            self.submit(task)
        elif isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
            self._try_later(task, error, error.retry_after_s)
        elif error is not None:
            task.call.graph.fail(task, error)
        else:
            task.call.graph.finish(task)

    def _try_later(self, task: Task, error: ResourceExhausted, retry_after_s: float) -> None:
        """An engine refused a task for now. Each time in turn it waits twice as long. One that would be too late, and
        whose time is over before it would be tried again, fails with that at once.
        """
        loop = asyncio.get_running_loop()
        task.refusals += 1
        least, most = RETRY_S
        later_s = max(retry_after_s, min(least * 2 ** min(task.refusals - 1, 20), most))
        over = task.timer is not None and loop.time() + later_s >= task.timer.when()
        if over and error.reason == "DEADLINE_UNREACHABLE":
            task.call.graph.fail(task, error)
        else:
            loop.call_later(later_s, self.submit, task)

    def _lost(self, node: EngineHandle) -> None:
        log.info("engine %s is gone, epoch %d, with %d tasks", node.id, node.epoch, len(node.running))
        for task, running in tuple(node.running.items()):
            del node.running[task]
            if running is not asyncio.current_task():
                running.cancel()
            task.blame += BEGUN if task.begun else 1  # it may be what they die of
            if task.blame < MAX_BLAME:
                self.submit(task)
            else:
                why = Unavailable("engines in turn were lost with it", reason="ENGINE_FAILED", retry_after_s=10.0)
                task.call.graph.fail(task, why)
