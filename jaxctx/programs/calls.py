"""Semantic calls: tasks, one for each output, that continue one sequence. A native step is a call of one task.

    idle ──asked for──▶ waiting ──inputs set──▶ started ──▶ done
      └───────────────────┴── an input, or itself, failed ──▶ failed

What is here holds what is known of a call and decides nothing: `graph` moves its tasks from phase to phase.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from jaxctx.errors import ResourceExhausted
from jaxctx.programs.template import TaskSpec
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, GraphTask, SubmitCallResult, TaskPhase, VariableState, named

if TYPE_CHECKING:
    from jaxctx.programs.engine_registry import EngineHandle
    from jaxctx.programs.graph import Graph

BLOCK = 64  # characters; about a page of tokens
LOOKED_AT = 1 << 16  # characters at the start of a prompt, for what engines hold of it
MAX_PROMPT = 8 << 20  # characters


@dataclass(eq=False, kw_only=True)
class Call:
    """A semantic call: its tasks in order, and the sequence that they continue one after the other.

    `tokens` is what the sequence consists of by now. A context of it on an engine (`home`) only saves computing it
    again: it is given up when no task of the call is asked for, or when the engine is lost.
    """

    graph: Graph
    tenant: str
    model_id: str
    prefix: str  # text that all calls of its template begin with
    timeout_s: float  # for each task, from being asked for
    chains: InitVar[Sequence[TaskSpec]]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    tasks: list[Task] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    held: int = 0  # of these, in the context at home
    home: tuple[EngineHandle, str] | None = None

    def __post_init__(self, chains: Sequence[TaskSpec]) -> None:
        for chain in chains:
            self.tasks.append(Task(call=self, chain=chain, previous=self.tasks[-1] if self.tasks else None))

    @property
    def info(self) -> SubmitCallResult:
        """As it is told to whoever made it."""
        return SubmitCallResult(call_id=self.id, outputs=[task.output.info for task in self.tasks])


@dataclass(eq=False, kw_only=True)
class Task:
    """The unit of scheduling: what to append to the call's sequence, and the output that continues it."""

    call: Call
    chain: TaskSpec
    previous: Task | None
    phase: TaskPhase = TaskPhase.IDLE
    criterion: Criterion = Criterion.THROUGHPUT
    serial: int = 0  # of the request that asked for it; all that one needs has its number
    group: Group | None = None
    characters: int = 0  # of its prompt
    blocks: Sequence[bytes] = ()  # digests of a first prompt up to the end of each whole block
    deadline: float = float("inf")
    timer: asyncio.TimerHandle | None = None  # that fails it then
    began: int = 0  # tokens of the call before its output
    seed: int | None = None  # of its output, from its first engine on: whichever goes on with it draws the same way
    begun: bool = False  # the engine generates for it, and gave nothing yet
    blame: int = 0  # for engines that were lost with it, in turn, before they gave anything of it
    refusals: int = 0  # in turn, by engines that had no room or time for it, before they gave anything of it
    appended: bool = False  # the prompt is among the call's tokens
    finished: bool = False  # all of the output is there
    running: asyncio.Task[None] | None = None  # of a native step
    engine_id: str = ""
    why: str = ""  # this engine

    @property
    def inputs(self) -> list[Variable]:
        """What it needs, each once."""
        return list(dict.fromkeys(each for each in self.chain.prompt if isinstance(each, Variable)))

    @property
    def output(self) -> Variable:
        """What it makes."""
        return self.chain.output.variable

    @property
    def info(self) -> GraphTask:
        """As it is told."""
        others = {
            "call_id": self.call.id,
            "criterion": None if self.phase is TaskPhase.IDLE else self.criterion,
            "inputs": [variable.id for variable in self.inputs],
            "output": self.output.id,
            "context_id": self.context_id,
        }
        return GraphTask(**named(GraphTask, self, self.chain) | others)

    @property
    def context_id(self) -> str:
        """The context that holds its prompt and what has come of its output, if that is still on the engine that it
        went to; else empty.
        """
        if self.call.home is None or not self.appended:
            return ""
        node, context_id = self.call.home
        return context_id if node.id == self.engine_id else ""

    @property
    def ended(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.phase in (TaskPhase.DONE, TaskPhase.FAILED)

    @property
    def ready(self) -> bool:
        """Whether all that it needs is there."""
        there = all(variable.state is VariableState.SET for variable in self.inputs)
        return there and (self.previous is None or self.previous.phase is TaskPhase.DONE)

    def prepare(self) -> None:
        """Its inputs are set: say how long the prompt is. ResourceExhausted if that is too long for any engine."""
        if (size := sum(map(len, parts := self.prompt))) > MAX_PROMPT:
            raise ResourceExhausted(f"the prompt has more than {MAX_PROMPT} characters", reason="NEVER_FITS")
        self.characters, digest = size, xxh3_128_digest(self.call.tenant.encode())
        head = "".join(part[:LOOKED_AT] for part in parts[:LOOKED_AT])[:LOOKED_AT]
        starts = range(0, len(head) - BLOCK + 1, BLOCK) if self.previous is None else ()
        self.blocks = [digest := xxh3_128_digest(digest + head[at : at + BLOCK].encode()) for at in starts]

    @property
    def prompt(self) -> list[str]:
        """Its parts as texts, once its inputs are set."""
        return [each.text if isinstance(each, Variable) else each for each in self.chain.prompt]

    def later(self) -> list[Task]:
        """The tasks of the same call after this one."""
        return self.call.tasks[self.call.tasks.index(self) + 1 :]


class Group:
    """Tasks that feed one consumer; done when the last of them is. `engine` is where the first of them went."""

    engine: EngineHandle | None = None
