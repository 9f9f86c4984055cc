"""Semantic calls and their tasks: one task for each output, all continuing one sequence of tokens.

    idle ──asked for──▶ waiting ──inputs set──▶ started ──▶ done
      └───────────────────┴── an input, or itself, failed ──▶ failed

A native step is a call of one task that calls a function instead of an engine. These classes hold what is known of a
call and decide nothing: `graph` moves tasks from phase to phase, `dispatcher` places them, `executor` runs them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xxhash import xxh3_128_digest

from jaxctx.errors import JaxctxError, ResourceExhausted
from jaxctx.programs.engine_registry import PROMPT_BLOCK, EngineHandle
from jaxctx.programs.template import TaskSpec
from jaxctx.programs.variables import Variable
from jaxctx.types import Criterion, GraphTask, SubmitCallResult, TaskPhase, VariableState

MAX_HASHED_CHARACTERS = 1 << 16  # at the start of a prompt, to guess what engines hold of it
MAX_PROMPT_CHARACTERS = 8 << 20
CHARACTERS_PER_TOKEN = 3  # about; engines count exactly


class TaskResults(Protocol):
    """Where the end of a task is reported. Implemented by `graph.Graph`."""

    def finish(self, task: Task) -> None:
        """The task is done."""

    def fail(self, task: Task, error: JaxctxError) -> None:
        """The task will not be done."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """The context of a call on an engine. It only saves computing: the call's tokens are what counts."""

    engine: EngineHandle
    context_id: str
    adapter_revision: str = ""  # digest of its adapter's content; empty: it has none


@dataclass(eq=False, kw_only=True)
class Call:
    """A semantic call: its tasks in order, and the sequence of tokens that they continue one after the other.

    The context on an engine is given up when no task of the call is asked for, or when the engine is lost.
    """

    results: TaskResults
    tenant: str
    model_id: str  # of a model, or the name of an adapter
    prefix: str  # text that all calls of its template begin with
    timeout_s: float  # for each task, from being asked for
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    tasks: list[Task] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the whole sequence so far
    tokens_in_context: int = 0  # how many of these the context on the engine holds
    context: CallContext | None = None
    adapter_revision: str | None = None  # of its first context; another one would go on with other weights

    def add_tasks(self, specs: Sequence[TaskSpec]) -> None:
        """Add a task for each, every one continuing the one before."""
        for spec in specs:
            previous = self.tasks[-1] if self.tasks else None
            self.tasks.append(Task(call=self, spec=spec, previous=previous))

    @property
    def info(self) -> SubmitCallResult:
        """The call as the answer to SubmitCall states it."""
        return SubmitCallResult(call_id=self.id, outputs=[task.output.info for task in self.tasks])


@dataclass(eq=False, kw_only=True)
class Task:
    """The unit of scheduling: what to append to the call's sequence, and the output that continues it."""

    call: Call
    spec: TaskSpec
    previous: Task | None
    phase: TaskPhase = TaskPhase.IDLE
    criterion: Criterion = Criterion.THROUGHPUT
    request_number: int = 0  # of the request that asked for it, ascending over all sessions; all that it needs has it
    group: TaskGroup | None = None
    deadline: float = float("inf")
    deadline_timer: asyncio.TimerHandle | None = None  # fails the task at its deadline

    # The prompt, once the inputs are set.
    prompt_characters: int = 0
    prompt_blocks: Sequence[bytes] = ()  # digests of a call's first prompt up to the end of each whole block
    prompt_appended: bool = False  # the prompt is among the call's tokens

    # The output.
    output_start: int = 0  # tokens of the call before its output
    seed: int | None = None  # chosen at the first engine: an engine that resumes the output draws the same way
    output_complete: bool = False

    # The engine that it is on, or was on.
    engine_id: str = ""
    placement_reason: str = ""
    generating: bool = False  # the engine generates for it, and has not given anything yet
    failure_score: int = 0  # of engines lost with it in turn, before they gave anything of it
    refusals: int = 0  # refusals in turn, by engines without capacity or time for it, since its last output
    function_run: asyncio.Task[None] | None = None  # of a native step

    @property
    def inputs(self) -> list[Variable]:
        """The variables that it needs, each once."""
        return list(dict.fromkeys(part for part in self.spec.prompt if isinstance(part, Variable)))

    @property
    def output(self) -> Variable:
        """The variable that it makes."""
        return self.spec.output.variable

    @property
    def info(self) -> GraphTask:
        """The task as GetGraph states it."""
        return GraphTask(
            call_id=self.call.id,
            phase=self.phase,
            criterion=None if self.phase is TaskPhase.IDLE else self.criterion,
            inputs=[variable.id for variable in self.inputs],
            output=self.output.id,
            engine_id=self.engine_id,
            why=self.placement_reason,
            function=self.spec.function,
            context_id=self.context_id,
        )

    @property
    def context_id(self) -> str:
        """The context that holds its prompt and what has come of its output; "" if it is not on its engine any more."""
        context = self.call.context
        if context is None or not self.prompt_appended or context.engine.id != self.engine_id:
            return ""
        return context.context_id

    @property
    def ended(self) -> bool:
        """Whether nothing will come of it any more."""
        return self.phase in (TaskPhase.DONE, TaskPhase.FAILED)

    @property
    def inputs_ready(self) -> bool:
        """Whether all its inputs are set, and the task before it in the call is done."""
        if self.previous is not None and self.previous.phase is not TaskPhase.DONE:
            return False
        return all(variable.state is VariableState.SET for variable in self.inputs)

    @property
    def prompt(self) -> list[str]:
        """The parts of its prompt as texts, once its inputs are set."""
        return [part.text if isinstance(part, Variable) else part for part in self.spec.prompt]

    @property
    def later_tasks(self) -> list[Task]:
        """The tasks of the same call after this one."""
        return self.call.tasks[self.call.tasks.index(self) + 1 :]

    def measure_prompt(self) -> None:
        """Measure and hash the prompt, once the inputs are set.

        Raises ResourceExhausted (NEVER_FITS) for a prompt that is too long for any engine.
        """
        parts = self.prompt
        characters = sum(len(part) for part in parts)
        if characters > MAX_PROMPT_CHARACTERS:
            message = f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters"
            raise ResourceExhausted(message, reason="NEVER_FITS")
        self.prompt_characters = characters
        self.prompt_blocks = self._hash_blocks(parts) if self.previous is None else ()

    def estimate_tokens(self, default_max_tokens: int) -> int:
        """Return about how many tokens the call's context will have when the task is done."""
        appended = 0 if self.prompt_appended else self.prompt_characters // CHARACTERS_PER_TOKEN
        output = self.spec.output.settings.max_tokens or default_max_tokens
        return len(self.call.tokens) + appended + output

    def _hash_blocks(self, parts: Sequence[str]) -> list[bytes]:
        """Return a digest of the prompt up to the end of each whole block, chained, and different for each tenant."""
        first_parts = [part[:MAX_HASHED_CHARACTERS] for part in parts[:MAX_HASHED_CHARACTERS]]
        head = "".join(first_parts)[:MAX_HASHED_CHARACTERS]
        digests: list[bytes] = []
        digest = xxh3_128_digest(self.call.tenant.encode())
        for start in range(0, len(head) - PROMPT_BLOCK + 1, PROMPT_BLOCK):
            digest = xxh3_128_digest(digest + head[start : start + PROMPT_BLOCK].encode())
            digests.append(digest)
        return digests


class TaskGroup:
    """Tasks that feed one consumer; done when the last of them is. `engine` is where the first of them went."""

    engine: EngineHandle | None = None
