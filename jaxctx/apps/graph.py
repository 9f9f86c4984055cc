"""The graph of a session: which node makes which variables, who asked for them, and what may start.

Submitting adds nodes and runs none. Asking for a variable walks back from it and gives every producer a criterion
(performance deduction): a lone producer gets the consumer's own; several that feed one consumer become a task group,
which is to be done soon as a whole, so that its members want throughput. A stronger request later upgrades what has not
started. The graph starts nodes by the function that it is given, and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxctx.answers import Criterion, Phase
from jaxctx.apps.nodes import Group, Node, Task
from jaxctx.apps.variables import Variable
from jaxctx.errors import JaxctxError


class Graph:
    """All nodes of a session."""

    def __init__(self, start: Callable[[Node], None], stop: Callable[[Node], None], clock: Callable[[], float]) -> None:
        """`start` is called once for each node that was asked for and is ready; `finish` or `fail` it then. `stop` is
        called for each that failed, whether it was started or not.
        """
        self._start = start
        self._stop = stop
        self._clock = clock
        self._serials = 0

    def add(self, nodes: Sequence[Node]) -> None:
        """Connect nodes. Their outputs are new, and their inputs older or outputs of the same call before them."""
        for node in nodes:
            for variable in node.outputs:
                variable.producer = node
            for variable in node.inputs:
                variable.consumers.append(node)
                if variable.error is not None:
                    self.fail(node, variable.error)

    def ask(self, variable: Variable, criterion: Criterion) -> None:
        """Activate what makes it, and all that this needs."""
        self._serials += 1
        found: list[Node] = []
        reached = [(variable, criterion)]
        while reached:
            variable, criterion = reached.pop()
            if variable.asked is not None and variable.asked >= criterion:
                continue
            variable.asked = criterion
            node = variable.producer
            if node is None or node.ended:
                continue
            if node.phase is Phase.IDLE:
                node.phase, node.serial = Phase.WAITING, self._serials
                if isinstance(node, Task):
                    node.deadline = self._clock() + node.call.timeout_s
                found.append(node)
            node.criterion = max(node.criterion, criterion)
            wanted = criterion
            feeding = _feeding(node)
            if len({task.call for task in feeding}) > 1:
                group, wanted = Group(), Criterion.THROUGHPUT
                for task in feeding:
                    task.group = task.group or group
            before = [node.previous.outputs[0]] if isinstance(node, Task) and node.previous else []
            reached += [(each, criterion) for each in before] + [(each, wanted) for each in node.inputs]
        for node in reversed(found):
            self._start_if_ready(node)

    def settled(self, variable: Variable) -> None:
        """A variable was set: on with those that wait for it."""
        for node in tuple(variable.consumers):
            self._start_if_ready(node)

    def finish(self, node: Node, texts: Sequence[str]) -> None:
        """A node that was started is done; these are its outputs."""
        if node.ended:
            return
        node.phase = Phase.DONE
        for variable, text in zip(node.outputs, texts, strict=True):
            variable.set(text)
            self.settled(variable)
        if isinstance(node, Task):
            for task in node.later()[:1]:
                self._start_if_ready(task)

    def fail(self, node: Node, error: JaxctxError) -> None:
        """It will not be done, and nothing that needs it."""
        reached = [node]
        while reached:
            node = reached.pop()
            if node.ended:
                continue
            node.phase = Phase.FAILED
            self._stop(node)
            for variable in node.outputs:
                variable.fail(error)
                reached += variable.consumers
            reached += node.later() if isinstance(node, Task) else ()

    def _start_if_ready(self, node: Node) -> None:
        if node.phase is Phase.WAITING and node.ready:
            node.phase = Phase.STARTED
            self._start(node)


def _feeding(node: Node) -> list[Task]:
    """The tasks of other calls that feed a node, directly or through native steps."""
    found: dict[Task, None] = {}
    reached: list[Node] = list(Node.needs(node))
    while reached:
        before = reached.pop()
        if not isinstance(before, Task):
            reached += before.needs()
        elif not isinstance(node, Task) or before.call is not node.call:
            found[before] = None
    return list(found)
