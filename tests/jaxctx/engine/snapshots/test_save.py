"""Saves: what counts for the quota while it is under way, and what is left of one that fails."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from jaxctx.types import CreateContextRequest, OpenRequest, SaveRequest
from tests.engines import SMALL

ME, OTHER = Caller("me"), Caller("other")


async def filled(engine: LocalEngine, tokens: int = 40, caller: Caller = ME) -> str:
    context_id = (await engine.create(caller, CreateContextRequest())).context_id
    await engine.fill(caller, context_id, list(range(1, tokens + 1)))
    return context_id


class Gate:
    """Holds calls of the store's `put` back until it is opened."""

    def __init__(self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        put = engine.store.put

        def held_back(*args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return put(*args)

        monkeypatch.setattr(engine.store, "put", held_back)


@pytest.fixture
def limited(make_engine: Any) -> LocalEngine:
    """An engine in which a tenant may have one snapshot."""
    engine: LocalEngine = make_engine(replace(SMALL, max_snapshots_per_tenant=1))
    return engine


async def test_a_save_under_way_counts_for_its_tenant(limited: LocalEngine, monkeypatch) -> None:
    context, gate = await filled(limited), Gate(limited, monkeypatch)
    service = limited.snapshot_service
    assert not service.is_saving
    first = asyncio.create_task(limited.save(ME, SaveRequest(context_id=context, name="a")))
    await asyncio.to_thread(gate.reached.wait, 30)
    assert service.is_saving
    with pytest.raises(ResourceExhausted, match="max_snapshots_per_tenant is 1") as error:
        await limited.save(ME, SaveRequest(context_id=context, name="b"))
    assert error.value.reason == "QUOTA"
    other = asyncio.create_task(
        limited.save(OTHER, SaveRequest(context_id=await filled(limited, caller=OTHER), name="a"))
    )
    gate.open.set()
    assert [(await save).version for save in (first, other)] == [1, 1]
    assert not service.is_saving
    assert service.count() == 2


async def test_a_save_in_place_of_another_version_needs_no_more_room(limited: LocalEngine) -> None:
    request = SaveRequest(context_id=await filled(limited), name="a")
    await limited.save(ME, request)
    with pytest.raises(ResourceExhausted):
        await limited.save(ME, replace(request, overwrite_version=1))
    assert (await limited.save(ME, replace(request, overwrite_version=1, max_versions=1))).version == 2


@pytest.mark.parametrize("limit", ["max_snapshots_per_tenant", "max_snapshot_bytes_per_tenant"])
async def test_a_move_needs_no_room(make_engine: Any, limit: str) -> None:
    """A tenant who has used its quota up does not lose its contexts when their engine leaves."""
    engine: LocalEngine = make_engine(replace(SMALL, **{limit: 1}))
    request = SaveRequest(context_id=await filled(engine), name="a", for_move=True)
    await engine.save(ME, request)
    with pytest.raises(ResourceExhausted, match=limit):
        await engine.save(ME, replace(request, name="b", for_move=False))
    assert (await engine.save(ME, replace(request, name="c"))).version == 1


async def test_room_for_more_is_told_before_anything_is_saved(limited: LocalEngine, monkeypatch) -> None:
    context, gate = await filled(limited), Gate(limited, monkeypatch)
    await limited.check_snapshot_quota(ME, 1)
    with pytest.raises(ResourceExhausted, match="max_snapshots_per_tenant is 1, and this would make 2"):
        await limited.check_snapshot_quota(ME, 2)
    saving = asyncio.create_task(limited.save(ME, SaveRequest(context_id=context, name="a")))
    await asyncio.to_thread(gate.reached.wait, 30)
    with pytest.raises(ResourceExhausted) as error:  # a save under way counts
        await limited.check_snapshot_quota(ME, 1)
    assert (error.value.reason, error.value.retry_after_s) == ("QUOTA", None)
    await limited.check_snapshot_quota(OTHER, 1)
    gate.open.set()
    await saving
    await limited.delete_snapshot(ME, "a")
    await limited.check_snapshot_quota(ME, 1)


async def test_a_quota_of_bytes_has_room_for_at_least_a_byte(make_engine: Any) -> None:
    attached = b"x" * 100
    engine: LocalEngine = make_engine(replace(SMALL, max_snapshot_bytes_per_tenant=len(attached)))
    await engine.check_snapshot_quota(ME, 1)
    empty = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.save(ME, SaveRequest(context_id=empty, name="a", attachment=attached))
    with pytest.raises(ResourceExhausted, match="max_snapshot_bytes_per_tenant"):
        await engine.check_snapshot_quota(ME, 1)


class SlowLook:
    """Holds looks at what other servers made of a tenant's snapshots back until it is opened."""

    def __init__(self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open, self.ended = threading.Event(), threading.Event(), threading.Event()

        def look(tenant: str) -> None:
            self.begun.set()
            assert self.open.wait(30)
            self.ended.set()

        monkeypatch.setattr(engine.store, "refresh_tenant", look)


async def test_far_from_a_quota_no_save_waits_for_a_look_at_other_servers(
    make_engine: Any, tmp_path: Any, monkeypatch
) -> None:
    engine = make_engine(replace(SMALL, max_snapshots_per_tenant=9), store=tmp_path.as_uri())
    look, context = SlowLook(engine, monkeypatch), await filled(engine)
    try:
        async with asyncio.timeout(30):
            await engine.save(ME, SaveRequest(context_id=context, name="a"))
            await engine.save(ME, SaveRequest(context_id=context, name="b", durable=True))
            await engine.check_snapshot_quota(ME, 1)
        assert await asyncio.to_thread(look.begun.wait, 30)
        assert not look.ended.is_set()
    finally:
        look.open.set()


async def test_near_a_quota_a_save_waits_for_a_look_and_holds_no_pages_meanwhile(
    make_engine: Any, tmp_path: Any, monkeypatch
) -> None:
    engine = make_engine(replace(SMALL, max_snapshots_per_tenant=1), store=tmp_path.as_uri())
    look, context = SlowLook(engine, monkeypatch), await filled(engine)
    contexts = (await engine.stats()).contexts
    saving = asyncio.create_task(engine.save(ME, SaveRequest(context_id=context, name="a")))
    try:
        assert await asyncio.to_thread(look.begun.wait, 30)
        assert (await engine.stats()).contexts == contexts
        assert not saving.done()
    finally:
        look.open.set()
    assert (await saving).version == 1


async def test_near_a_quota_a_save_waits_for_a_look_that_began_far_from_it(
    make_engine: Any, tmp_path: Any, monkeypatch
) -> None:
    """What the other server saved counts, though a look takes longer than the saves that lead to the limit."""
    limits = replace(SMALL, max_snapshots_per_tenant=4)
    engine, other = (make_engine(limits, store=tmp_path.as_uri(), device=device) for device in ("a", "b"))
    await save_durably(other, "b0", "b1", "b2")
    begun, may_end, look = threading.Event(), threading.Event(), engine.store.refresh_tenant

    def slow_look(tenant: str) -> None:
        begun.set()
        assert may_end.wait(30)
        look(tenant)

    monkeypatch.setattr(engine.store, "refresh_tenant", slow_look)
    await save_durably(engine, "a0")
    assert await asyncio.to_thread(begun.wait, 30)
    saving = asyncio.create_task(save_durably(engine, "a1", "a2", "a3"))
    try:
        await asyncio.wait([saving], timeout=1)
        assert not saving.done()
    finally:
        may_end.set()
    with pytest.raises(ResourceExhausted, match="max_snapshots_per_tenant is 4"):
        await saving


async def save_durably(engine: LocalEngine, *names: str) -> None:
    """A snapshot of each name, one after another."""
    context = await filled(engine)
    for name in names:
        await engine.save(ME, SaveRequest(context_id=context, name=name, durable=True))


async def test_without_a_quota_no_save_looks(make_engine: Any, tmp_path: Any, monkeypatch) -> None:
    engine = make_engine(SMALL, store=tmp_path.as_uri())
    look = SlowLook(engine, monkeypatch)
    look.open.set()
    await engine.save(ME, SaveRequest(context_id=await filled(engine), name="a", durable=True))
    await engine.check_snapshot_quota(ME, 1)
    await asyncio.sleep(0.05)
    assert not look.begun.is_set()


async def test_a_quota_of_bytes_counts_pages_before_the_fork(make_engine: Any) -> None:
    """Also those of a context that is suspended."""
    page_bytes = make_engine(SMALL).core.runner.page_bytes
    config = replace(SMALL, pages=8, max_context_tokens=128, max_snapshot_bytes_per_tenant=3 * page_bytes + 4)
    engine = make_engine(config)
    context = await filled(engine)  # three pages
    await engine.close(ME, await filled(engine, 120))
    assert engine.core.cache.get("me", context).suspended
    contexts = (await engine.stats()).contexts
    with pytest.raises(ResourceExhausted, match="max_snapshot_bytes_per_tenant"):
        await engine.save(ME, SaveRequest(context_id=context, name="a", attachment=b"12345"))
    assert (await engine.stats()).contexts == contexts
    await engine.save(ME, SaveRequest(context_id=context, name="a", attachment=b"1234"))


async def test_a_save_that_fails_leaves_no_hidden_fork(engine: LocalEngine) -> None:
    context = await filled(engine)
    await engine.save(ME, SaveRequest(context_id=context, name="a"))
    contexts = (await engine.stats()).contexts
    with pytest.raises(AlreadyExists):
        await engine.save(ME, SaveRequest(context_id=context, name="a"))
    with pytest.raises(NotFound):
        await engine.save(ME, SaveRequest(context_id="none", name="b"))
    assert (await engine.stats()).contexts == contexts
    assert not engine.snapshot_service.is_saving


async def test_what_is_kept_in_memory_may_be_suspended(make_engine: Any) -> None:
    engine = make_engine(replace(SMALL, pages=8, max_context_tokens=128))
    context = await filled(engine)
    await engine.save(ME, SaveRequest(context_id=context, name="a"))
    await engine.close(ME, context)
    other = await filled(engine, 120)
    (held,) = [each for each in engine.core.cache.context_table if each.id != other]
    assert held.suspended
    await engine.close(ME, other)
    assert (await engine.open(ME, OpenRequest(name="a"))).context.seq_len == 40


async def test_what_a_save_holds_is_no_pin_of_its_tenant_s(make_engine: Any, tmp_path: Any, monkeypatch) -> None:
    """Also of a context that comes back to be saved, and where a tenant may pin nothing."""
    config = replace(SMALL, pages=8, max_context_tokens=128, pinned_pages_per_tenant=0)
    engine = make_engine(config, store=tmp_path.as_uri())
    context = await filled(engine)
    await engine.close(ME, await filled(engine, 120))
    assert engine.core.cache.get("me", context).suspended
    gate = Gate(engine, monkeypatch)
    saving = asyncio.create_task(engine.save(ME, SaveRequest(context_id=context, name="a", durable=True)))
    await asyncio.to_thread(gate.reached.wait, 30)
    assert engine.core.lifecycle.quotas.pinned("me") == 0
    gate.open.set()
    assert (await saving).durable


async def test_what_only_a_save_is_in_the_way_of_waits_for_it(make_engine: Any, tmp_path: Any, monkeypatch) -> None:
    """Also where nothing runs: no pin of anybody's holds the pages."""
    engine = make_engine(replace(SMALL, pages=8, max_context_tokens=128), store=tmp_path.as_uri())
    context, gate = await filled(engine, 96), Gate(engine, monkeypatch)
    saving = asyncio.create_task(engine.save(ME, SaveRequest(context_id=context, name="a", durable=True)))
    await asyncio.to_thread(gate.reached.wait, 30)
    other = (await engine.create(ME, CreateContextRequest())).context_id
    waits = asyncio.create_task(engine.fill(ME, other, list(range(201, 297))))
    while not (await engine.stats()).waiting:
        assert not waits.done(), waits.exception()
        await asyncio.sleep(0.01)
    gate.open.set()
    assert (await saving).durable
    await waits
    assert engine.core.cache.get("me", context).suspended


async def test_a_save_that_pins_are_in_the_way_of_fails_at_once(make_engine: Any, tmp_path: Any) -> None:
    """Of contexts that are suspended: they do not wait for each other, or for themselves."""
    config = replace(SMALL, pages=8, max_context_tokens=128, pinned_pages_per_tenant=8)
    engine = make_engine(config, store=tmp_path.as_uri())
    contexts = [await filled(engine), await filled(engine, caller=OTHER)]
    pinned = (await engine.create(ME, CreateContextRequest(pinned=True))).context_id
    await engine.fill(ME, pinned, list(range(201, 321)))
    saves = [
        engine.save(caller, SaveRequest(context_id=context_id, name="a", durable=True))
        for caller, context_id in zip((ME, OTHER), contexts, strict=True)
    ]
    async with asyncio.timeout(30):
        refused = await asyncio.gather(*saves, return_exceptions=True)
    assert [getattr(each, "reason", each) for each in refused] == ["OUT_OF_PAGES"] * 2


async def test_no_save_begins_once_a_drain_has(engine: LocalEngine) -> None:
    context = await filled(engine)
    await engine.drain()
    with pytest.raises(Unavailable) as error:
        await engine.save(ME, SaveRequest(context_id=context, name="a"))
    assert error.value.reason == "DRAINING"
