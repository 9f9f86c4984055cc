"""Many clients at once: correct streams, vanishing clients, and neighbours who notice nothing."""

import asyncio
from dataclasses import replace

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.v1 import admin_service_pb2_grpc, model_service_pb2_grpc, snapshot_service_pb2_grpc
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import context_service_pb2_grpc as stubs
from tests.e2e.echo_contexts import oracle, wait_until_idle
from tests.server.validate.requests import METHODS, out_of_range_cases, request_with

CONFIG = EngineConfig(pages=256, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)
STUBS = {
    "ContextService": stubs.ContextServiceStub,
    "ModelService": model_service_pb2_grpc.ModelServiceStub,
    "AdminService": admin_service_pb2_grpc.AdminServiceStub,
    "SnapshotService": snapshot_service_pb2_grpc.SnapshotServiceStub,
}


class TestManyStreams:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(pages=512, max_batch=32, max_batch_tokens=64, max_context_tokens=1536)

    async def test_two_hundred_concurrent_streams(self, client: jaxctx.aio.Client, engine: LocalEngine) -> None:
        prompts = [[k % 256, k // 256, 3] * (1 + k % 7) for k in range(200)]

        async def one(prompt: list[int]) -> list[int]:
            async with await client.create() as context:
                await context.fill(tokens=prompt)
                stream = context.generate(max_tokens=24, temperature=0)
                return [token async for piece in stream for token in piece.token_ids]

        results = await asyncio.gather(*[one(prompt) for prompt in prompts])
        assert results == [oracle(prompt, 24) for prompt in prompts]
        stats = await engine.stats()
        assert (stats.pages_held, stats.contexts, stats.compilations_after_ready) == (0, 0, 0)


@pytest.mark.parametrize("phase", ["fill", "first piece", "midway", "n outputs"])
async def test_a_client_that_vanishes_leaves_nothing_running(
    address: str, engine: LocalEngine, client: jaxctx.aio.Client, phase: str
) -> None:
    """The connection breaks; nothing is cancelled politely."""
    neighbour = await client.create()
    await neighbour.fill(tokens=[7] * 30)
    quiet = asyncio.create_task(neighbour.complete(max_tokens=150, temperature=0))
    channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    service = stubs.ContextServiceStub(channel)
    await service.CreateContext(pb.CreateContextRequest(context_id="gone"))
    tokens = [(5 * i) % 256 for i in range(1000)]
    fill = service.Fill(pb.FillRequest(context_id="gone", tokens={"ids": tokens}))
    if phase == "fill":
        waiting = asyncio.ensure_future(fill)
        while not waiting.done() and (await engine.stats()).running < 2:
            await asyncio.sleep(0.001)
    else:
        await fill
        request = pb.GenerateRequest(context_id="gone", max_tokens=400, n=3 if phase == "n outputs" else 1)
        stream = service.Generate(request)
        waiting = asyncio.ensure_future(stream.read())
        if phase != "first piece":
            await waiting
            await stream.read()
    await channel.close(grace=None)
    await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(400):
        if (await engine.stats()).running <= 1:
            break
        await asyncio.sleep(0.005)
    assert list((await quiet).token_ids) == oracle([7] * 30, 150)
    await wait_until_idle(engine)
    # The context itself outlives its connection; the forks of a broken request do not, nobody knows their names.
    survivor = await client.context("gone")
    kept = await survivor.tokens()
    assert kept[:1000] == tokens[: len(kept)]
    assert {context.id async for context in client.contexts()} == {"gone", neighbour.id}
    await survivor.close()
    await neighbour.close()
    assert (await engine.stats()).pages_held == 0


async def test_a_deadline_ends_a_stream_and_frees_its_slot(client: jaxctx.aio.Client, engine: LocalEngine) -> None:
    context = await client.create()
    await context.fill(tokens=[1] * 30)
    tokens: list[int] = []
    with pytest.raises(errors.DeadlineExceeded):
        async for piece in context.generate(max_tokens=1400, temperature=0, timeout_s=0.2):
            tokens += piece.token_ids
    await wait_until_idle(engine)
    assert tokens == oracle([1] * 30, len(tokens))
    assert (await context.tokens())[: 30 + len(tokens)] == [1] * 30 + tokens


class TestBadRequests:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        """With the limits that the table of bad requests was written for."""
        return replace(CONFIG, queue_limit=64, default_max_tokens=16)

    async def test_a_neighbours_stream_is_unchanged_by_every_request_with(
        self, client: jaxctx.aio.Client, address: str, engine: LocalEngine
    ) -> None:
        """Every field of every method out of its range, beside a stream that must not notice."""
        context = await client.create()
        await context.fill(tokens=[7] * 30)
        quiet = asyncio.create_task(context.complete(max_tokens=400, temperature=0))
        other = await client.create(context_id="a")
        await other.fill(tokens=[9] * 30)
        before = await other.refresh()
        async with grpc.aio.insecure_channel(address) as channel:
            for case in out_of_range_cases():
                name, path, value, _ = case.values
                service, method = METHODS[name]
                call = getattr(STUBS[service](channel), method.name)(request_with(name, path, value))
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await (call.read() if method.server_streaming else call)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, case.id
        assert list((await quiet).token_ids) == oracle([7] * 30, 400)
        assert await other.refresh() == before
