"""Durable snapshots on a server whose pages are others: of other weights, another KV type, another page size."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.factory import ServedModel
from jaxctx.model.interface import KVSpec
from tests.e2e.conftest import served
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, oracle, unchanged
from tests.echo import EchoModel
from tests.engines import on_demand

CONFIG = EngineConfig(pages=32, max_batch=4, max_batch_tokens=16, max_context_tokens=256)
PROMPT = THOUSAND[:100]


@dataclass(frozen=True, slots=True)
class OfAnotherType(EchoModel):
    """It says so; its pages are made and read as ever."""

    @property
    def kv(self) -> KVSpec:
        return KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="int32")


@pytest.fixture
def serve(make_engine, tmp_path, clock, echo_served, devices, monkeypatch):
    """A client of a server on the one store. One at a time: all those of one page size share a device."""

    @asynccontextmanager
    async def serve(
        config: EngineConfig = CONFIG, model: ServedModel = echo_served
    ) -> AsyncIterator[jaxctx.aio.Client]:
        if config.page_size != CONFIG.page_size:
            monkeypatch.setitem(devices, (model.revision, config.page_size, ""), on_demand(model, config))
        elif model.revision != echo_served.revision:
            ours = devices[echo_served.revision, config.page_size, ""]
            monkeypatch.setitem(devices, (model.revision, config.page_size, ""), ours)
        engine = make_engine(config, model, store=str(tmp_path))
        async with served(engine, config, clock) as address, jaxctx.aio.Client(address, timeout_s=60) as client:
            yield client

    return serve


@pytest.mark.parametrize("other", ["weights", "KV type", "page size"])
async def test_pages_of_others_are_refused_and_their_tokens_computed(serve, echo_served, other) -> None:
    async with serve() as client:
        await (await filled(client, PROMPT)).save("a", durable=True)
    config, model = CONFIG, echo_served
    match other:
        case "weights":
            model = replace(model, revision="echo-2")
        case "KV type":
            model = replace(model, model=OfAnotherType())
        case "page size":
            config = replace(config, page_size=8, pages=64, max_batch_tokens=8)
    async with serve(config, model) as client:
        async with unchanged(client):
            for refused in (client.open, client.take):
                with pytest.raises(errors.FailedPrecondition) as error:
                    await refused("a")
                assert error.value.reason == "MODEL_MISMATCH"
        context = await client.open("a", recompute=True)
        opened = context.opened
        assert opened is not None
        assert (opened.resident, opened.restored, opened.computed) == (0, 0, 100)
        assert (await context.refresh()).committed_pages == 100 // config.page_size
        assert await greedy(context, 5) == oracle(PROMPT, 5)
        again = await context.save("b", durable=True)
        assert (again.tokens, again.pages) == (105, -(-104 // config.page_size))
        reopened = (await client.open("b")).opened
        assert reopened is not None
        assert reopened.computed == 0, "its own pages it takes"
    async with serve() as client:
        context = await client.open("a")
        opened = context.opened
        assert opened is not None
        assert (opened.resident, opened.restored, opened.computed) == (0, 100, 0), "which are still whole"
        assert await greedy(context, 5) == oracle(PROMPT, 5)
        with pytest.raises(errors.FailedPrecondition) as error:
            await client.open("b")
        assert error.value.reason == "MODEL_MISMATCH"
