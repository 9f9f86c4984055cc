"""Every method of SnapshotService, and what came to contexts with it: what reaches the engine, and what comes back."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.types import ForwardOutput, OpenRequest, SamplingParams, SaveRequest, Ttl, UpdateContextRequest
from jaxctx.v1 import context_pb2, forward_pb2, lifetime_pb2, snapshot_pb2
from jaxctx.v1 import context_service_pb2 as contexts
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.grpc.service import LONGEST_S

MINUTE = {"seconds": 60, "nanos": 500_000_000}
EXPIRY = lifetime_pb2.Expiry(
    at={"seconds": 1_700_000_600, "nanos": 500_000_000},
    duration={"seconds": 300, "nanos": 250_000_000},
    sliding=True,
)
SNAPSHOT = snapshot_pb2.Snapshot(
    name="n",
    version=3,
    latest=True,
    durable=True,
    tokens=7,
    seq_len=6,
    pages=2,
    size_bytes=2**40,
    model_revision="r1",
    salt="s",
    manual_commit=True,
    created_at={"seconds": 1_700_000_000, "nanos": 250_000_000},
    expiry=EXPIRY,
    context_id="a",
    parent_version=2,
    labels={"k": "v"},
)


async def create(door: Any, **fields: Any) -> Any:
    return (await door.contexts.CreateContext(contexts.CreateContextRequest(**fields))).context


# --- what contexts gained ---------------------------------------------------------------------------------------------


async def test_time_to_live_and_pins_of_contexts(door: Any) -> None:
    context = await create(door, pinned=True, pin_for=MINUTE, ttl={"duration": {"nanos": 1}, "sliding": True})
    request = door.last("create")[1]
    assert (request.ttl, request.pin_s) == (Ttl(1e-9, sliding=True), 60.5)
    assert context.expiry == EXPIRY
    assert context.pinned_until.seconds == 1_700_000_060
    plain = await create(door, context_id="a", ttl={})
    assert door.last("create")[1].ttl == Ttl(None)
    assert not plain.HasField("expiry")
    assert not plain.HasField("pinned_until")

    update = contexts.UpdateContextRequest
    await door.contexts.UpdateContext(update(context_id="a", ttl={"duration": MINUTE}, pinned=True, pin_for=MINUTE))
    assert door.last("update")[1] == ("a", UpdateContextRequest(pinned=True, pin_s=60.5, ttl=Ttl(60.5)))
    await door.contexts.UpdateContext(update(context_id="a", ttl={}))
    assert door.last("update")[1] == ("a", UpdateContextRequest(ttl=Ttl(None)))  # for ever, which is not: no change


async def test_forks_say_where_they_began(door: Any) -> None:
    await create(door, context_id="a")
    response = await door.contexts.Fork(contexts.ForkRequest(context_id="a"))
    assert (response.contexts[0].forked_at, response.contexts[0].snapshot) == (3, "")


async def test_forward(door: Any) -> None:
    await create(door, context_id="a")
    request = contexts.ForwardRequest(
        context_id="a",
        tokens=[1, 2, 511],
        positions=[9_999, 0, 5],
        masks=[{"bounds": [0, 1]}, {}, {"bounds": [0, 1, 2, 3]}],
        keep_working=True,
        outputs=[
            {"index": 2, "sample": {"temperature": 0, "top_k": 3, "seed": 4}, "logprob_ids": [0, 511], "top": 64},
            {"index": 0, "logits": True, "entropy": True},
        ],
    )
    response = await door.contexts.Forward(request)
    asked = door.last("forward")[1]
    assert (list(asked.tokens), list(asked.positions), asked.keep_working) == ([1, 2, 511], [9_999, 0, 5], True)
    assert list(asked.masks) == [((0, 1),), (), ((0, 1), (2, 3))]
    assert list(asked.outputs) == [
        ForwardOutput(index=2, sample=SamplingParams(temperature=0.0, top_k=3, seed=4), logprob_ids=(0, 511), top=64),
        ForwardOutput(index=0, logits=True, entropy=True),
    ]
    plain, full = response.outputs
    assert plain == forward_pb2.ForwardOutputResult(index=2)
    assert [plain.HasField(name) for name in ("token_id", "seed", "entropy")] == [False] * 3
    assert [full.HasField(name) for name in ("token_id", "seed", "entropy")] == [True] * 3  # zeros that were said
    assert list(full.logprobs) == [-0.5, -1.5]
    assert [(top.token_id, top.logprob) for top in full.top] == [(7, -0.25), (0, -2.0)]
    assert struct.unpack("<512f", full.logits) == (1.0,) * 512
    assert response.context.seq_len == 3

    await door.contexts.Forward(contexts.ForwardRequest(context_id="a", tokens=[1]))
    asked = door.last("forward")[1]
    assert (list(asked.positions), list(asked.masks), list(asked.outputs)) == ([], [], [])


async def test_compare(door: Any) -> None:
    response = await door.contexts.Compare(contexts.CompareRequest(a="x", b="y"))
    assert door.last("compare")[1] == ("x", "y")
    assert response == contexts.CompareResponse(common_tokens=5, shared_pages=1, length_a=6, length_b=7)


async def test_watch_tells_every_change_until_the_reader_leaves(door: Any) -> None:
    await create(door, context_id="a")
    call = door.contexts.WatchContexts(contexts.WatchContextsRequest())
    events = [await call.read() for _ in range(1 + 9)]
    changes = contexts.ContextChange.keys()
    assert changes[0] == "CONTEXT_CHANGE_UNSPECIFIED"
    assert [contexts.ContextChange.Name(event.change) for event in events] == [changes[1], *changes[1:]]
    assert (events[0].context_id, events[0].context.context_id) == ("a", "a")
    assert (events[0].at.seconds, events[0].at.nanos) == (1_700_000_000, 250_000_000)
    assert not events[1].HasField("context")
    assert events[-1].context_id == ""
    call.cancel()
    async with asyncio.timeout(120):
        while "watch" not in door.engine.cancelled:
            await asyncio.sleep(0.005)


# --- SnapshotService --------------------------------------------------------------------------------------------------


async def test_save(door: Any) -> None:
    response = await door.snapshots.Save(
        pb.SaveRequest(
            context_id="a",
            name="chat/é",
            durable=True,
            overwrite_version=2,
            ttl={"duration": MINUTE, "sliding": True},
            labels={"k": "v"},
        )
    )
    caller, asked = door.last("save")
    assert caller == Caller(deadline=1000 + LONGEST_S)
    assert asked == SaveRequest(
        context_id="a", name="chat/é", durable=True, overwrite_version=2, ttl=Ttl(60.5, True), labels={"k": "v"}
    )
    assert response.snapshot == SNAPSHOT
    await door.snapshots.Save(pb.SaveRequest(context_id="a", name="n"))
    assert door.last("save")[1] == SaveRequest(context_id="a", name="n")


@pytest.mark.parametrize("take", [False, True])
async def test_open_and_take(door: Any, take: bool) -> None:
    settings: dict[str, Any] = {
        "name": "n",
        "recompute": True,
        "context_id": "mine",
        "priority": -3,
        "pinned": True,
        "pin_for": MINUTE,
        "ttl": {"duration": MINUTE},
    }
    if take:
        response = await door.snapshots.Take(pb.TakeRequest(**settings))
    else:
        response = await door.snapshots.Open(pb.OpenRequest(version=2, **settings))
    request, taken = door.last("open")[1]
    assert taken == take
    assert request == OpenRequest(
        name="n",
        version=None if take else 2,
        recompute=True,
        context_id="mine",
        priority=-3,
        pinned=True,
        pin_s=60.5,
        ttl=Ttl(60.5),
    )
    assert (response.resident, response.restored, response.computed) == (4, 2, 1)
    assert (response.context.context_id, response.context.snapshot) == ("mine", "n@3")
    assert response.context.state == context_pb2.CONTEXT_STATE_IDLE
    await (door.snapshots.Take(pb.TakeRequest(name="n")) if take else door.snapshots.Open(pb.OpenRequest(name="n")))
    assert door.last("open")[1] == (OpenRequest(name="n"), take)


async def test_reading_changing_and_deleting(door: Any) -> None:
    response = await door.snapshots.GetSnapshot(pb.GetSnapshotRequest(name="n"))
    assert door.last("snapshot")[1] == ("n", None)
    assert not response.snapshot.HasField("expiry")
    await door.snapshots.GetSnapshot(pb.GetSnapshotRequest(name="n", version=3))
    assert door.last("snapshot")[1] == ("n", 3)

    await door.snapshots.UpdateSnapshot(pb.UpdateSnapshotRequest(name="n", ttl={}))
    assert door.last("update_snapshot")[1] == ("n", None, Ttl(None), None)
    request = pb.UpdateSnapshotRequest(name="n", version=3, labels={"labels": {"k": "v"}})
    changed = await door.snapshots.UpdateSnapshot(request)
    assert door.last("update_snapshot")[1] == ("n", 3, None, {"k": "v"})
    assert changed.snapshot == SNAPSHOT

    deleted = await door.snapshots.DeleteSnapshot(pb.DeleteSnapshotRequest(name="n"))
    assert (door.last("delete_snapshot")[1], deleted.versions_deleted) == (("n", None), 2)
    await door.snapshots.DeleteSnapshot(pb.DeleteSnapshotRequest(name="n", version=1))
    assert door.last("delete_snapshot")[1] == ("n", 1)


async def test_lists_come_in_pages(door: Any) -> None:
    names = await pages(door.snapshots.ListSnapshots, pb.ListSnapshotsRequest(prefix="n", limit=2))
    assert [[snapshot.name for snapshot in page.snapshots] for page in names] == [["n", "na"], ["nb", "o"]]
    assert door.last("snapshots")[1] == ("n", "na", 3)
    versions = await pages(door.snapshots.ListSnapshotVersions, pb.ListSnapshotVersionsRequest(name="n", limit=3))
    assert [[snapshot.version for snapshot in page.snapshots] for page in versions] == [[12, 11, 3], [1]]
    assert door.last("history")[1] == "n"
    published = await pages(door.snapshots.ListPublications, pb.ListPublicationsRequest(limit=2))
    ids = [[each.publication_id for each in page.publications] for page in published]
    assert ids == [["p1", "p2"], ["p3"]]


async def pages(method: Any, request: Any) -> list[Any]:
    answers = [await method(request)]
    while answers[-1].next_page_token:
        request.page_token = answers[-1].next_page_token
        answers.append(await method(request))
    return answers


async def test_publish_and_unpublish(door: Any) -> None:
    response = await door.snapshots.Publish(
        pb.PublishRequest(context_id="a", ttl={"duration": MINUTE}, labels={"k": "v"})
    )
    assert door.last("publish")[1] == ("a", Ttl(60.5), {"k": "v"})
    assert response.publication == snapshot_pb2.Publication(
        publication_id="p1",
        tokens=4,
        pages=1,
        salt="s",
        created_at={"seconds": 1_700_000_000, "nanos": 250_000_000},
        labels={"k": "v"},
    )
    wanted = pb.UpdatePublicationRequest(publication_id="p1", ttl={}, labels={})
    changed = await door.snapshots.UpdatePublication(wanted)
    assert door.last("update_publication")[1] == ("p1", Ttl(None), {})
    assert changed.publication == response.publication
    await door.snapshots.Unpublish(pb.UnpublishRequest(publication_id="p1"))
    assert door.last("unpublish")[1] == "p1"
