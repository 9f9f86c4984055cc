"""The graph of a session: which task makes which variable, who asked for it, and what may start.

Submitting adds tasks and runs none. Asking for a variable walks back from it and gives every producer a criterion
(performance deduction): a lone producer gets the consumer's own; several that feed one consumer become a task group,
which is to be done soon as a whole, so its members want throughput. A stronger request later upgrades what has not
started. The graph starts tasks through the function that it is given, and never waits.
"""

import asyncio
from collections.abc import Callable, Iterator

from jaxctx.errors import DeadlineExceeded, JaxctxError
from jaxctx.programs.tasks import Call, Task, TaskGroup
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, TaskPhase


class Graph:
    """All tasks of a session, and the variables that they make and need."""

    def __init__(
        self,
        start: Callable[[Task], None],
        stop: Callable[[Task], None],
        joined: Callable[[Task], None],
        clock: Callable[[], float],
        request_numbers: Iterator[int],
    ) -> None:
        """`start` is called once for each task that was asked for and is ready; `finish` or `fail` it then. `stop` is
        called for each task that ended, whether it was started or not, and `joined` for each that became one of a
        group, which may have been started before. `request_numbers` are ascending and shared by all graphs, so that
        requests of one session can be compared with those of another.
        """
        self._start = start
        self._stop = stop
        self._joined = joined
        self._clock = clock
        self._request_numbers = request_numbers
        self._producers: dict[Variable, Task] = {}
        self._consumers: dict[Variable, list[Task]] = {}

    def producer(self, variable: Variable) -> Task | None:
        """Return the task that makes a variable; None if a client sets it."""
        return self._producers.get(variable)

    def add(self, call: Call) -> None:
        """Connect the tasks of a call, whose outputs are new variables."""
        for task in call.tasks:
            self._producers[task.output] = task
            for variable in task.inputs:
                self._consumers.setdefault(variable, []).append(task)
                if variable.error is not None:
                    self.fail(task, variable.error)

    def request(self, variable: Variable, criterion: Criterion) -> None:
        """Activate the task that makes a variable, and all tasks that this one needs."""
        request_number = next(self._request_numbers)
        activated: list[Task] = []
        to_visit = [(variable, criterion)]
        while to_visit:
            visited, wanted = to_visit.pop()
            if visited.requested is not None and visited.requested >= wanted:
                continue
            visited.requested = wanted
            task = self.producer(visited)
            if task is None or task.ended:
                continue
            if task.phase is TaskPhase.IDLE:
                self._activate(task, request_number)
                activated.append(task)
            task.criterion = max(task.criterion, wanted)
            if task.previous is not None:
                to_visit.append((task.previous.output, wanted))
            wanted_of_inputs = self._group_producers(task, wanted)
            to_visit += [(each, wanted_of_inputs) for each in task.inputs]
        for task in reversed(activated):
            self._start_if_ready(task)

    def variable_set(self, variable: Variable) -> None:
        """Start the tasks that waited for this variable and have all they need now."""
        for task in self._consumers.get(variable, ()):
            self._start_if_ready(task)

    def finish(self, task: Task) -> None:
        """A started task is done: its output is the text that it has become."""
        self._end(task, TaskPhase.DONE)
        task.output.set(task.output.text)
        self.variable_set(task.output)
        for later in task.later_tasks[:1]:
            self._start_if_ready(later)

    def fail(self, task: Task, error: JaxctxError) -> None:
        """Fail a task, and with it every task that needs it."""
        to_fail = [task]
        while to_fail:
            failing = to_fail.pop()
            if not failing.ended:
                self._end(failing, TaskPhase.FAILED)
                failing.output.fail(error)
                to_fail += self._consumers.get(failing.output, ())
                to_fail += failing.later_tasks

    def _activate(self, task: Task, request_number: int) -> None:
        """The task waits for its inputs from now on; its deadline begins."""
        task.phase = TaskPhase.WAITING
        task.request_number = request_number
        task.deadline = self._clock() + task.call.timeout_s
        too_late = DeadlineExceeded("its time was over before it was done")
        loop = asyncio.get_running_loop()
        task.deadline_timer = loop.call_later(task.call.timeout_s, self.fail, task, too_late)

    def _group_producers(self, task: Task, criterion: Criterion) -> Criterion:
        """Make a group of the tasks that feed this one, if there are several; return the criterion for its inputs.

        What feeds a native step feeds the consumer of that step, so it joins the step's own group.
        """
        producers = [self.producer(variable) for variable in task.inputs]
        feeding = [producer for producer in producers if producer is not None and not producer.ended]
        group = task.group if task.spec.function else None
        if group is None and len(feeding) <= 1:
            return criterion
        if group is None:
            group = TaskGroup()
        for producer in feeding:
            if producer.group is None:
                producer.group = group
                self._joined(producer)
        return Criterion.THROUGHPUT

    def _end(self, task: Task, phase: TaskPhase) -> None:
        task.phase = phase
        if task.deadline_timer is not None:
            task.deadline_timer.cancel()
        self._stop(task)

    def _start_if_ready(self, task: Task) -> None:
        if task.phase is TaskPhase.WAITING and task.inputs_ready:
            task.phase = TaskPhase.STARTED
            self._start(task)
