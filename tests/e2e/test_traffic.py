"""Whatever is asked, nothing compiles once the server is ready, and every request ends: answered, or with an error of
ours that is no defect. The quick suite sends 200 requests, the campaign 10,000 to each of two models.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel
from jaxctx.errors import NotFound
from jaxctx.model.config import ModelConfig
from scripts.checkpoints import init_random
from tests.e2e.echo_contexts import wait_until_idle

from .traffic import VOCABULARY, Visitor

COMPILING = "/jax/core/compile/backend_compile_duration"
TRANSFORMER = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCABULARY,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    max_positions=2048,
    query_key_norm="head",
)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Those of all threads, until the block ends."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == COMPILING:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def incidents_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Where a request meets a defect, the failure shows its traceback."""
    caplog.set_level(logging.DEBUG, "jaxctx.server")


@pytest.fixture(params=["echo"])
def model(request, echo_served: ServedModel) -> ServedModel:
    """A model with the echo model's text."""
    if request.param == "echo":
        return echo_served
    transformer, params = init_random(TRANSFORMER, seed=0)
    return replace(echo_served, model=transformer, params=params, revision="transformer", dtype=transformer.dtype)


@pytest.fixture
def engine_config() -> EngineConfig:
    """Too few pages and slots for all visitors, and tiers for what has to leave."""
    return EngineConfig(
        pages=200,
        max_batch=8,
        max_batch_tokens=64,
        max_context_tokens=1024,
        host_pages=100,
        disk_pages=200,
        snapshot_history=3,
    )


@pytest.fixture
def engine(make_engine, engine_config, model, tmp_path) -> LocalEngine:
    return make_engine(engine_config, model, store=str(tmp_path / "store"))


async def traffic(client: jaxctx.aio.Client, engine: LocalEngine, requests: int, visitors: int) -> Counter:
    """How the requests ended, by kind. Afterwards nothing is running and nothing is held."""
    endings: Counter[tuple[str, str]] = Counter()
    longest = engine.info.max_context_tokens
    each = -(-requests // visitors)
    assert compiled_once() == [COMPILING] * 2, "compilations are not seen, or the listener hears them twice"
    with compilations() as found:
        await asyncio.gather(*[Visitor(client, seed, longest, endings).run(each) for seed in range(visitors)])
        await wait_until_idle(engine)
    stats = await engine.stats()
    assert (stats.compilations_after_ready, found) == (0, [])
    async for context in client.contexts():
        await context.close()
    async for snapshot in client.snapshots():
        await client.delete_snapshot(snapshot.name)
    for publication in await client.publications():  # of a request that was given up
        await client.unpublish(publication.publication_id)
    await wait_until_idle(engine)
    assert (await engine.stats()).pages_held == 0
    return endings


def compiled_once() -> list[str]:
    """What is seen of two functions that are new."""
    with compilations() as found:
        for shift in range(2):
            jax.jit(lambda x, shift=shift: x + shift)(1.5).block_until_ready()
    return found


def check_mix(endings: Counter, *, everything: bool) -> None:
    """That this was the mix it claims to be: most were answered, and so were some of each kind."""
    answered = {kind for kind, ending in endings if ending == "answer"}
    assert sum(endings[kind, "answer"] for kind in answered) > endings.total() / 2, endings
    assert not everything or answered >= {kind for kind, _ in endings}, endings
    assert not everything or {ending for _, ending in endings} >= {
        *("answer", "given up", "InvalidArgument", "OutOfRange", "FailedPrecondition", "NotFound", "DeadlineExceeded"),
        *("AlreadyExists", "Aborted"),
    }, endings


async def test_two_hundred_requests(client: jaxctx.aio.Client, engine: LocalEngine) -> None:
    endings = await traffic(client, engine, 200, visitors=10)
    assert endings.total() >= 200
    check_mix(endings, everything=False)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["echo", "transformer"], indirect=True)
async def test_ten_thousand_requests(client: jaxctx.aio.Client, engine: LocalEngine) -> None:
    endings = await traffic(client, engine, 10_000, visitors=24)
    assert endings.total() >= 10_000
    check_mix(endings, everything=True)
    stats = await engine.stats()
    assert stats.suspensions > 0
    assert stats.tokens_restored > 0


# --- found by it -----------------------------------------------------------------------------------------------------


async def test_a_save_that_fails_takes_nobody_elses_place(client: jaxctx.aio.Client, engine: LocalEngine) -> None:
    """As long as their versions are not known, saves look alike."""
    alive = [await client.create(tokens=[k, 7, 7]) for k in range(10)]
    gone = [await client.create(tokens=[k, 8, 8]) for k in range(10)]
    for context in gone:
        await context.close()
    saves = [each.save(each.id) for pair in zip(alive, gone, strict=True) for each in pair]
    results = await asyncio.gather(*saves, return_exceptions=True)
    assert [getattr(result, "name", type(result)) for result in results[::2]] == [context.id for context in alive]
    assert {type(result) for result in results[1::2]} == {NotFound}
