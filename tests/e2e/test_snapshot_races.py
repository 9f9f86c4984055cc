"""Saves and takes that meet: of what was replaced meanwhile, and of more than a tenant may have. Through gRPC."""

import asyncio
from dataclasses import replace

import pytest

from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.types import Snapshot
from tests.e2e.conftest import CONFIG
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, held, oracle
from tests.e2e.gated_store import Gate, snapshots, until

PROMPT, ANEW = THOUSAND[:200], [9] * 40
PAGE_BYTES = 128  # of the echo model


@pytest.fixture
def engine(make_engine, engine_config, tmp_path):
    return make_engine(engine_config, store=str(tmp_path))


@pytest.fixture
def gate():
    """Not on the way of the store's other work."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("how", ["deleted", "saved anew", "overwritten"])
async def test_a_take_of_what_was_replaced_meanwhile(client, engine, gate, monkeypatch, how, durable) -> None:
    """It was opened, and is not the latest any more: nobody else's snapshot is taken in its stead."""
    context = await filled(client, PROMPT)
    await context.save("a", durable=durable)
    await context.close()
    successor = await filled(client, ANEW)
    monkeypatch.setattr(engine.store, "take", gate.before(engine.store.take))
    taking = asyncio.create_task(client.take("a", context_id="mine"))
    await gate.reached()
    if how != "overwritten":
        await client.delete_snapshot("a")
    if how != "deleted":
        await successor.save("a", durable=durable, overwrite_version=1 if how == "overwritten" else None)
    gate.open()
    if how == "deleted":
        with pytest.raises(errors.NotFound) as error:
            await taking
        assert error.value.reason == "SNAPSHOT_NOT_FOUND"
    else:
        with pytest.raises(errors.Aborted) as error:
            await taking
        assert error.value.reason == "VERSION_MISMATCH"
    assert [each.id async for each in client.contexts()] == [successor.id]
    # What versions in memory hold: of ANEW a copied page, of PROMPT 13.
    contexts, pages = (0, 0) if durable else {"deleted": (0, 0), "saved anew": (1, 1), "overwritten": (2, 14)}[how]
    await until(lambda: len(engine.core.cache.context_table) == 1 + contexts)
    assert await held(engine) == 3 + pages
    if how == "deleted":
        assert await snapshots(client) == []
        return
    assert await snapshots(client) == [("a", 2 if how == "overwritten" else 1)]
    opened = await client.open("a")
    assert await opened.tokens() == ANEW
    assert await greedy(opened, 3) == oracle(ANEW, 3)
    for each in (opened, successor):
        await each.close()
    assert await client.delete_snapshot("a") == (2 if how == "overwritten" else 1)
    await until(lambda: len(engine.core.cache.context_table) == 0)
    assert await held(engine) == 0


@pytest.mark.parametrize("durable", [False, True])
async def test_of_four_saves_of_one_name_at_once_one_succeeds(client, engine, gate, monkeypatch, durable) -> None:
    """All found the name free. No more than four: each waits on one of the few threads that there are."""
    contexts = [await filled(client, [k] * 20) for k in range(4)]
    before, check, checked = await held(engine), engine.store.check, []

    def all_have_checked(*arguments: object) -> None:
        check(*arguments)
        checked.append(arguments)
        if len(checked) == 4:
            gate.open()
        assert gate.passing.wait(30)

    monkeypatch.setattr(engine.store, "check", all_have_checked)
    gate.close()
    saves = [context.save("a", durable=durable) for context in contexts]
    results = await asyncio.gather(*saves, return_exceptions=True)
    (saved,) = [each for each in results if isinstance(each, Snapshot)]
    assert {type(each) for each in results if each is not saved} == {errors.AlreadyExists}
    assert await snapshots(client) == [("a", 1)]
    winner = results.index(saved)
    assert await (await client.open("a")).tokens() == [winner] * 20
    await until(lambda: len(engine.core.cache.context_table) == (5 if durable else 6))
    assert await held(engine) == before + (1 if durable else 2)


class TestOneSnapshot:
    @pytest.fixture(params=[("max_snapshots_per_tenant", 1), ("max_snapshot_bytes_per_tenant", 3 * PAGE_BYTES)])
    def engine_config(self, request) -> EngineConfig:
        return replace(CONFIG, **dict([request.param]))

    @pytest.mark.parametrize("durable", [False, True])
    async def test_of_eight_saves_at_once_one_succeeds(self, client, engine, gate, monkeypatch, durable) -> None:
        contexts = [await filled(client, [k] * 20) for k in range(8)]  # two pages each
        before = await held(engine)
        monkeypatch.setattr(engine.store, "put", gate.before(engine.store.put))
        saves = [context.save(f"s{k}", durable=durable) for k, context in enumerate(contexts)]
        tasks = [asyncio.create_task(save) for save in saves]
        await gate.reached()
        await until(lambda: sum(task.done() for task in tasks) == 7)  # while the one is not in the catalogue yet
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        monkeypatch.undo()
        (saved,) = [each for each in results if isinstance(each, Snapshot)]
        assert [each.reason for each in results if each is not saved] == ["QUOTA"] * 7
        assert saved.size_bytes == 2 * PAGE_BYTES
        assert await snapshots(client) == [(saved.name, 1)]
        await until(lambda: len(engine.core.cache.context_table) == (8 if durable else 9))
        assert await held(engine) == before + (0 if durable else 1)
        await client.delete_snapshot(saved.name)
        assert (await contexts[0].save("next", durable=durable)).version == 1, "what was refused is not counted"


class TestTwoContexts:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return replace(CONFIG, max_contexts_per_tenant=2)

    async def test_snapshots_in_memory_are_not_counted_as_contexts(self, client, engine) -> None:
        context = await filled(client, PROMPT)
        for name in "abcd":
            await context.save(name)
        assert [name for name, _ in await snapshots(client)] == [*"abcd"]
        opened = await client.open("d")
        for more in (client.open("a"), client.create(), context.fork()):
            with pytest.raises(errors.ResourceExhausted) as error:
                await more
            assert error.value.reason == "QUOTA"
        assert await greedy(opened, 3) == oracle(PROMPT, 3)
        assert len([each async for each in client.contexts()]) == 2


class TestTwoSnapshots:
    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return replace(CONFIG, max_snapshots_per_tenant=2)

    @pytest.mark.parametrize("durable", [False, True])
    async def test_a_save_that_ends_counts_once(self, client, engine, gate, monkeypatch, durable) -> None:
        one, other = await filled(client, PROMPT), await filled(client, ANEW)
        put = engine.store.put

        def kept(*arguments: object) -> object:
            version = put(*arguments)
            gate.close()
            gate()
            return version

        monkeypatch.setattr(engine.store, "put", kept)
        saving = asyncio.create_task(one.save("a", durable=durable))
        await gate.reached()
        monkeypatch.setattr(engine.store, "put", put)
        assert await snapshots(client) == [("a", 1)]
        await other.save("b", durable=durable)
        with pytest.raises(errors.ResourceExhausted) as error:
            await other.save("c", durable=durable)
        assert error.value.reason == "QUOTA"
        gate.open()
        await saving


async def test_an_old_version_is_changed(client) -> None:
    context = await filled(client, PROMPT)
    await context.save("a")
    await context.save("a", overwrite_version=1)
    changed = await client.update_snapshot("a", version=1, ttl_s=1000, labels={"old": "yes"})
    assert (changed.version, changed.latest, changed.labels) == (1, False, {"old": "yes"})
    second, first = await client.history("a")
    assert (first, second.expiry, second.labels) == (changed, None, {})
    for missing in (3, 7):
        with pytest.raises(errors.NotFound) as error:
            await client.update_snapshot("a", version=missing, ttl_s=1)
        assert error.value.reason == "SNAPSHOT_NOT_FOUND"
