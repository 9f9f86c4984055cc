"""What an opened context gets, and the thread that removes what is over."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import Aborted, AlreadyExists, DataLoss, NotFound, ResourceExhausted, Unavailable
from jaxctx.types import (
    CreateContextRequest,
    GenerateRequest,
    OpenRequest,
    RetentionUpdate,
    SamplingParams,
    SaveRequest,
    TokenIds,
    Ttl,
)
from tests.engines import SMALL

ME = Caller("me")


async def filled(engine: LocalEngine, tokens: list[int]) -> str:
    context_id = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, context_id, tokens)
    return context_id


@pytest.fixture
def two(make_engine: Any, tmp_path: Any) -> list[LocalEngine]:
    """Engines on one store."""
    return [make_engine(SMALL, store=str(tmp_path), whole=False, device=name) for name in ("a", "b")]


async def test_a_store_that_hangs_stops_nothing_else(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and certificates, among others, are read on the event loop's own threads."""
    begun, release = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        assert release.wait(60)

    monkeypatch.setattr(engine.store, "check", hang)
    request = SaveRequest(context_id=await filled(engine, [1] * 40), name="a")
    saves = [asyncio.create_task(engine.save(ME, request)) for _ in range(64)]  # more than there are threads
    try:
        async with asyncio.timeout(30):
            while not begun.is_set():
                await asyncio.sleep(0.01)
        for save in saves:
            save.cancel()
        await asyncio.wait(saves)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(str, 7) == "7"
    finally:
        release.set()


async def test_an_engine_knows_what_another_saved_when_it_is_asked(two: list[LocalEngine]) -> None:
    one, other = two
    saved = await filled(one, [1] * 40)
    await one.save(ME, SaveRequest(context_id=saved, name="a", durable=True))
    opened = await other.open(ME, OpenRequest(name="a"))
    assert opened.context.seq_len == 40
    with pytest.raises(AlreadyExists):
        await other.save(ME, SaveRequest(context_id=opened.context.context_id, name="a", durable=True))
    await other.fill(ME, opened.context.context_id, [2] * 8)
    request = SaveRequest(context_id=opened.context.context_id, name="a", durable=True, overwrite_version=1)
    await other.save(ME, request)
    with pytest.raises(Aborted):
        await one.save(ME, SaveRequest(context_id=saved, name="a", durable=True, overwrite_version=1))
    assert [each.version for each in await one.history(ME, "a")] == [2, 1]
    assert (await one.open(ME, OpenRequest(name="a"))).context.seq_len == 48
    await one.update_snapshot(ME, "a", 1, RetentionUpdate(labels={"k": "v"}))
    assert (await other.snapshot(ME, "a", 1)).labels == {"k": "v"}
    assert (await other.take(ME, OpenRequest(name="a"))).context.seq_len == 48
    with pytest.raises(NotFound):
        await one.snapshot(ME, "a")
    assert await one.snapshots(ME, "", "", 10) == []
    await one.save(ME, SaveRequest(context_id=saved, name="a", durable=True))
    assert await other.delete_snapshot(ME, "a") == 1
    with pytest.raises(NotFound):
        await one.open(ME, OpenRequest(name="a"))


async def test_a_store_that_fails_hides_no_snapshot_in_memory(two: list[LocalEngine], monkeypatch: Any) -> None:
    one, _ = two
    context = await filled(one, [1] * 40)
    await one.save(ME, SaveRequest(context_id=context, name="memory"))

    def fails(*_: Any, **__: Any) -> Any:
        raise Unavailable("it fails", reason="STORE_FAILED")

    monkeypatch.setattr(one.store._objects, "read", fails)
    assert (await one.open(ME, OpenRequest(name="memory"))).context.seq_len == 40
    await one.save(ME, SaveRequest(context_id=context, name="more"))
    assert (await one.take(ME, OpenRequest(name="more"))).context.seq_len == 40


async def test_looks_keep_off_the_event_loop(engine: LocalEngine, two: list[LocalEngine], monkeypatch: Any) -> None:
    """And are none where no snapshot is durable."""
    threads: list[str] = []
    for each in (engine, two[0]):
        monkeypatch.setattr(each.store, "refresh_name", lambda *_: threads.append(threading.current_thread().name))
        with pytest.raises(NotFound):
            await each.open(ME, OpenRequest(name="a"))
    assert len(threads) == 1
    assert threads[0] != threading.current_thread().name


async def test_the_expiry_thread_outlives_a_defect(engine: LocalEngine, clock, monkeypatch, caplog) -> None:
    """Else nothing would ever be removed again, and nobody would know."""
    context_id = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, context_id, [1] * 40)
    await engine.save(ME, SaveRequest(context_id=context_id, name="a", ttl=Ttl(10)))
    expire, wait = engine.store.expire, engine.snapshot_service._stopped.wait
    calls: list[int] = []

    def fails_once() -> object:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return expire()

    monkeypatch.setattr(engine.store, "expire", fails_once)
    monkeypatch.setattr(
        engine.snapshot_service._stopped, "wait", lambda timeout_s: wait(timeout_s / 100)
    )  # once the first one is over
    clock.offset += 11
    for _ in range(500):
        if (await engine.stats()).snapshots == 0 and len(engine.core.cache.context_table) == 1:
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("it is still there")
    assert len(calls) >= 2
    assert [each.exc_info[0] for each in caplog.records if each.name == "jaxctx.engine"] == [RuntimeError]


async def test_settings_are_those_that_were_asked_for_last(engine: LocalEngine) -> None:
    """The opened context is a fork of what was saved, but has neither its labels nor its priority."""
    made = await engine.create(ME, CreateContextRequest(priority=3, labels={"k": "v"}))
    assert (made.priority, made.labels) == (3, {"k": "v"})
    await engine.fill(ME, made.context_id, [1, 2, 3])
    await engine.save(ME, SaveRequest(context_id=made.context_id, name="a"))
    opened = (await engine.open(ME, OpenRequest(name="a", priority=-1))).context
    assert (opened.priority, opened.labels, opened.snapshot) == (-1, {}, "a@1")
    (child,) = await engine.fork(ME, made.context_id)
    assert (child.priority, child.labels) == (3, {"k": "v"})


# --- attachments

ATTACHED = bytes(range(256)) * 3


@pytest.mark.parametrize("durable", [False, True])
async def test_an_attachment_and_the_tokens_come_back(two: list[LocalEngine], durable: bool) -> None:
    one, other = two
    tokens = list(range(1, 41))
    context = await filled(one, tokens)
    await one.fill(ME, context, [7, 8], defer=True)  # buffered
    saved = await one.save(ME, SaveRequest(context_id=context, name="a", durable=durable, attachment=ATTACHED))
    assert saved.attachment_bytes == len(ATTACHED)
    for engine in (one, other) if durable else (one,):
        plain = await engine.inspect_snapshot(ME, "a")
        assert (plain.snapshot.attachment_bytes, plain.attachment, plain.tokens) == (len(ATTACHED), b"", None)
        full = await engine.inspect_snapshot(ME, "a", 1, include_attachment=True, include_tokens=True)
        assert full.snapshot == plain.snapshot
        assert full.attachment == ATTACHED
        assert full.tokens == TokenIds(ids=[*tokens, 7, 8])
        for caller, name, version in ((Caller("other"), "a", None), (ME, "b", None), (ME, "a", 2)):
            with pytest.raises(NotFound) as error:
                await engine.inspect_snapshot(caller, name, version, include_attachment=True, include_tokens=True)
            assert error.value.reason == "SNAPSHOT_NOT_FOUND"


@pytest.mark.parametrize("durable", [False, True])
async def test_attachments_count_for_the_quota_of_bytes(make_engine: Any, tmp_path: Any, durable: bool) -> None:
    limit = 1 << 20
    config = replace(SMALL, max_snapshot_bytes_per_tenant=limit)
    engine = make_engine(config, store=str(tmp_path), whole=False)
    context = await filled(engine, [1] * 4)
    request = SaveRequest(context_id=context, name="a", durable=durable, attachment=b"x" * limit)
    with pytest.raises(ResourceExhausted, match="max_snapshot_bytes_per_tenant") as error:
        await engine.save(ME, request)
    assert error.value.reason == "QUOTA"
    await engine.save(ME, replace(request, attachment=b"x" * (limit // 2)))
    with pytest.raises(ResourceExhausted):
        await engine.save(ME, replace(request, name="b", attachment=b"x" * (limit // 2)))
    await engine.delete_snapshot(ME, "a")
    await engine.save(ME, replace(request, name="b", attachment=b"x" * (limit // 2)))


async def test_a_damaged_attachment_is_data_loss_and_the_context_opens(make_engine: Any, tmp_path: Any) -> None:
    engine = make_engine(SMALL, store=str(tmp_path), whole=False)
    context = await filled(engine, [1] * 40)
    await engine.save(ME, SaveRequest(context_id=context, name="a", durable=True, attachment=ATTACHED))
    (file,) = (file for file in (tmp_path / "packs").iterdir() if file.read_bytes() == ATTACHED)
    file.write_bytes(ATTACHED[::-1])
    with pytest.raises(DataLoss):
        await engine.inspect_snapshot(ME, "a", include_attachment=True)
    assert (await engine.inspect_snapshot(ME, "a", include_tokens=True)).tokens == TokenIds(ids=[1] * 40)
    assert (await engine.open(ME, OpenRequest(name="a"))).computed == 0


async def test_an_attachment_ends_with_its_version(make_engine: Any, tmp_path: Any) -> None:
    engine = make_engine(SMALL, store=str(tmp_path), whole=False)
    context = await filled(engine, [1] * 40)
    await engine.save(ME, SaveRequest(context_id=context, name="a", durable=True, attachment=ATTACHED))
    request = SaveRequest(context_id=context, name="a", durable=True, overwrite_version=1, attachment=b"new")
    await engine.save(ME, replace(request, max_versions=1))
    assert [each.version for each in await engine.history(ME, "a")] == [2]
    assert (await engine.inspect_snapshot(ME, "a", include_attachment=True)).attachment == b"new"
    engine.store.collect()
    assert not [file for file in (tmp_path / "packs").iterdir() if file.read_bytes() == ATTACHED]


async def test_a_context_is_saved_with_the_buffered_token_that_a_generation_leaves(two: list[LocalEngine]) -> None:
    """And once more: the second save writes the new pages only. Elsewhere no token with KV is computed again."""
    one, other = two
    context = await filled(one, list(range(1, 41)))
    request = GenerateRequest(context_id=context, sampling=SamplingParams(temperature=0.0), max_tokens=5)
    async for _ in one.generate(ME, request):
        pass
    info = (await one.inspect(ME, context)).context
    assert (info.seq_len, info.buffered_tokens) == (44, 1)
    await one.save(ME, SaveRequest(context_id=context, name="a", durable=True))
    opened = await other.open(ME, OpenRequest(name="a"))
    assert (opened.resident, opened.restored, opened.computed) == (0, 44, 0)
    assert opened.context.buffered_tokens == 1


async def test_counts_and_lists_of_many_names_keep_off_the_event_loop(make_engine: Any, monkeypatch: Any) -> None:
    engine: LocalEngine = make_engine(replace(SMALL, max_snapshots_per_tenant=9))
    threads: list[str] = []
    for name in ("usage", "list"):
        method = getattr(engine.store, name)

        def noted(*arguments: Any, method: Any = method) -> Any:
            threads.append(threading.current_thread().name)
            return method(*arguments)

        monkeypatch.setattr(engine.store, name, noted)
    context = await filled(engine, [1] * 4)
    await engine.save(ME, SaveRequest(context_id=context, name="a"))
    assert [each.name for each in await engine.snapshots(ME, "", "", 10)] == ["a"]
    assert len(threads) == 3
    assert threading.current_thread().name not in threads


# --- engines that share a store


async def test_lists_and_quotas_count_what_other_engines_saved_and_deleted(
    make_engine: Any, tmp_path: Any, clock: Any
) -> None:
    config = replace(SMALL, max_snapshots_per_tenant=2)
    one, other = (make_engine(config, store=str(tmp_path), whole=False, device=name) for name in ("a", "b"))
    contexts = [await filled(engine, [1] * 4) for engine in (one, other)]
    for name in ("a", "b"):
        await one.save(ME, SaveRequest(context_id=contexts[0], name=name, durable=True))
    with pytest.raises(ResourceExhausted):
        await other.save(ME, SaveRequest(context_id=contexts[1], name="c", durable=True))
    assert [each.name for each in await other.snapshots(ME, "", "", 10)] == ["a", "b"]
    await one.delete_snapshot(ME, "a")
    clock.offset += 10
    assert [each.name for each in await other.snapshots(ME, "", "", 10)] == ["b"]
    await other.save(ME, SaveRequest(context_id=contexts[1], name="c", durable=True))
    clock.offset += 10
    assert [each.name for each in await one.snapshots(ME, "", "", 10)] == ["b", "c"]
    with pytest.raises(ResourceExhausted):
        await one.save(ME, SaveRequest(context_id=contexts[0], name="d", durable=True))


async def test_room_that_another_engine_made_is_known_before_anything_is_refused(
    make_engine: Any, tmp_path: Any, clock: Any
) -> None:
    config = replace(SMALL, max_snapshots_per_tenant=1)
    one, other = (make_engine(config, store=str(tmp_path), whole=False, device=name) for name in ("a", "b"))
    await one.save(ME, SaveRequest(context_id=await filled(one, [1] * 4), name="a", durable=True))
    with pytest.raises(ResourceExhausted):
        await one.check_snapshot_quota(ME, 1)
    with pytest.raises(ResourceExhausted):
        await other.check_snapshot_quota(ME, 1)
    await other.delete_snapshot(ME, "a")
    clock.offset += 10
    await one.check_snapshot_quota(ME, 1)


async def test_a_save_stores_pages_again_that_another_engine_deleted(two: list[LocalEngine], monkeypatch: Any) -> None:
    one, other = two
    monkeypatch.setattr(other.store, "expire", lambda: None)  # no collection finds it out before
    tokens = list(range(1, 41))
    context = await filled(one, tokens)
    await one.save(ME, SaveRequest(context_id=context, name="a", durable=True))
    await other.snapshots(ME, "", "", 10)
    unlike = await filled(other, [9] * 20)
    await other.save(ME, SaveRequest(context_id=unlike, name="b", durable=True))  # reads which pages are stored
    await one.delete_snapshot(ME, "a")
    one.store.collect()
    like = await filled(other, tokens)
    await other.save(ME, SaveRequest(context_id=like, name="c", durable=True))
    await one.close(ME, context)
    await one.clear_cache(ME)
    opened = await one.open(ME, OpenRequest(name="c"))
    assert (opened.restored, opened.computed) == (40, 0)


async def test_a_take_whose_reply_is_lost_keeps_its_context(two: list[LocalEngine], monkeypatch: Any) -> None:
    """The swap lands, and the store then says that the generation was another."""
    one, other = two
    context = await filled(one, [1] * 40)
    await one.save(ME, SaveRequest(context_id=context, name="a", durable=True))
    objects = one.store._objects
    replace_object = objects.replace
    replies: list[bytes | None] = []

    def loses_the_first_reply(key: str, value: bytes | None, expected: bytes) -> bytes | None:
        replies.append(replace_object(key, value, expected))
        return replies[-1] if len(replies) > 1 else None

    monkeypatch.setattr(objects, "replies_may_be_lost", True)
    monkeypatch.setattr(objects, "replace", loses_the_first_reply)
    opened = await one.take(ME, OpenRequest(name="a"))
    assert (await one.inspect(ME, opened.context.context_id)).context.seq_len == 40
    for engine in (one, other):
        with pytest.raises(NotFound):
            await engine.open(ME, OpenRequest(name="a"))
