"""Saves and opens that go wrong, through gRPC: given up, out of time, out of pages, out of disk, at the server's end.

Whatever happens, the context that is saved goes on, nobody else notices, and nothing is left behind.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.scheduler.restore import MAX_PAGES_WHEN_IDLE
from jaxctx.engine.snapshots.open import READ_AHEAD
from jaxctx.store.objects import open_objects
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, held, oracle
from tests.e2e.gated_store import Gate, snapshots, until
from tests.jaxctx.store.fault_injection import Interrupted

PROMPT = THOUSAND[:200]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


@pytest.fixture
def engine(make_engine, engine_config, gate, folder):
    engine = make_engine(engine_config, store=Interrupted(open_objects(str(folder)), gate))
    yield engine
    gate.open()  # before the engine is stopped, which waits for the store


def record_tasks(engine, name: str, monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Task[object]]:
    """A list that gets the server's task of each call of this method of the engine."""
    tasks: list[asyncio.Task[object]] = []
    method = getattr(engine, name)

    async def recorded(*arguments: object, **options: object) -> object:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await method(*arguments, **options)

    monkeypatch.setattr(engine, name, recorded)
    return tasks


async def until_cancelled(task: asyncio.Task[object]) -> None:
    """Wait until the server knows that a client has given up a call; the task may go on."""
    await until(lambda: task.cancelling() or task.done())


def packs(folder: Path) -> list[Path]:
    return [*(folder / "packs").iterdir(), *(folder / "manifests").iterdir()]


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_a_save_that_is_given_up_leaves_nothing(client, engine, gate, folder, how) -> None:
    context = await filled(client, PROMPT)
    before = await held(engine)
    gate.close()
    saving = asyncio.create_task(context.save("a", durable=True, timeout_s=0.5 if how == "out of time" else 60))
    await gate.reached()
    assert await greedy(context, 3) == oracle(PROMPT, 3), "the context goes on meanwhile"
    if how == "cancelled":
        saving.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else errors.DeadlineExceeded):
        await saving
    # The server learns of it a little later than the caller: if the gate is open by then the save comes to its end.
    await until(lambda: not engine.snapshot_service.is_saving or any(task.cancelling() for task in asyncio.all_tasks()))
    gate.open()
    await context.truncate(3)
    await until(lambda: not packs(folder))
    assert await snapshots(client) == []
    await until(lambda: len(engine.core.cache.context_table) == 1)
    assert await held(engine) == before, "the frozen fork is gone"
    assert (await context.save("a", durable=True)).version == 1
    assert await greedy(await client.open("a"), 3) == oracle(PROMPT, 3)


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
async def test_an_open_that_is_given_up_leaves_nothing(client, engine, gate, folder, how) -> None:
    context = await filled(client, PROMPT)
    await context.save("a", durable=True)
    await context.close()
    await client.clear_cache()
    gate.close()
    opening = asyncio.create_task(client.open("a", timeout_s=0.5 if how == "out of time" else 60))
    await gate.reached()
    if how == "cancelled":
        opening.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else errors.DeadlineExceeded):
        await opening
    gate.open()
    await until(lambda: len(engine.core.cache.context_table) == 0)
    assert await held(engine) == 0
    opened = await client.open("a")
    assert opened.opened is not None
    assert opened.opened.computed == 0
    assert await greedy(opened, 3) == oracle(PROMPT, 3)
    await client.delete_snapshot("a")
    await until(lambda: not packs(folder))  # nobody has them pinned


async def test_a_take_that_is_given_up_while_it_reads_takes_nothing(client, engine, gate) -> None:
    context = await filled(client, PROMPT)
    await context.save("a", durable=True)
    await client.clear_cache()
    gate.close()
    taking = asyncio.create_task(client.take("a"))
    await gate.reached()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    gate.open()
    await until(lambda: len(engine.core.cache.context_table) == 1)
    assert await snapshots(client) == [("a", 1)]


@pytest.mark.parametrize("durable", [False, True])
async def test_a_take_that_is_given_up_as_it_happens_leaves_the_context(
    client, engine, gate, monkeypatch, durable
) -> None:
    """The snapshot is no more by then: what it held must be somewhere."""
    context = await filled(client, PROMPT)
    await context.save("a", durable=durable)
    await context.close()
    take = engine.store.take

    def taken(*arguments: object, **options: object) -> object:
        version = take(*arguments, **options)
        gate.close()
        gate()
        return version

    monkeypatch.setattr(engine.store, "take", taken)
    tasks = record_tasks(engine, "take", monkeypatch)
    taking = asyncio.create_task(client.take("a", context_id="mine"))
    await gate.reached()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await until_cancelled(tasks[0])
    gate.open()
    await until(lambda: len(engine.core.cache.context_table) == 1)
    assert await snapshots(client) == []
    assert [(each.id, each.info.snapshot) async for each in client.contexts()] == [("mine", "a@1")]
    assert await greedy(await client.context("mine"), 3) == oracle(PROMPT, 3)


async def test_a_delete_that_is_given_up_as_it_happens_leaks_nothing(client, engine, gate, monkeypatch) -> None:
    context = await filled(client, PROMPT)
    await context.save("a")
    await context.close()
    monkeypatch.setattr(engine.store, "remove", gate.before(engine.store.remove))
    tasks = record_tasks(engine, "delete_snapshot", monkeypatch)
    deleting = asyncio.create_task(client.delete_snapshot("a"))
    await gate.reached()
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    await until_cancelled(tasks[0])
    gate.open()
    await until(lambda: len(engine.core.cache.context_table) == 0)
    assert await snapshots(client) == []
    assert await held(engine) == 0


async def test_a_save_in_memory_that_is_given_up_as_it_happens_leaves_the_name_as_it_was(
    client, engine, gate, monkeypatch
) -> None:
    context = await filled(client, PROMPT)
    await context.save("a")
    monkeypatch.setattr(engine.store, "put", gate.before(engine.store.put))
    tasks = record_tasks(engine, "save", monkeypatch)
    saving = asyncio.create_task(context.save("a", overwrite_version=1))
    await gate.reached()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    await until_cancelled(tasks[0])
    gate.open()
    await until(lambda: len(engine.core.cache.context_table) == 2)  # the context, and what version 1 holds
    assert await snapshots(client) == [("a", 1)]
    assert await greedy(await client.open("a"), 3) == oracle(PROMPT, 3)


async def test_a_full_disk_keeps_the_old_version_and_nobody_else_notices(client, engine, gate, folder) -> None:
    context, neighbour = await filled(client, PROMPT), await filled(client, [7, 8, 9])
    await context.save("a", durable=True)
    stored = sorted(packs(folder))
    await context.fill(tokens=THOUSAND[200:240])

    async def stream() -> list[int]:
        return await greedy(neighbour, 100)

    streaming = asyncio.create_task(stream())
    gate.error = errors.ResourceExhausted("the snapshot store is full", reason="STORE_FULL")
    for overwrite in (1, None):
        with pytest.raises(errors.ResourceExhausted) as error:
            await context.save("a" if overwrite else "b", durable=True, overwrite_version=overwrite)
        assert error.value.reason == "STORE_FULL"
    assert await streaming == oracle([7, 8, 9], 100)
    gate.error = None
    assert await snapshots(client) == [("a", 1)]
    await until(lambda: len(engine.core.cache.context_table) == 2)
    assert {*stored} <= {*packs(folder)}
    opened = await client.open("a")
    assert await opened.tokens() == PROMPT
    assert (await context.save("a", durable=True, overwrite_version=1)).version == 2
    assert await greedy(await client.open("a"), 3) == oracle(THOUSAND[:240], 3)


class TestFullPool:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            pages=24, max_batch=8, max_batch_tokens=64, max_context_tokens=384, pinned_pages_per_tenant=24
        )

    @pytest.mark.parametrize("durable", [False, True])
    async def test_a_save_that_finds_no_page_changes_nothing(self, client, engine, durable) -> None:
        context = await filled(client, PROMPT)  # 12 pages and a half
        await context.update(pinned=True)
        other = await client.create(pinned=True)
        await other.fill(tokens=[3] * 170)
        assert (await engine.stats()).pages_free == 0
        with pytest.raises(errors.ResourceExhausted):
            await context.save("a", durable=durable, timeout_s=2)
        assert await snapshots(client) == []
        assert len(engine.core.cache.context_table) == 2
        await other.close()
        assert (await context.save("a", durable=durable)).tokens == 200
        assert await greedy(context, 3) == oracle(PROMPT, 3)

    @pytest.mark.parametrize("durable", [False, True])
    async def test_an_open_that_finds_no_page_leaves_no_context(self, client, engine, durable) -> None:
        context = await filled(client, PROMPT)
        await context.save("a", durable=durable)
        await context.close()
        other = await client.create(pinned=True)
        await other.fill(tokens=[3] * 330)
        with pytest.raises((errors.ResourceExhausted, errors.DeadlineExceeded)):
            await client.open("a", timeout_s=1)
        await until(lambda: {each.id for each in engine.core.cache.context_table if not each.tenant} == {other.id})
        assert await greedy(other, 3) == oracle([3] * 330, 3)
        await other.close()
        assert await greedy(await client.open("a"), 3) == oracle(PROMPT, 3)


class TestManyPages:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(pages=512, max_batch=8, max_batch_tokens=64, max_context_tokens=6400)

    async def test_pages_that_were_loaded_are_not_kept_until_the_open_ends(self, client, engine, monkeypatch) -> None:
        tokens = [n * 7 % 250 for n in range(6000)]
        context = await filled(client, tokens)
        await context.save("a", durable=True)
        await context.close()
        await client.clear_cache()
        made, most = list[weakref.ref[object]](), 0

        def page(data: memoryview, make: Callable[[memoryview], object] = engine.core.runner.make_page) -> object:
            nonlocal most
            page = make(data)
            made.append(weakref.ref(page))
            most = max(most, sum(each() is not None for each in made))
            return page

        monkeypatch.setattr(engine.core.runner, "make_page", page)
        opened = await client.open("a")
        assert opened.opened is not None
        assert opened.opened.restored == 6000
        assert most <= READ_AHEAD + MAX_PAGES_WHEN_IDLE + 1, f"{most} of 375 pages were in host memory at once"
        assert await greedy(opened, 3) == oracle(tokens, 3)


class TestSharedPages:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(pages=512, max_batch=8, max_batch_tokens=64, max_context_tokens=3200)

    async def test_two_opens_of_one_long_prefix_at_once(self, client) -> None:
        """What the first one brings back, the second finds: its reader must not wait for anybody to take it."""
        shared = [n * 7 % 250 for n in range(16 * 2 * READ_AHEAD)]
        ends = {name: [ord(name)] * 320 for name in "ab"}
        for name, end in ends.items():
            context = await filled(client, shared + end)
            await context.save(name, durable=True)
            await context.close()
        await client.clear_cache()
        for name, context in zip(ends, await asyncio.gather(*map(client.open, ends)), strict=True):
            assert context.opened is not None
            assert context.opened.computed == 0
            assert await greedy(context, 3) == oracle(shared + ends[name], 3)


class TestSlowStore:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=1024, host_pages=128)

    async def test_an_open_that_waits_for_its_store_holds_up_nobody(self, client, engine, gate, monkeypatch) -> None:
        saved = await filled(client, PROMPT)
        await saved.save("a", durable=True)
        await saved.close()
        await client.clear_cache()
        idle = await filled(client, THOUSAND[500:900])
        await (await filled(client, [7] * 900)).close()
        assert (await idle.refresh()).state is jaxctx.ContextState.SUSPENDED
        monkeypatch.setattr(engine.core.runner, "make_page", gate.before(engine.core.runner.make_page))
        opening = asyncio.create_task(client.open("a"))
        await gate.reached()
        done = await asyncio.wait_for(idle.complete(max_tokens=3, temperature=0), 120)
        assert done.usage is not None
        assert 0 < done.usage.restored_tokens <= done.usage.cached_tokens == 399
        assert list(done.token_ids) == oracle(THOUSAND[500:900], 3)
        assert not opening.done()
        monkeypatch.undo()
        gate.open()
        assert await greedy(await opening, 3) == oracle(PROMPT, 3)


async def test_a_drain_lets_a_save_finish_and_takes_no_new_one(client, engine, gate) -> None:
    context = await filled(client, PROMPT)
    await context.save("old")
    gate.close()
    saving = asyncio.create_task(context.save("a", durable=True))
    await gate.reached()
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0.05)
    assert not draining.done(), "a save is work that runs"
    for refused in (context.save("b", durable=True), context.save("c"), client.open("old")):
        with pytest.raises(errors.Unavailable) as error:
            await refused
        assert error.value.reason == "DRAINING"
    gate.open()
    assert (await saving).version == 1
    await draining


async def test_a_drain_ends_watches(client, engine) -> None:
    context = await filled(client, [1, 2, 3])
    events = client.watch()
    assert (await anext(events)).context_id == context.id
    await engine.drain()
    with pytest.raises(errors.Unavailable):
        while True:
            await asyncio.wait_for(anext(events), 120)
