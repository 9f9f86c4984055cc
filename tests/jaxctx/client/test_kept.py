"""Snapshots, publications, time to live, passes, comparing and watching, through both clients."""

from __future__ import annotations

import asyncio
import math
import struct
from datetime import UTC, datetime
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2

from .conftest import VOCABULARY, distribution


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


async def test_time_to_live_and_pins(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(ttl_s=0.25, sliding=True, pinned=True, pin_s=60))
    await either(context.update(ttl_s=math.inf))
    await either(context.update(priority=1))
    (created,), (forever, same) = fake.requests["CreateContext"], fake.requests["UpdateContext"]
    assert (created.ttl.duration.nanos, created.ttl.sliding, created.pin_for.seconds) == (250_000_000, True, 60)
    assert (forever.HasField("ttl"), forever.ttl.HasField("duration")) == (True, False)
    assert [same.HasField(name) for name in ("ttl", "pin_for", "pinned", "labels")] == [False] * 4
    for unknown in (client.create, context.update, lambda **options: client.open("n", **options)):
        with pytest.raises(TypeError, match="tll_s"):
            await either(unknown(tll_s=5))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ttl_s": "soon"}, "ttl.duration"),
        ({"ttl_s": math.nan}, "ttl.duration"),
        ({"ttl_s": -math.inf}, "ttl.duration"),
        ({"ttl_s": 1e300}, "ttl.duration"),
        ({"pin_s": math.inf, "pinned": True}, "pin_for"),
        ({"sliding": True}, "ttl.sliding"),
    ],
)
async def test_times_that_no_message_can_hold(either: Any, client: Any, options: Any, field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(client.create(**options))
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_forward(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create(tokens=[1, 2]))
    result = await either(
        context.forward(
            [3, 4, 5],
            positions=[7, 8, 9],
            masks=[[(0, 3)], [], [(0, 1), (4, 5)]],
            keep_working=True,
            outputs=[
                jaxctx.ForwardOutputOptions(index=2, sample={"temperature": 0, "seed": 0}, logprob_ids=[6, 1], top=2),
                jaxctx.ForwardOutputOptions(index=0, logits=True, entropy=True),
            ],
        )
    )
    (request,) = fake.requests["Forward"]
    assert (list(request.tokens), list(request.positions), request.keep_working) == ([3, 4, 5], [7, 8, 9], True)
    assert [list(mask.bounds) for mask in request.masks] == [[0, 3], [], [0, 1, 4, 5]]
    assert request.outputs[0].sample.HasField("temperature")
    assert not request.outputs[1].HasField("sample")
    last, first = result.outputs
    expected = distribution([1, 5])
    assert last.logprobs == pytest.approx([expected[6], expected[1]])
    assert [token for token, _ in last.top] == sorted(range(VOCABULARY), key=lambda i: -expected[i])[:2]
    assert (last.token_id, last.seed, last.logits, last.entropy) == (last.top[0][0], 0, b"", None)
    assert (first.token_id, first.seed, first.logprobs, first.top) == (None, None, (), ())
    assert struct.unpack(f"<{VOCABULARY}f", first.logits) == pytest.approx(distribution([1, 2, 3]))
    assert first.entropy > 0
    assert (context.seq_len, context.info.working_tokens) == (5, 5)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tokens": [2**40]}, "tokens"),
        ({"positions": ["a"]}, "positions"),
        ({"masks": [5]}, "masks[0]"),
        ({"masks": [[], [(1, 2, 3)]]}, "masks[1]"),
        ({"outputs": [jaxctx.ForwardOutputOptions(), jaxctx.ForwardOutputOptions(index=2**40)]}, "outputs[1].index"),
        ({"outputs": [jaxctx.ForwardOutputOptions(sample={"temperature": "hot"})]}, "outputs[0].sample.temperature"),  # type: ignore[typeddict-item]
    ],
)
async def test_passes_that_no_message_can_hold(either: Any, client: Any, arguments: Any, field: str) -> None:
    context = await either(client.create())
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(context.forward(**{"tokens": [1], **arguments}))
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_compare(either: Any, client: Any) -> None:
    a, b = await either(client.create("hello")), await either(client.create("help"))
    expected = jaxctx.Comparison(common_tokens=3, shared_pages=1, length_a=5, length_b=4)
    assert await either(a.compare(b)) == await either(a.compare(b.id)) == expected


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
