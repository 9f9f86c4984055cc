"""The graph of a session: which task makes which variable, who asked for it, and what may start.

Submitting adds tasks and runs none. Asking for a variable walks back from it and gives every producer a criterion
(performance deduction): a lone producer gets the consumer's own; several that feed one consumer become a task group,
which is to be done soon as a whole, so that its members want throughput. A stronger request later upgrades what has not
started. The graph starts tasks by the function that it is given, and never waits.
"""

import asyncio
from collections.abc import Callable

from jaxctx.errors import DeadlineExceeded, JaxctxError
from jaxctx.programs.calls import Call, Group, Task
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, TaskPhase


class Graph:
    """All tasks of a session."""

    def __init__(self, start: Callable[[Task], None], stop: Callable[[Task], None], clock: Callable[[], float]) -> None:
        """`start` is called once for each task that was asked for and is ready; `finish` or `fail` it then. `stop` is
        called for each that ended, whether it was started or not.
        """
        self._start = start
        self._stop = stop
        self._clock = clock
        self._serials = 0

    def add(self, call: Call) -> None:
        """Connect the tasks of a call, whose outputs are new variables."""
        for task in call.tasks:
            task.output.producer = task
            for variable in task.inputs:
                variable.consumers.append(task)
                if variable.error is not None:
                    self.fail(task, variable.error)

    def ask(self, variable: Variable, criterion: Criterion) -> None:
        """Activate what makes it, and all that this needs."""
        self._serials += 1
        found: list[Task] = []
        reached = [(variable, criterion)]
        while reached:
            variable, criterion = reached.pop()
            if variable.asked is not None and variable.asked >= criterion:
                continue
            variable.asked = criterion
            task = variable.producer
            if task is None or task.ended:
                continue
            if task.phase is TaskPhase.IDLE:
                task.phase, task.serial = TaskPhase.WAITING, self._serials
                task.deadline = self._clock() + task.call.timeout_s
                late = DeadlineExceeded("its time was over before it was done")
                task.timer = asyncio.get_running_loop().call_later(task.call.timeout_s, self.fail, task, late)
                found.append(task)
            task.criterion = max(task.criterion, criterion)
            if task.previous is not None:
                reached.append((task.previous.output, criterion))
            feeding = [each.producer for each in task.inputs if each.producer and not each.producer.ended]
            group = task.group if task.chain.function else None  # what feeds a step feeds its consumer
            if group or len(feeding) > 1:
                group, criterion = group or Group(), Criterion.THROUGHPUT
                for producer in feeding:
                    producer.group = producer.group or group
            reached += [(each, criterion) for each in task.inputs]
        for task in reversed(found):
            self._start_if_ready(task)

    def settled(self, variable: Variable) -> None:
        """A variable was set: on with those that wait for it."""
        for task in variable.consumers:
            self._start_if_ready(task)

    def finish(self, task: Task) -> None:
        """A task that was started is done: its output is what it has become."""
        self._end(task, TaskPhase.DONE)
        task.output.set(task.output.text)
        self.settled(task.output)
        for later in task.later()[:1]:
            self._start_if_ready(later)

    def fail(self, task: Task, error: JaxctxError) -> None:
        """It will not be done, and nothing that needs it."""
        reached = [task]
        while reached:
            task = reached.pop()
            if not task.ended:
                self._end(task, TaskPhase.FAILED)
                task.output.fail(error)
                reached += [*task.output.consumers, *task.later()]

    def _end(self, task: Task, phase: TaskPhase) -> None:
        task.phase = phase
        if task.timer is not None:
            task.timer.cancel()
        self._stop(task)

    def _start_if_ready(self, task: Task) -> None:
        if task.phase is TaskPhase.WAITING and task.ready:
            task.phase = TaskPhase.STARTED
            self._start(task)
