"""The graph of a session: which node makes which variables, who asked for them, and what may start.

    idle ──asked for──▶ waiting ──inputs set──▶ started ──▶ done
      └───────────────────┴── an input, or itself, failed ──▶ failed

Submitting adds nodes and runs none. Asking for a variable walks back from it and gives every producer a criterion
(performance deduction): a lone producer gets the consumer's own; several that feed one consumer become a task group,
which is to be done soon as a whole, so that its members want throughput. A stronger request later upgrades what has not
started. The graph starts nodes by the function that it is given, and never waits.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from jaxctx.answers import Criterion, GraphNode, SubmitCallResult, VariableState
from jaxctx.apps.native import Function
from jaxctx.apps.template import Chain
from jaxctx.apps.variables import Variable
from jaxctx.errors import FailedPrecondition, InvalidArgument, JaxctxError, ResourceExhausted

if TYPE_CHECKING:
    from jaxctx.apps.engines import EngineNode

BLOCK = 64  # characters; about a page of tokens
MAX_PROMPT = 8 << 20  # characters


class Phase(enum.Enum):
    """Of a node."""

    IDLE = "idle"
    WAITING = "waiting"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class Node:
    """What makes variables of others. `serial` orders requests: all that one needs has its number."""

    def __init__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> None:
        self.inputs = tuple(dict.fromkeys(inputs))
        self.outputs = tuple(outputs)
        self.phase = Phase.IDLE
        self.criterion = Criterion.THROUGHPUT
        self.serial = 0

    @property
    def info(self) -> GraphNode:
        """As it is told, without what it makes them by."""
        return GraphNode(
            phase=self.phase.value,
            criterion=None if self.phase is Phase.IDLE else self.criterion,
            inputs=[variable.id for variable in self.inputs],
            outputs=[variable.id for variable in self.outputs],
        )

    @property
    def ended(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def ready(self) -> bool:
        """Whether all that it needs is there."""
        return all(variable.state is VariableState.SET for variable in self.inputs)

    def needs(self) -> list[Node]:
        """The nodes before it that have not ended."""
        found = [each.producer for each in self.inputs if each.producer and not each.producer.ended]
        return list(dict.fromkeys(found))


class Step(Node):
    """A native step. `inputs` by the names that the function knows them by."""

    def __init__(
        self,
        name: str,
        function: Function,
        inputs: Mapping[str, Variable],
        settings: Mapping[str, str],
        outputs: Sequence[Variable],
    ) -> None:
        super().__init__(tuple(inputs.values()), outputs)
        self.name = name
        self.function = function
        self.named = inputs
        self.settings = settings

    @property
    def info(self) -> GraphNode:
        return replace(super().info, function=self.name)


class Call:
    """A semantic call: its tasks in order, and the sequence that they continue one after the other.

    `tokens` is what the sequence consists of by now. A context of it on an engine (`home`) only saves computing it
    again: it is given up when no task of the call is asked for, or when the engine is lost.
    """

    def __init__(
        self,
        graph: Graph,
        tenant: str,
        model_id: str,
        prefix: str,
        chains: Sequence[Chain],
        timeout_s: float,
    ) -> None:
        """`prefix` is the text that all calls of its template begin with; `timeout_s` counts from being asked for."""
        self.id = secrets.token_hex(16)
        self.graph = graph
        self.tenant = tenant
        self.model_id = model_id
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.tokens: list[int] = []
        self.held = 0  # of these, in the context at home
        self.home: tuple[EngineNode, str] | None = None
        self.tasks: list[Task] = []
        for chain in chains:
            self.tasks.append(Task(self, chain, self.tasks[-1] if self.tasks else None))

    @property
    def info(self) -> SubmitCallResult:
        """As it is told to whoever made it."""
        return SubmitCallResult(call_id=self.id, outputs=[task.outputs[0].info for task in self.tasks])


class Task(Node):
    """The unit of scheduling: what to append to the call's sequence, and the output that continues it."""

    def __init__(self, call: Call, chain: Chain, previous: Task | None) -> None:
        variables = [each for each in chain.prompt if isinstance(each, Variable)]
        super().__init__(variables, [chain.output.variable])
        self.call = call
        self.chain = chain
        self.previous = previous
        self.group: Group | None = None
        self.prompt = ""
        self.blocks: list[bytes] = []  # digests of all of a first prompt up to the end of each whole block
        self.deadline = float("inf")
        self.attempts = 0  # on engines that were lost
        self.appended = False  # the prompt is among the call's tokens
        self.generated = 0  # tokens of the output that are
        self.engine_id = ""
        self.why = ""  # this engine

    def make_prompt(self) -> None:
        """Of its inputs, which are set. ResourceExhausted if that would be too long for any engine."""
        parts = [each.text if isinstance(each, Variable) else each for each in self.chain.prompt]
        if sum(map(len, parts)) > MAX_PROMPT:
            raise ResourceExhausted(f"the prompt has more than {MAX_PROMPT} characters", reason="NEVER_FITS")
        self.prompt, digest = "".join(parts), xxh3_128_digest(self.call.tenant.encode())
        starts = range(0, len(self.prompt) - BLOCK + 1, BLOCK) if self.previous is None else ()
        self.blocks = [digest := xxh3_128_digest(digest + self.prompt[at : at + BLOCK].encode()) for at in starts]

    def forget_prompt(self) -> None:
        """It was the last to need it."""
        self.prompt, self.blocks = "", []

    @property
    def info(self) -> GraphNode:
        return replace(super().info, call_id=self.call.id, engine_id=self.engine_id, why=self.why)

    @property
    def ready(self) -> bool:
        return super().ready and (self.previous is None or self.previous.phase is Phase.DONE)

    def needs(self) -> list[Node]:
        before = [self.previous] if self.previous and not self.previous.ended else []
        return [*before, *super().needs()]


class Group:
    """Tasks that feed one consumer; done when the last of them is. `engine` is where the first of them went."""

    def __init__(self) -> None:
        self.engine: EngineNode | None = None


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
        """Connect nodes. Raises FailedPrecondition for an output that is set or something else makes, and
        InvalidArgument for a cycle; then nothing is connected.
        """
        outputs = [variable for node in nodes for variable in node.outputs]
        if len(set(outputs)) < len(outputs) or any(
            each.producer or each.state is not VariableState.UNSET for each in outputs
        ):
            raise FailedPrecondition("an output must be a variable that is unset, and that nothing else makes")
        for node in nodes:
            for variable in node.inputs:
                variable.consumers.append(node)
            for variable in node.outputs:
                variable.producer = node
        if any(variable.consumers for variable in outputs) and _on_a_cycle(nodes):
            self.remove(nodes)
            raise InvalidArgument.field("parameters", "make a cycle: an output would be needed for itself")
        for node in nodes:
            failed = next((each.error for each in node.inputs if each.error), None)
            if failed is not None:
                self.fail(node, failed)
            for variable in node.outputs:
                if (criterion := variable.asked) is not None:
                    variable.asked = None
                    self.ask(variable, criterion)

    def remove(self, nodes: Sequence[Node]) -> None:
        """Disconnect nodes that have not started or have ended."""
        for node in nodes:
            for variable in node.inputs:
                variable.consumers.remove(node)
            for variable in node.outputs:
                variable.producer = None

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
        for task in _later(node)[:1]:
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
            reached += _later(node)

    def _start_if_ready(self, node: Node) -> None:
        if node.phase is Phase.WAITING and node.ready:
            node.phase = Phase.STARTED
            self._start(node)


def _later(node: Node) -> list[Task]:
    """The tasks of the same call after this one."""
    return node.call.tasks[node.call.tasks.index(node) + 1 :] if isinstance(node, Task) else []


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


def _on_a_cycle(nodes: Sequence[Node]) -> bool:
    """Whether one of the nodes needs itself."""
    for node in nodes:
        seen: set[Node] = set()
        reached = node.needs()
        while reached:
            before = reached.pop()
            if before is node:
                return True
            if before not in seen:
                seen.add(before)
                reached += before.needs()
    return False
