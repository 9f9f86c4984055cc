"""Tenants do not see each other's activity: all that one is told is the same, be the server busy with another or not.

The same calls of a tenant are made twice, alone and beside a busy neighbour, and every answer is compared, errors too.
Clocks stand still and seeds are given; ids that the server draws at random are compared by where they come again.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from jaxctx.engine.config import EngineConfig
from jaxctx.rpc import SERVICES, from_rpc_error
from jaxctx.v1 import context_service_pb2, model_service_pb2, session_service_pb2, snapshot_service_pb2
from jaxctx.v1.generation_pb2 import SamplingParams
from tests.e2e.conftest import CONFIG, served
from tests.engines import Clock

SEEN_BY_TENANTS = ("ContextService", "SnapshotService", "SessionService", "ModelService")
MODULES = (context_service_pb2, snapshot_service_pb2, session_service_pb2, model_service_pb2)
DRAWN = re.compile(r"\b(?:(?:pub_)?c\d{6}|[0-9a-f]{32})\b")  # ids that nobody can guess in a server that is no test's
GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(temperature=1, seed=7)
PROMPT = [token % 250 for token in range(3, 90)]
AT = 1_700_000_000.0


class Still(Clock):
    """The time of day stands still."""

    def wall(self) -> float:
        return AT + self.offset


@pytest.fixture
def clock() -> Clock:
    return Still()


class Tenant:
    """Calls of the contract with a key, and what was told. `before` runs ahead of each."""

    def __init__(self, channel: grpc.aio.Channel, key: str, before: Callable[[], Any] | None = None) -> None:
        self.told: list[str] = []
        self.called: set[str] = set()
        self.refused: set[str] = set()  # why, by reason
        self._channel, self._before = channel, before
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._drawn: dict[str, str] = {}

    async def __call__(self, method: str, **fields: Any) -> Any:
        """The answer, or the error; a stream's as a list."""
        if self._before is not None:
            await self._before()
        call = self.begin(method, **fields)
        answer: Any
        try:
            answer = [each async for each in call] if hasattr(call, "__aiter__") else await call
        except grpc.aio.AioRpcError as error:
            answer = from_rpc_error(error)
            self.refused.add(answer.reason)
        self.tell(method, answer)
        return answer

    def begin(self, method: str, **fields: Any) -> Any:
        module = next(each for each in MODULES if hasattr(each, f"{method}Request"))
        service = next(each for each in SERVICES.values() if method in each.methods_by_name)
        kind, found = getattr(module, f"{method}Request"), service.methods_by_name[method]
        self.called.add(method)
        begun = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        response = getattr(module, f"{method}Response")
        begun = begun(f"/{service.full_name}/{method}", kind.SerializeToString, response.FromString)
        return begun(kind(**fields), metadata=self._metadata, timeout=120)

    def tell(self, method: str, answer: Any) -> None:
        """Remember what was told."""
        if method == "ListVariables":  # in the order of ids that were drawn
            answer = sorted(answer.variables, key=lambda variable: (variable.name, variable.state))
        if isinstance(answer, list) and answer and hasattr(answer[0], "token_ids"):
            answer = whole(answer)
        elif method == "ReadVariable" and isinstance(answer, list):
            answer = "".join(each.text for each in answer)
        elif isinstance(answer, Exception):
            answer = f"{answer!r} {vars(answer)}"
        text = "\n".join(map(str, answer)) if isinstance(answer, list) else str(answer)
        drawn = self._drawn
        self.told.append(f"{method}: " + DRAWN.sub(lambda id: drawn.setdefault(id[0], f"<{len(drawn)}>"), text))


def whole(pieces: list[Any]) -> list[Message]:
    """Each output's parts as one: how many come at once depends on how soon they are read."""
    outputs: dict[int, Any] = {}
    for piece in pieces:
        if piece.index in outputs:
            text = outputs[piece.index].text + piece.text
            outputs[piece.index].MergeFrom(piece)
            outputs[piece.index].text = text
        else:
            outputs[piece.index] = piece
    return [outputs[index] for index in sorted(outputs)]


async def life(me: Tenant) -> None:
    """Every method that tells a tenant anything, and some mistakes."""
    for context_id in ("a", "b"):
        await me("CreateContext", context_id=context_id, labels={"k": context_id})
    events = me.begin("WatchContexts")
    me.tell("WatchContexts", [await events.read(), await events.read()])
    await me("CreateContext", context_id="a")
    await me("Fill", context_id="a", tokens={"ids": PROMPT})
    await me("GetContext", context_id="a", include_pages=True, include_tokens=True)
    await me("Fill", context_id="b", tokens={"ids": [*PROMPT[:64], 1, 2, 3]})
    await me("GetContext", context_id="b", include_pages=True)
    await me("Compare", a="a", b="b")
    await me("Plan", tokens={"ids": PROMPT})
    await me("Plan", context_id="b", text="hello")
    await me("Fork", context_id="a", child_ids=["c", "d"])
    await me("GetContext", context_id="c", include_pages=True, include_ancestors=True)
    await me("Fill", context_id="c", text="more", defer=True)
    await me("Flush", context_id="c")
    await me("Generate", context_id="c", max_tokens=20, sampling=SEEDED, ignore_eos=True)
    await me("Generate", context_id="a", max_tokens=5, n=2, sampling=SEEDED, logprobs=True)
    await me("Forward", context_id="d", tokens=[5, 6, 7], outputs=[{"index": len(PROMPT) + 2, "top": 3}])
    await me("Rewind", context_id="c", to=70)
    await me("Truncate", context_id="c", tokens=2)
    await me("Truncate", context_id="c", tokens=1000)
    await me("SwitchAdapter", context_id="c")
    await me("SwitchAdapter", context_id="c", adapter="nobody")
    await me("CreateContext", context_id="m", manual_commit=True)
    await me("ReservePages", context_id="m", pages=4)
    await me("Fill", context_id="m", tokens={"ids": PROMPT[:40]})
    for pages in (3, 2, 9):
        await me("CommitPages", context_id="m", pages=pages)
    await me("GetContext", context_id="m", include_pages=True)
    await me("ReleasePages", context_id="m", pages=1)
    await me("ReleasePages", context_id="m", pages=9)
    await me("ReservePages", context_id="m", pages=100_000)
    await me("Fill", context_id="m", tokens={"ids": PROMPT[:30]})
    await me("GetContext", context_id="m", include_pages=True)
    await me("UpdateContext", context_id="m", priority=3, pinned=True, ttl={"duration": {"seconds": 60}})
    await me("UpdateContext", context_id="m", pinned=False)

    for overwrite in (None, None, 1):
        await me("Save", context_id="a", name="n", overwrite_version=overwrite)
    await me("Save", context_id="b", name="kept", durable=True, labels={"k": "v"})
    await me("Save", context_id="m", name="once")
    await me("GetSnapshot", name="n")
    await me("ListSnapshots")
    await me("ListSnapshotVersions", name="n")
    await me("UpdateSnapshot", name="kept", ttl={"duration": {"seconds": 60}})
    await me("Open", name="kept", context_id="opened")
    await me("Take", name="once", context_id="taken")
    await me("Take", name="once", context_id="again")
    await me("GetContext", context_id="opened", include_pages=True)
    await me("GetContext", context_id="taken", include_pages=True)
    await me("DeleteSnapshot", name="n")
    await me("GetSnapshot", name="theirs")
    published = await me("Publish", context_id="b")
    await me("GetContext", context_id="b", include_pages=True)
    await me("ListPublications")
    own = published.publication.publication_id
    await me("UpdatePublication", publication_id=own, ttl={"duration": {"seconds": 60}})
    await me("Unpublish", publication_id=own)

    for context_id in ("a", "c", "d", "theirs"):
        await me("CloseContext", context_id=context_id)
    await me("GetContext", context_id="a")
    await me("CreateContext", context_id="a")
    await me("Fill", context_id="a", tokens={"ids": [*PROMPT, 9]})
    await me("GetContext", context_id="a", include_pages=True)
    for number in range(3):  # pages that come and go
        await me("CreateContext", context_id=f"short{number}")
        await me("Fill", context_id=f"short{number}", tokens={"ids": [number] * 20})
        await me("GetContext", context_id=f"short{number}", include_pages=True)
        await me("CloseContext", context_id=f"short{number}")
    await me("ListContexts")
    events.cancel()

    await me("CreateSession", session_id="s")
    variable = (await me("CreateVariable", session_id="s", name="v")).variable.variable_id
    await me("SetVariable", session_id="s", variable_id=variable, text="some text")
    settings = {"sampling": GREEDY, "max_tokens": 12, "ignore_eos": True}
    parameters = [{"name": "v", "variable_id": variable}, {"name": "o", "output": settings}]
    template = "It was said {{v}} and so {{o}}"
    call = await me("SubmitCall", session_id="s", template=template, parameters=parameters)
    output = call.outputs[0].variable_id
    await me("ReadVariable", session_id="s", variable_id=output, criterion=1)
    await me("GetVariable", session_id="s", variable_id=output, wait=True)
    await me("ListVariables", session_id="s")
    await me("GetGraph", session_id="s")
    idle = await me("SubmitCall", session_id="s", template=template, parameters=parameters)
    await me("CancelCall", session_id="s", call_id=idle.call_id)
    await me("GetSession", session_id="s")
    await me("GetSession", session_id="theirs")
    await me("ListSessions")
    await me("DeleteSession", session_id="s")

    await me("ListModels")
    await me("GetModel", model_id="echo")
    await me("Tokenize", text="hello")
    await me("Detokenize", tokens=[104, 105])
    await me("ApplyChatTemplate", messages={"messages": [{"role": "user", "content": "hi"}]})


def neighbour(them: Tenant) -> Callable[[], Any]:
    """What a busy tenant does between any two calls of another: pages, versions and ids come and go."""
    rounds = itertools.count()

    async def once() -> None:
        number, name = next(rounds), "n"
        await them("CreateContext", context_id="theirs")
        await them("Fill", context_id="theirs", tokens={"ids": [*PROMPT, number % 3]})  # also what the other one fills
        await them("Fork", context_id="theirs", n=1 + number % 3)
        await them("ReservePages", context_id="theirs", pages=1 + number % 4)
        version = (await them("ListSnapshots")).snapshots
        await them("Save", context_id="theirs", name=name, overwrite_version=version[0].version if version else None)
        if number % 4 == 0:
            await them("Save", context_id="theirs", name=f"theirs{number}", durable=True)
            await them("CreateSession", session_id=f"theirs{number}")
        if number % 3:
            await them("CloseContext", context_id="theirs")
            for context in (await them("ListContexts")).contexts:
                if context.context_id != "long":
                    await them("CloseContext", context_id=context.context_id)
        them.told.clear()

    return once


@asynccontextmanager
async def beside(them: Tenant) -> AsyncIterator[None]:
    """A neighbour who generates all the time."""
    await them("CreateContext", context_id="long")
    await them("Fill", context_id="long", text="it goes on and on")

    async def generate() -> None:
        while True:
            await them("Generate", context_id="long", max_tokens=100, sampling=GREEDY, ignore_eos=True)
            await them("Rewind", context_id="long", to=10)

    generating = asyncio.create_task(generate())
    yield
    generating.cancel()


@pytest.mark.slow
async def test_a_tenant_is_told_the_same_beside_a_busy_one(make_engine: Any, clock: Clock, two_tenants: Any) -> None:
    config: EngineConfig = replace(CONFIG, pages=512)
    lifecycle = []
    for busy in (False, True):
        engine = make_engine(config, store="memory://", device=f"busy {busy}", whole=False)
        async with (
            served(engine, config, clock, two_tenants) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            them = Tenant(channel, "bob")
            me = Tenant(channel, "alice", neighbour(them) if busy else None)
            if busy:
                async with beside(them):
                    await life(me)
                assert them.refused <= {"ALREADY_EXISTS"}, "it had what it asked for"
            else:
                await life(me)
        lifecycle.append(me.told)
        assert me.called == {method for service in SEEN_BY_TENANTS for method in SERVICES[service].methods_by_name}
    assert set(SERVICES) - set(SEEN_BY_TENANTS) == {"AdminService", "EngineService"}, "others than tenants' own"
    for alone, beside_another in zip(*lifecycle, strict=True):
        assert alone == beside_another
