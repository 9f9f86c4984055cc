"""RemoteEngine against the fake server of the client's tests.

tests/e2e/test_remote_engine.py has it against a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from jaxctx import convert, errors, types
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import (
    INCARNATION_HEADER,
    MAX_TEXT_BYTES,
    TENANT_HEADER,
    TRACEPARENT_HEADER,
    RemoteEngine,
)
from jaxctx.v1 import context_service_pb2
from tests.certificates import root, write_pair
from tests.connection_forwarder import ConnectionForwarder
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
    assert TRACEPARENT_HEADER not in headers


async def test_a_call_has_the_trace_that_it_is_a_part_of(engine: RemoteEngine, fake: FakeService) -> None:
    await engine.create(Caller("alice", traceparent="a trace"), types.CreateContextRequest(context_id="a"))
    (headers,) = fake.metadata["CreateContext"]
    assert headers[TRACEPARENT_HEADER] == "a trace"


async def test_engine_and_model(engine: RemoteEngine) -> None:
    stats = await engine.stats()
    assert (stats.pages_total, stats.draining) == (10, True)
    assert (engine.info.model_id, engine.info.mesh) == ("fake", {"data": 1, "model": 2})
    assert await engine.clear_cache(ALICE) == 12


async def test_texts_are_tokenised_for_a_tenant_within_its_time(engine: RemoteEngine, fake: FakeService) -> None:
    callers: list[Caller] = []
    call = engine.call

    async def noting(method: Any, caller: Caller, request: Any) -> Any:
        callers.append(caller)
        return await call(method, caller, request)

    engine.call = noting  # type: ignore[method-assign]
    caller = Caller("alice", deadline=time.monotonic() + 60)
    assert await engine.encode(caller, "AB", True) == [65, 66]
    assert callers == [caller]
    (headers,) = fake.metadata["Tokenize"]
    assert headers[TENANT_HEADER] == "alice"


async def test_a_text_that_no_message_holds_is_refused_with_the_limit(engine: RemoteEngine, fake: FakeService) -> None:
    assert MAX_TEXT_BYTES == 2 << 20
    with pytest.raises(errors.InvalidArgument, match=str(MAX_TEXT_BYTES)) as raised:
        await engine.encode(ALICE, "é" * (MAX_TEXT_BYTES // 2) + "e", True)
    assert raised.value.violations[0].field == "prompt"
    assert not fake.requests["Tokenize"]


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
    assert (await engine.switch_adapter(ALICE, "a", "sql")).adapter == "sql"
    assert fake.requests["SwitchAdapter"][0].adapter == "sql"
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


SAMPLING = types.SamplingParams(
    temperature=0.5, top_k=7, seed=3, logit_bias={5: 1.5}, allowed_token_ids=(5, 9), bad_words=("no",)
)


@pytest.mark.parametrize(
    ("request_", "to_proto", "from_proto"),
    [
        (
            types.CreateContextRequest(
                context_id="c",
                salt="s",
                priority=3,
                pinned=True,
                pin_s=2.5,
                ttl=types.Ttl(600.5, sliding=True),
                labels={"a": "b"},
                manual_commit=True,
            ),
            convert.create_context_request_to_proto,
            convert.create_context_request_from_proto,
        ),
        (
            types.CreateContextRequest(),
            convert.create_context_request_to_proto,
            convert.create_context_request_from_proto,
        ),
        (
            types.UpdateContextRequest(ttl=types.Ttl(600, sliding=True)),
            convert.update_context_request_to_proto,
            convert.update_context_request_from_proto,
        ),
        (
            types.UpdateContextRequest(labels={}, priority=0, pinned=False),
            convert.update_context_request_to_proto,
            convert.update_context_request_from_proto,
        ),
        (
            types.GenerateRequest(
                context_id="c", sampling=SAMPLING, stop=["x", "y"], output_format=types.OutputFormat(choices=["a", "b"])
            ),
            convert.generate_request_to_proto,
            convert.generate_request_from_proto,
        ),
        (
            types.GenerateRequest(context_id="c", max_tokens=5, min_tokens=2, stop_token_ids=[4], ignore_eos=True, n=2),
            convert.generate_request_to_proto,
            convert.generate_request_from_proto,
        ),
    ],
)
def test_requests_arrive_as_they_were(
    request_: Any, to_proto: Callable[..., Message], from_proto: Callable[..., Any]
) -> None:
    message = to_proto(request_)
    sent = type(message).FromString(message.SerializeToString())
    assert without_tuples(from_proto(sent)) == without_tuples(request_)


def without_tuples(value: Any) -> Any:
    """The fields of a request, with lists for tuples."""
    if isinstance(value, (list, tuple)):
        return [without_tuples(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: without_tuples(getattr(value, name)) for name in value.__dataclass_fields__}
    return dict(value) if isinstance(value, dict) else value


@pytest.fixture
async def forwarder(serving: FakeServer) -> AsyncIterator[ConnectionForwarder]:
    """What the connections of `forwarded_engine` go through."""
    forwarder = ConnectionForwarder(int(serving.target.rpartition(":")[2]))
    await forwarder.begin()
    yield forwarder
    forwarder.open.set()
    await forwarder.end()


@pytest.fixture
async def forwarded_engine(forwarder: ConnectionForwarder) -> AsyncIterator[RemoteEngine]:
    """An engine that has answered, and can be cut off."""
    engine = RemoteEngine(f"127.0.0.1:{forwarder.port}", "incarnation-1", "secret", time.monotonic)
    await engine.stats()
    engine._silence_s = 0.1
    yield engine
    await engine.aclose()


async def until_under_way(engine: RemoteEngine) -> None:
    """Wait until a call to the engine has begun."""
    async with asyncio.timeout(10):
        while not engine._calls:
            await asyncio.sleep(0)


async def test_calls_end_when_the_engine_is_taken_for_lost(
    forwarded_engine: RemoteEngine, forwarder: ConnectionForwarder
) -> None:
    forwarder.open.clear()
    creating = asyncio.create_task(forwarded_engine.create(ALICE, types.CreateContextRequest()))
    await until_under_way(forwarded_engine)
    forwarded_engine.end_calls()
    with pytest.raises(errors.Unavailable) as raised:
        await asyncio.wait_for(creating, 10)
    assert raised.value.reason == "ENGINE_LOST"


async def test_calls_go_on_when_the_load_is_not_told_or_asking_for_it_is_cancelled(
    forwarded_engine: RemoteEngine, forwarder: ConnectionForwarder
) -> None:
    """Who asks decides whether the engine is lost: the call of an operator that is cancelled says nothing of it."""
    forwarder.open.clear()
    creating = asyncio.create_task(forwarded_engine.create(ALICE, types.CreateContextRequest()))
    await until_under_way(forwarded_engine)
    with pytest.raises(errors.DeadlineExceeded):
        await forwarded_engine.stats()
    forwarded_engine._silence_s = 60.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(forwarded_engine.stats(), 0.1)
    forwarder.open.set()
    info = await asyncio.wait_for(creating, 10)
    assert info.context_id


async def test_the_load_is_told_however_many_calls_run() -> None:
    """A connection has no more streams than the server takes calls."""
    server = FakeServer("127.0.0.1:0", options=[("grpc.max_concurrent_streams", 2)])
    server.fake.stalls = True
    engine = RemoteEngine(server.target, "incarnation-1", "secret", time.monotonic, silence_s=10.0)
    try:
        outputs = []
        for context_id in ("a", "b"):
            server.fake.contexts[context_id] = [1]
            outputs.append(engine.generate(ALICE, types.GenerateRequest(context_id=context_id)))
            await anext(outputs[-1])
        assert (await engine.stats()).pages_total == 10
        waiting = asyncio.create_task(engine.create(ALICE, types.CreateContextRequest()))
        assert (await engine.stats()).pages_total == 10
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        await engine.aclose()
        for output in outputs:
            with pytest.raises(errors.Unavailable):
                await anext(output)
    finally:
        await engine.aclose()
        server.server.stop(None).wait()


async def test_an_engine_that_takes_no_calls_is_lost_though_it_tells_its_load(engine: RemoteEngine) -> None:
    refusing = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{refusing.sockets[0].getsockname()[1]}"
    refused = RemoteEngine(address, "incarnation-1", "secret", time.monotonic)
    refused._heartbeats = engine._heartbeats  # which come to a server that answers
    async with asyncio.timeout(30):
        with pytest.raises(errors.Unavailable) as raised:
            while True:  # until the first connection has failed
                await refused.stats()
                await asyncio.sleep(0.01)
    assert raised.value.reason == "ENGINE_LOST"
    await refused.aclose()
    refusing.close()


async def test_renewed_credentials_are_taken_when_the_old_ones_make_no_connection_any_more(tmp_path: Path) -> None:
    """The server ends each connection after a while, so that the next one has the certificate of its time."""
    pairs = {name: write_pair(tmp_path / name, name) for name in ("old", "new")}
    certificates = {
        name: grpc.ssl_server_certificate_configuration([(pair.key.read_bytes(), pair.cert.read_bytes())])
        for name, pair in pairs.items()
    }
    roots = {name: grpc.ssl_channel_credentials(root(name).cert_pem.bytes()) for name in pairs}
    served = trusted = "old"
    credentials = grpc.dynamic_ssl_server_credentials(certificates["old"], lambda: certificates[served], False)
    server = FakeServer("127.0.0.1:0", credentials, [("grpc.max_connection_age_ms", 100)])
    engine = RemoteEngine(server.target, "i", "secret", time.monotonic, credentials=lambda: roots[trusted])
    try:
        server.fake.contexts["a"] = [1]
        server.fake.stalls = True
        output = engine.generate(ALICE, types.GenerateRequest(context_id="a"))
        text = (await anext(output)).text
        served = "new"
        async with asyncio.timeout(30):
            with pytest.raises(errors.Unavailable) as raised:
                while True:
                    await engine.stats()
                    await asyncio.sleep(0.01)
            assert raised.value.reason == "ENGINE_LOST"
            trusted = "new"
            assert (await engine.stats()).pages_total == 10
            assert (await engine.create(ALICE, types.CreateContextRequest())).context_id
            await engine.stats()
            assert len(engine._replaced) == 1, "a call goes on over the channel before"
            server.fake.stalls = False
            async for piece in output:
                text += piece.text
        assert text == "abcdef"
        await engine.stats()
        assert engine._replaced == []
    finally:
        await engine.aclose()
        server.server.stop(None).wait()


async def test_a_cancelled_caller_is_cancelled_though_its_engine_falls_silent_at_that_moment(
    forwarded_engine: RemoteEngine, forwarder: ConnectionForwarder
) -> None:
    forwarder.open.clear()
    creating = asyncio.create_task(forwarded_engine.create(ALICE, types.CreateContextRequest()))
    await until_under_way(forwarded_engine)
    forwarded_engine.end_calls()
    creating.cancel()
    await asyncio.wait([creating], timeout=10)
    assert creating.cancelled()
