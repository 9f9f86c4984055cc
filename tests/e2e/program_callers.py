"""Callers of the session service, and what they submit."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

import jaxctx
from jaxctx.rpc import from_rpc_error
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub

SYSTEM = "You are a careful assistant who answers in one short sentence, and never guesses. "
GREEDY: dict[str, Any] = {"sampling": {"temperature": 0}, "ignore_eos": True}


class ProgramCaller:
    """The methods of SessionService, with a key, in one session."""

    def __init__(self, stub: SessionServiceStub, key: str | None = None, timeout_s: float = 60.0) -> None:
        self._stub, self._timeout_s = stub, timeout_s
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.session_id = ""

    async def __call__(self, method: str, **fields: Any) -> Any:
        kind = getattr(pb, f"{method}Request")
        if "session_id" in kind.DESCRIPTOR.fields_by_name and method != "CreateSession":
            fields.setdefault("session_id", self.session_id)
        try:
            return await getattr(self._stub, method)(kind(**fields), metadata=self._metadata, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def begin(self) -> ProgramCaller:
        """Create the session."""
        self.session_id = (await self("CreateSession")).session.session_id
        return self

    async def call(self, template: str, **parameters: dict[str, Any]) -> dict[str, str]:
        """Ids of its outputs, by name."""
        response = await self(
            "SubmitCall", template=template, parameters=[{"name": name, **value} for name, value in parameters.items()]
        )
        return {each.name: each.variable_id for each in response.outputs}

    async def get(self, variable_id: str, criterion: Any = pb.CRITERION_LATENCY) -> str:
        response = await self("GetVariable", variable_id=variable_id, criterion=criterion, wait=True)
        assert response.variable.state == pb.VARIABLE_STATE_SET
        return response.variable.text

    def read(self, variable_id: str) -> Any:
        request = pb.ReadVariableRequest(session_id=self.session_id, variable_id=variable_id)
        return self._stub.ReadVariable(request, metadata=self._metadata, timeout=self._timeout_s)


def output_of(tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The value of a parameter that is an output of so many tokens, the likeliest ones."""
    return {"output": {"max_tokens": tokens, **GREEDY, **fields}}


async def context_ids(client: jaxctx.aio.Client, *, programs: bool) -> set[str]:
    """Ids of the contexts that a client sees, with those of programs or without."""
    return {each.id async for each in client.contexts(include_program_contexts=programs)}


async def check_forks_of_a_running_call(caller: ProgramCaller, client: jaxctx.aio.Client, engine_id: str = "") -> None:
    """Fork the context of a call while its output comes, and after it; the forks are the client's own.

    `engine_id` is the engine that the call runs on; empty: any.
    """
    late = (await caller("CreateVariable", name="late")).variable.variable_id
    ids = await caller.call(
        "First {{a}} then {{late}} {{b}}", a=output_of(300), late={"variable_id": late}, b=output_of(6)
    )
    assert [task.context_id for task in (await caller("GetGraph")).tasks] == ["", ""]
    waiting = asyncio.create_task(caller.get(ids["b"]))
    reading = caller.read(ids["a"])
    await reading.read()
    running = (await caller("GetGraph")).tasks[0]
    assert running.phase == pb.TASK_PHASE_STARTED
    assert running.context_id
    assert running.engine_id in (engine_id, running.engine_id if not engine_id else "")
    context = await client.context(running.context_id)
    assert context.engine_id == running.engine_id
    (early,) = await context.fork()

    first = await caller.get(ids["a"])
    done, idle = (await caller("GetGraph")).tasks
    assert (done.phase, done.context_id, idle.context_id) == (pb.TASK_PHASE_DONE, context.id, "")
    (fork,) = await context.fork()
    assert (fork.info.labels, fork.info.parent_id, fork.engine_id) == ({}, context.id, done.engine_id)
    whole = await fork.tokens()
    assert await client.detokenize(whole, skip_special_tokens=True) == "First " + first
    begun = await early.tokens()
    assert begun == whole[: len(begun)]
    assert await context_ids(client, programs=False) == {early.id, fork.id}

    await caller("SetVariable", variable_id=late, text="more")
    last = await waiting
    await fork.fill(" then more ", add_special_tokens=False)  # as the call goes on
    assert str(await fork.complete(max_tokens=6, temperature=0, ignore_eos=True)) == last
    await early.complete(max_tokens=3, temperature=0, ignore_eos=True)
    ended = (await caller("GetGraph")).tasks
    assert [(task.phase, task.context_id) for task in ended] == [(pb.TASK_PHASE_DONE, "")] * 2
    await caller("DeleteSession")
    assert await context_ids(client, programs=False) == {early.id, fork.id}, "they outlive the session"
    assert await fork.tokens()
