"""Operations on a server: contexts, snapshots, publications, models, administration. Through both clients."""

from __future__ import annotations

import asyncio
import math
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

import jaxctx
import jaxctx.client._sync.context
import jaxctx.client.context
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2


async def test_ids_that_nobody_chose_are_the_servers(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    children = await either(context.fork(2))
    assert not fake.requests["CreateContext"][0].HasField("context_id")
    assert (fake.requests["Fork"][0].n, fake.requests["Fork"][0].child_ids) == (2, [])
    assert fake.contexts.keys() == {context.id, *(child.id for child in children)}
    assert len(await either(context.fork())) == 1


async def test_a_taken_id_is_an_error(either: Any, client: Any) -> None:
    context = await either(client.create("hello", context_id="mine"))
    with pytest.raises(errors.AlreadyExists):
        await either(client.create(context_id="mine"))
    with pytest.raises(errors.AlreadyExists):
        await either(context.fork(ids=["mine"]))


async def test_create_empty_and_filled(either: Any, client: Any, fake: Any) -> None:
    empty = await either(client.create(context_id="mine", salt="s", priority=3, pinned=True, labels={"a": "b"}))
    assert (empty.id, empty.seq_len, empty.info.model_id, empty.info.labels) == ("mine", 0, "fake", {"of": "fake"})
    assert fake.requests["CreateContext"] == [
        pb.CreateContextRequest(context_id="mine", salt="s", priority=3, pinned=True, labels={"a": "b"})
    ]
    filled = await either(client.create("hello"))
    assert (filled.seq_len, filled.page_size, len(filled.id)) == (5, 4, 32)
    assert filled.info.parent_id is None
    assert filled.info.state is jaxctx.ContextState.IDLE
    assert filled.info.created_at.tzinfo is not None


async def test_a_create_whose_fill_fails_leaves_nothing(either: Any, client: Any, fake: Any) -> None:
    fake.fail_before["Fill"] = [errors.ResourceExhausted("full", retry_after_s=2.0)]
    with pytest.raises(errors.ResourceExhausted) as raised:
        await either(client.create("hello"))
    assert raised.value.retry_after_s == 2.0
    assert fake.contexts == {}
    assert len(fake.requests["CloseContext"]) == 1


async def test_a_create_whose_fill_fails_does_not_wait_for_a_server_that_does_not_answer(
    either: Any, client: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jaxctx.client.context, jaxctx.client._sync.context):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    may_go_on, went_on, context_message = threading.Event(), threading.Event(), fake.context_message

    def context_message_after_a_pause(context_id: str) -> Any:
        if fake.requests["CloseContext"]:
            may_go_on.wait(30)
            went_on.set()
        return context_message(context_id)

    fake.context_message = context_message_after_a_pause
    fake.fail_before["Fill"] = [errors.ResourceExhausted("full")]
    try:
        with pytest.raises(errors.ResourceExhausted):
            await either(client.create("hello", timeout_s=10.0))
        assert not went_on.is_set()
    finally:
        may_go_on.set()


async def test_open_list_refresh(either: Any, client: Any, fake: Any) -> None:
    for i in range(5):
        await either(client.create("x" * i, context_id=f"c{i}") if i else client.create(context_id="c0"))
    other = await either(client.context("c3"))
    fake.contexts["c3"].append(1)
    assert other.seq_len == 3
    assert (await either(other.refresh())).seq_len == 4
    assert [(c.id, c.seq_len) for c in await either.list(client.contexts(page=2))] == [
        ("c0", 0), ("c1", 1), ("c2", 2), ("c3", 4), ("c4", 4),
    ]  # fmt: skip
    assert len(fake.requests["ListContexts"]) == 3
    with pytest.raises(errors.NotFound):
        await either(client.context("none"))


async def test_models_and_tokens(either: Any, client: Any, fake: Any) -> None:
    a, b = await either(client.models())
    assert (a.model_id, a.parameters, b.model_id, b.vocab_size) == ("a", 5, "b", 7)
    assert (await either(client.model())).page_size == 4
    with pytest.raises(errors.NotFound) as raised:
        await either(client.model("none"))
    assert raised.value.reason == "MODEL_NOT_FOUND"
    assert await either(client.tokenize("hi", add_special_tokens=False)) == [104, 105]
    assert await either(client.detokenize([104, 105], skip_special_tokens=True)) == "hi"
    assert fake.requests["Tokenize"][0].HasField("add_special_tokens")
    assert fake.requests["Detokenize"][0].skip_special_tokens
    chat = await either(client.apply_chat_template([{"role": "user", "content": "hi"}]))
    assert chat == jaxctx.RenderedChat(text="<user>hi", tokens=(1, 2))


async def test_administration(either: Any, client: Any) -> None:
    total = await either(client.stats())
    assert (total.pages_total, total.pages_free, total.draining) == (30, 9, False)
    first, _ = await either(client.engines())
    assert (first.info.mesh, first.stats.draining) == ({"data": 1, "model": 2}, True)
    assert await either(client.clear_cache()) == 12
    assert await either(client.drain()) is None


async def test_save_open_and_take(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    saved = await either(context.save("n", durable=True, ttl_s=30.5, sliding=True, labels={"k": "v"}))
    assert fake.requests["Save"] == [
        snapshot_service_pb2.SaveRequest(
            context_id=context.id,
            name="n",
            durable=True,
            ttl={"duration": {"seconds": 30, "nanos": 500_000_000}, "sliding": True},
            labels={"k": "v"},
        )
    ]
    assert (saved.name, saved.version, saved.latest, saved.tokens, saved.size_bytes) == ("n", 1, True, 5, 2**40)
    assert saved.created_at == datetime.fromtimestamp(60, UTC)
    assert saved.expiry == jaxctx.Expiry(at=datetime.fromtimestamp(90, UTC), seconds=30.5, sliding=True)
    with pytest.raises(errors.AlreadyExists):
        await either(context.save("n"))
    with pytest.raises(errors.Aborted) as raised:
        await either(context.save("n", overwrite_version=7))
    assert raised.value.reason == "VERSION_MISMATCH"
    await either(context.fill("!"))
    assert (await either(context.save("n", overwrite_version=1))).version == 2

    first = await either(
        client.open("n", version=1, context_id="mine", priority=2, pinned=True, pin_s=1, ttl_s=2, recompute=True)
    )
    assert (first.id, first.seq_len, first.info.snapshot) == ("mine", 5, "n@1")
    assert (first.opened.resident, first.opened.restored, first.opened.computed) == (2, 1, 2)
    assert first.info.expiry.seconds == 30.5
    assert fake.requests["Open"] == [
        snapshot_service_pb2.OpenRequest(
            name="n",
            version=1,
            context_id="mine",
            priority=2,
            pinned=True,
            pin_for={"seconds": 1},
            ttl={"duration": {"seconds": 2}},
            recompute=True,
        )
    ]
    latest = await either(client.open("n"))
    assert (latest.seq_len, len(latest.id), latest.opened.cached) == (6, 32, 3)
    taken = await either(client.take("n"))
    assert taken.seq_len == 6
    for use in (client.take, client.open, client.snapshot):
        with pytest.raises(errors.NotFound) as missing:
            await either(use("n"))
        assert missing.value.reason == "SNAPSHOT_NOT_FOUND"


async def test_nothing_is_saved_opened_or_taken_twice(either: Any, client: Any, fake: Any) -> None:
    await either((await either(client.create("hello"))).save("n"))
    opened = await either(client.open("n"))
    with pytest.raises(errors.AlreadyExists):
        await either(client.open("n", context_id=opened.id))
    calls = {"Save": lambda: opened.save("m"), "Open": lambda: client.open("n"), "Take": lambda: client.take("n")}
    for name, call in calls.items():
        fake.fail_before[name] = [errors.Unavailable("gone")]
        with pytest.raises(errors.Unavailable):
            await either(call())


async def test_listing_changing_and_deleting(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    for name in ("a", "b1", "b2", "b3"):
        await either(context.save(name))
    await either(context.save("a", overwrite_version=1))
    assert [s.name for s in await either.list(client.snapshots(prefix="b", page=2))] == ["b1", "b2", "b3"]
    assert len(await either.list(client.snapshots())) == 4
    assert [s.version for s in await either(client.history("a"))] == [2, 1]
    assert (await either(client.snapshot("a", version=1))).latest is False
    await either(client.update_snapshot("a", ttl_s=math.inf))
    assert (await either(client.update_snapshot("a", labels={}))).labels == {"of": "fake"}
    forever, labels = fake.requests["UpdateSnapshot"]
    assert (forever.HasField("ttl"), forever.ttl.HasField("duration"), forever.HasField("labels")) == (
        True,
        False,
        False,
    )
    assert (labels.HasField("ttl"), labels.HasField("labels")) == (False, True)
    assert not labels.HasField("version")
    await either(client.update_snapshot("a", version=1, ttl_s=5))
    assert fake.requests["UpdateSnapshot"][2].version == 1
    assert await either(client.delete_snapshot("a")) == 2
    assert not fake.requests["DeleteSnapshot"][0].HasField("version")


async def test_publications(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    published = await either(context.publish(ttl_s=5, labels={"k": "v"}))
    assert (published.publication_id, published.tokens, published.expiry) == ("p", 4, None)
    assert fake.requests["Publish"][0].ttl.duration.seconds == 5
    assert [each.publication_id for each in await either(client.publications())] == ["p"]
    changed = await either(client.update_publication("p", ttl_s=math.inf, labels={"k": "w"}))
    assert changed.labels == {"k": "w"}
    asked = fake.requests["UpdatePublication"][0]
    assert (asked.HasField("ttl"), asked.ttl.HasField("duration")) == (True, False)
    await either(client.unpublish("p"))
    with pytest.raises(errors.NotFound):
        await either(client.unpublish("q"))


async def test_watch_until_left(either: Any, client: Any, fake: Any) -> None:
    await either(client.create("hello", context_id="a"))
    stream = client.watch()
    exists, expired, later = [await either.next(stream) for _ in range(3)]
    assert (exists.change, exists.context_id, exists.context.seq_len) == (jaxctx.ContextChange.EXISTS, "a", 5)
    assert exists.at == datetime.fromtimestamp(60, UTC)
    assert (expired.change, expired.context_id, expired.context) == (jaxctx.ContextChange.EXPIRED, "gone", None)
    assert later.change is jaxctx.ContextChange.CHANGED  # one that this client does not know yet
    await either(stream.close() if either.kind == "blocking" else stream.aclose())
    assert await asyncio.to_thread(fake.cancelled.wait, 5)


async def test_an_error_of_a_watch(either: Any, client: Any, fake: Any) -> None:
    fake.fail_after["WatchContexts"] = [errors.Unavailable("draining", reason="DRAINING")]
    with pytest.raises(errors.Unavailable) as raised:
        await either.list(client.watch())
    assert raised.value.reason == "DRAINING"
    with pytest.raises(errors.DeadlineExceeded):
        await either.list(client.watch(timeout_s=0.2))
    assert pb.WatchContextsRequest() in fake.requests["WatchContexts"]
