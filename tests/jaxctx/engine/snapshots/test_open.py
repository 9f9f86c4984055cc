"""Opening: where the pages come from, what a take leaves, and what is left of an open that fails."""

from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import AlreadyExists, DataLoss, NotFound
from jaxctx.types import CreateContextRequest, OpenRequest, SaveRequest, Ttl
from tests.engines import SMALL, tokens_of

ME = Caller()
TOKENS = list(range(1, 71))


@pytest.fixture
def stored(make_engine: Any, tmp_path: Any) -> LocalEngine:
    """An engine with a store."""
    engine: LocalEngine = make_engine(SMALL, store=str(tmp_path), whole=False)
    return engine


async def save(engine: LocalEngine, name: str, **options: Any) -> None:
    context_id = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, context_id, TOKENS)
    await engine.save(ME, SaveRequest(context_id=context_id, name=name, **options))
    await engine.close(ME, context_id)


async def test_pages_of_a_stored_snapshot_come_from_the_store(stored: LocalEngine) -> None:
    await save(stored, "a", durable=True)
    await stored.clear_cache(ME)
    opened = await stored.open(ME, OpenRequest(name="a", context_id="mine"))
    assert (opened.resident, opened.restored, opened.computed) == (0, 70, 0)
    assert opened.context.context_id == "mine"
    assert await tokens_of(stored, "mine") == TOKENS
    again = await stored.open(ME, OpenRequest(name="a"))
    assert (again.resident, again.restored, again.computed) == (64, 6, 0), "what is on the device is not read again"


async def test_a_snapshot_in_memory_is_forked(engine: LocalEngine) -> None:
    await save(engine, "a")
    opened = await engine.open(ME, OpenRequest(name="a"))
    assert (opened.resident, opened.restored, opened.computed) == (70, 0, 0)
    assert await tokens_of(engine, opened.context.context_id) == TOKENS


@pytest.mark.parametrize("durable", [False, True])
async def test_a_take_leaves_no_name_and_an_open_leaves_it(stored: LocalEngine, durable: bool) -> None:
    await save(stored, "a", durable=durable)
    await stored.open(ME, OpenRequest(name="a"))
    await stored.take(ME, OpenRequest(name="a"))
    for call in (stored.take(ME, OpenRequest(name="a")), stored.open(ME, OpenRequest(name="a"))):
        with pytest.raises(NotFound) as error:
            await call
        assert error.value.reason == "SNAPSHOT_NOT_FOUND"
    assert len(await stored.list(ME)) == 2


@pytest.mark.parametrize("sliding", [False, True])
async def test_an_open_is_a_use_of_a_sliding_snapshot(engine: LocalEngine, clock, sliding: bool) -> None:
    await save(engine, "a", ttl=Ttl(100, sliding))
    clock.offset += 60
    await engine.open(ME, OpenRequest(name="a"))
    clock.offset += 60
    if sliding:
        assert (await engine.snapshot(ME, "a")).expiry is not None
    else:
        with pytest.raises(NotFound):
            await engine.snapshot(ME, "a")


@pytest.mark.parametrize("durable", [False, True])
async def test_an_open_that_is_refused_leaves_nothing(stored: LocalEngine, durable: bool) -> None:
    await save(stored, "a", durable=durable)
    await stored.open(ME, OpenRequest(name="a", context_id="mine"))
    with pytest.raises(AlreadyExists):
        await stored.take(ME, OpenRequest(name="a", context_id="mine"))
    assert [each.context_id for each in await stored.list(ME)] == ["mine"]
    assert (await stored.snapshot(ME, "a")).version == 1


async def test_a_page_that_cannot_be_read_is_computed(stored: LocalEngine, monkeypatch) -> None:
    """A read that fails in the middle costs the rows of what it did not bring, and nothing else."""
    await save(stored, "a", durable=True)
    await stored.clear_cache(ME)
    make_page, calls = stored.core.runner.make_page, []

    def fails_second(data: Any) -> Any:
        calls.append(data)
        if len(calls) == 2:
            raise DataLoss("damaged")
        return make_page(data)

    monkeypatch.setattr(stored.core.runner, "make_page", fails_second)
    opened = await stored.open(ME, OpenRequest(name="a"))
    assert opened.restored + opened.computed == 70
    assert opened.computed >= 16
    assert await tokens_of(stored, opened.context.context_id) == TOKENS
