"""Calls and tasks without a session or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxctx.errors import JaxctxError
from jaxctx.programs.tasks import Call, Task, TaskResults
from jaxctx.programs.template import Output, TaskSpec
from jaxctx.programs.variables import Variable
from jaxctx.types import CallOutput
from tests.server.conftest import INFO


class RecordedResults:
    """Keeps how tasks ended."""

    def __init__(self) -> None:
        self.finished: list[Task] = []
        self.failed: list[tuple[Task, JaxctxError]] = []

    def finish(self, task: Task) -> None:
        self.finished.append(task)

    def fail(self, task: Task, error: JaxctxError) -> None:
        self.failed.append((task, error))


def make_output(name: str = "o", settings: CallOutput | None = None) -> Output:
    """An output with a variable of its own."""
    return Output(Variable(name, is_output=True), settings or CallOutput())


def make_call(
    *prompts: Sequence[str | Variable],
    results: TaskResults | None = None,
    function: str = "",
    settings: CallOutput | None = None,
    **fields: Any,
) -> Call:
    """A call of the scripted engines' model, with a task for each prompt; every one has an output `o`."""
    values = {"tenant": "t", "model_id": INFO.model_id, "prefix": "", "timeout_s": 60.0, **fields}
    call = Call(results=results or RecordedResults(), **values)
    call.add_tasks([TaskSpec(tuple(prompt), make_output(settings=settings), function=function) for prompt in prompts])
    return call
