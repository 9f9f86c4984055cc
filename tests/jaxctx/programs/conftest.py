"""Programs over scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jaxctx.programs.dispatcher import Policy
from jaxctx.programs.sessions import Programs, Session
from jaxctx.types import CallOutput, Criterion, Parameter, SubmitCallRequest
from tests.jaxctx.programs.scripted import ScriptedEngine, encode


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ProgramsHarness:
    """Programs, their engines, and short ways to say things."""

    def __init__(self, *engines: ScriptedEngine, latency_bound: int = 4, **settings: Any) -> None:
        self.clock = Clock()
        self.programs = Programs(self.clock, **settings)
        self.engines = engines
        self.registry = self.programs.dispatcher.engines
        self.nodes = [self.registry.register(each.name, each, encode, latency_bound=latency_bound) for each in engines]

    def session(self, tenant: str = "t", ttl_s: float = 60.0) -> Session:
        return self.programs.create(tenant, ttl_s)

    def loads(self) -> list[int]:
        return [len(node.running) for node in self.nodes]


def output(name: str, *, max_tokens: int | None = None, **fields: Any) -> Parameter:
    return Parameter(name=name, output=CallOutput(max_tokens=max_tokens, **fields))


def call(session: Session, template: str, model_id: str = "", **parameters: Any) -> dict[str, str]:
    """Submit a call; ids of its outputs by name. A str is a text, a 1-tuple a variable's id, a Parameter itself."""
    made = []
    for name, value in parameters.items():
        if isinstance(value, Parameter):
            made.append(value)
        elif isinstance(value, tuple):
            made.append(Parameter(name=name, variable_id=value[0]))
        else:
            made.append(Parameter(name=name, text=value))
    submitted = session.submit(SubmitCallRequest(model_id=model_id, template=template, parameters=made))
    return {task.output.name: task.output.id for task in submitted.tasks}


def step(session: Session, function: str, *, timeout_s: float = 60.0, **values: Any) -> str:
    """Add a native step with the output `o`; its id. A str is a text, a 1-tuple a variable's id, a Parameter itself."""
    arguments = {name: value for name, value in values.items() if not isinstance(value, Parameter)}
    made = [
        Parameter(name=name, variable_id=value[0]) if isinstance(value, tuple) else Parameter(name=name, text=value)
        for name, value in arguments.items()
    ]
    made += [output("o"), *(value for value in values.values() if isinstance(value, Parameter))]
    return session.submit(SubmitCallRequest(function=function, parameters=made, timeout_s=timeout_s)).tasks[0].output.id


async def ask(session: Session, variable_id: str, criterion: Criterion = Criterion.LATENCY) -> str:
    return await asyncio.wait_for(session.request(variable_id, criterion).wait(), 5)


async def run_event_loop() -> None:
    """Let everything happen that can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.fixture
def policy() -> Policy:
    return Policy()
