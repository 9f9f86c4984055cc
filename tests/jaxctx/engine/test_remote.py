"""RemoteEngine against the fake server of the client's tests; tests/e2e/test_cluster.py has it against real engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from jaxctx import errors, types
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import INCARNATION_HEADER, TENANT_HEADER, RemoteEngine
from jaxctx.v1 import context_service_pb2
from tests.jaxctx.client.fake_server import FakeServer, FakeService

ALICE = Caller("alice")


@pytest.fixture
def serving() -> Iterator[FakeServer]:
    serving = FakeServer("127.0.0.1:0")
    yield serving
    serving.server.stop(None).wait()


@pytest.fixture
def fake(serving: FakeServer) -> FakeService:
    return serving.fake


@pytest.fixture
async def engine(serving: FakeServer) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(serving.target, "incarnation-1", "secret", time.monotonic)
    yield engine
    await engine.aclose()


async def test_every_call_has_the_key_the_incarnation_and_the_tenant(engine: RemoteEngine, fake: FakeService) -> None:
    await engine.create(ALICE, types.CreateContextRequest(context_id="a"))
    (headers,) = fake.metadata["CreateContext"]
    assert headers["authorization"] == "Bearer secret"
    assert (headers[INCARNATION_HEADER], headers[TENANT_HEADER]) == ("incarnation-1", "alice")


async def test_engine_and_model(engine: RemoteEngine) -> None:
    stats = await engine.stats()
    assert (stats.pages_total, stats.draining) == (10, True)
    assert (engine.info.model_id, engine.info.mesh) == ("fake", {"data": 1, "model": 2})
    assert await engine.clear_cache(ALICE) == 12
    assert await engine.encode("AB", True) == [65, 66]


async def test_contexts(engine: RemoteEngine, fake: FakeService) -> None:
    created = await engine.create(ALICE, types.CreateContextRequest(context_id="a", ttl=types.Ttl(60.0)))
    assert (created.context_id, created.seq_len) == ("a", 0)
    assert fake.requests["CreateContext"][0].ttl.duration.seconds == 60
    filled = await engine.fill(ALICE, "a", [1, 2, 3, 4, 5])
    assert (filled.resident, filled.restored, filled.computed) == (1, 2, 2)
    await engine.fill(ALICE, "a", [6], defer=True)
    assert fake.requests["Fill"][-1].defer
    assert (await engine.fill(ALICE, "a")).computed == 1
    assert len(fake.requests["Flush"]) == 1
    assert (await engine.rewind(ALICE, "a", 2)).seq_len == 2
    await engine.update(ALICE, "a", types.UpdateContextRequest(priority=7, labels={}))
    update = fake.requests["UpdateContext"][0]
    assert (update.context_id, update.priority, update.HasField("labels"), update.HasField("ttl")) == (
        "a",
        7,
        True,
        False,
    )
    inspected = await engine.inspect(ALICE, "a", include_tokens=True)
    assert inspected.tokens == types.TokenIds(ids=(1, 2))
    assert inspected.pages is None
    await engine.create(ALICE, types.CreateContextRequest(context_id="b"))
    assert [info.context_id for info in await engine.list(ALICE, "", 10)] == ["a", "b"]
    assert [info.context_id for info in await engine.list(ALICE, "a", 10, include_program_contexts=True)] == ["b"]
    assert fake.requests["ListContexts"][-1].include_program_contexts
    await engine.close(ALICE, "a")
    with pytest.raises(errors.NotFound):
        await engine.close(ALICE, "a")


async def test_generation(engine: RemoteEngine, fake: FakeService) -> None:
    await engine.create(ALICE, types.CreateContextRequest(context_id="a"))
    await engine.fill(ALICE, "a", [1])
    request = types.GenerateRequest(context_id="a", max_tokens=6, sampling=types.SamplingParams(temperature=0.0))
    pieces = [piece async for piece in engine.generate(ALICE, request)]
    assert "".join(piece.text for piece in pieces) == "abcdef"
    assert pieces[-1].finish is not None
    sent = fake.requests["Generate"][0]
    assert (sent.max_tokens, sent.sampling.temperature, sent.sampling.HasField("temperature")) == (6, 0.0, True)


async def test_snapshots(engine: RemoteEngine, fake: FakeService) -> None:
    await engine.create(ALICE, types.CreateContextRequest(context_id="a"))
    await engine.fill(ALICE, "a", [1, 2])
    saved = await engine.save(ALICE, types.SaveRequest(context_id="a", name="n", durable=True))
    assert (saved.name, saved.version) == ("n", 1)
    assert fake.requests["Save"][0].durable
    taken = await engine.take(ALICE, types.OpenRequest(name="n", context_id="b", pinned=True, pin_s=5.0))
    assert taken.context.context_id == "b"
    assert fake.requests["Take"][0].pin_for.seconds == 5
    await engine.save(ALICE, types.SaveRequest(context_id="a", name="n"))
    assert await engine.delete_snapshot(ALICE, "n") == 1
    with pytest.raises(errors.NotFound):
        await engine.delete_snapshot(ALICE, "n")


async def test_messages_that_are_passed_on_as_they_are(engine: RemoteEngine, fake: FakeService) -> None:
    fake.contexts["a"] = [1]
    request = context_service_pb2.GetContextRequest(context_id="a")
    response = await engine.call(engine.contexts.GetContext, ALICE, request)
    assert response.context.seq_len == 1
    async with engine.started(
        engine.contexts.Generate, ALICE, context_service_pb2.GenerateRequest(context_id="a")
    ) as call:
        assert "".join([response.text async for response in call]) == "abcdef"


async def test_errors_of_the_engine_are_raised(engine: RemoteEngine, fake: FakeService) -> None:
    fake.fail_before["CreateContext"] = [errors.ResourceExhausted("full", retry_after_s=2.0)]
    with pytest.raises(errors.ResourceExhausted) as raised:
        await engine.create(ALICE, types.CreateContextRequest())
    assert (raised.value.reason, raised.value.retry_after_s) == ("OUT_OF_PAGES", 2.0)


async def test_the_deadline_of_the_caller(engine: RemoteEngine, fake: FakeService) -> None:
    fake.contexts["a"] = [1]
    fake.stalls = True
    request = types.GenerateRequest(context_id="a")
    with pytest.raises(errors.DeadlineExceeded):
        async for _ in engine.generate(Caller("alice", time.monotonic() + 0.2), request):
            pass


async def is_lost(engine: RemoteEngine) -> bool:
    with pytest.raises(errors.Unavailable) as raised:
        await engine.create(ALICE, types.CreateContextRequest())
    return raised.value.reason == "ENGINE_LOST"


async def test_an_engine_that_is_closed_or_not_there_is_lost(engine: RemoteEngine, serving: FakeServer) -> None:
    serving.server.stop(None).wait()
    assert await is_lost(engine)
    await engine.aclose()
    assert await is_lost(engine)


async def test_calls_under_way_end_when_the_engine_is_closed(engine: RemoteEngine, fake: FakeService) -> None:
    fake.contexts["a"] = [1]
    fake.stalls = True

    async def read() -> list[Any]:
        return [piece async for piece in engine.generate(ALICE, types.GenerateRequest(context_id="a"))]

    reading = asyncio.create_task(read())
    await asyncio.to_thread(fake.started.wait, 10)
    await engine.aclose()
    with pytest.raises(errors.Unavailable) as raised:
        await reading
    assert raised.value.reason == "ENGINE_LOST"
