"""Every method of SnapshotService, and what came to contexts with it: what reaches the engine, and what comes back."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.types import ForwardOutputParams, OpenRequest, SamplingParams, SaveRequest, Ttl, UpdateContextRequest
from jaxctx.v1 import context_pb2, forward_pb2, lifetime_pb2, snapshot_pb2
from jaxctx.v1 import context_service_pb2 as contexts
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.services import MAX_DEADLINE_S

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


async def create(grpc_server: Any, **fields: Any) -> Any:
    return (await grpc_server.contexts.CreateContext(contexts.CreateContextRequest(**fields))).context


# --- what contexts gained ---------------------------------------------------------------------------------------------


async def test_time_to_live_and_pins_of_contexts(grpc_server: Any) -> None:
    context = await create(grpc_server, pinned=True, pin_for=MINUTE, ttl={"duration": {"nanos": 1}, "sliding": True})
    request = grpc_server.last("create")[1]
    assert (request.ttl, request.pin_s) == (Ttl(1e-9, sliding=True), 60.5)
    assert context.expiry == EXPIRY
    assert context.pinned_until.seconds == 1_700_000_060
    plain = await create(grpc_server, context_id="a", ttl={})
    assert grpc_server.last("create")[1].ttl == Ttl(None)
    assert not plain.HasField("expiry")
    assert not plain.HasField("pinned_until")

    update = contexts.UpdateContextRequest
    await grpc_server.contexts.UpdateContext(
        update(context_id="a", ttl={"duration": MINUTE}, pinned=True, pin_for=MINUTE)
    )
    assert grpc_server.last("update")[1] == ("a", UpdateContextRequest(pinned=True, pin_s=60.5, ttl=Ttl(60.5)))
    await grpc_server.contexts.UpdateContext(update(context_id="a", ttl={}))
    assert grpc_server.last("update")[1] == (
        "a",
        UpdateContextRequest(ttl=Ttl(None)),
    )  # for ever, which is not: no change


async def test_forks_say_where_they_began(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    response = await grpc_server.contexts.Fork(contexts.ForkRequest(context_id="a"))
    assert (response.contexts[0].forked_at, response.contexts[0].snapshot) == (3, "")


async def test_forward(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
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
    response = await grpc_server.contexts.Forward(request)
    asked = grpc_server.last("forward")[1]
    assert (list(asked.tokens), list(asked.positions), asked.keep_working) == ([1, 2, 511], [9_999, 0, 5], True)
    assert list(asked.masks) == [((0, 1),), (), ((0, 1), (2, 3))]
    assert list(asked.outputs) == [
        ForwardOutputParams(
            index=2, sample=SamplingParams(temperature=0.0, top_k=3, seed=4), logprob_ids=(0, 511), top=64
        ),
        ForwardOutputParams(index=0, logits=True, entropy=True),
    ]
    plain, full = response.outputs
    assert plain == forward_pb2.ForwardOutputResult(index=2)
    assert [plain.HasField(name) for name in ("token_id", "seed", "entropy")] == [False] * 3
    assert [full.HasField(name) for name in ("token_id", "seed", "entropy")] == [True] * 3  # zeros that were said
    assert list(full.logprobs) == [-0.5, -1.5]
    assert [(top.token_id, top.logprob) for top in full.top] == [(7, -0.25), (0, -2.0)]
    assert struct.unpack("<512f", full.logits) == (1.0,) * 512
    assert response.context.seq_len == 3

    await grpc_server.contexts.Forward(contexts.ForwardRequest(context_id="a", tokens=[1]))
    asked = grpc_server.last("forward")[1]
    assert (list(asked.positions), list(asked.masks), list(asked.outputs)) == ([], [], [])


async def test_compare(grpc_server: Any) -> None:
    response = await grpc_server.contexts.Compare(contexts.CompareRequest(a="x", b="y"))
    assert grpc_server.last("compare")[1] == ("x", "y")
    assert response == contexts.CompareResponse(common_tokens=5, shared_pages=1, length_a=6, length_b=7)


async def test_watch_tells_every_change_until_the_reader_leaves(grpc_server: Any) -> None:
    await create(grpc_server, context_id="a")
    call = grpc_server.contexts.WatchContexts(contexts.WatchContextsRequest())
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
        while "watch" not in grpc_server.engine.cancelled:
            await asyncio.sleep(0.005)


# --- SnapshotService --------------------------------------------------------------------------------------------------


async def test_save(grpc_server: Any) -> None:
    response = await grpc_server.snapshots.Save(
        pb.SaveRequest(
            context_id="a",
            name="chat/é",
            durable=True,
            overwrite_version=2,
            ttl={"duration": MINUTE, "sliding": True},
            labels={"k": "v"},
        )
    )
    caller, asked = grpc_server.last("save")
    assert caller == Caller(deadline=1000 + MAX_DEADLINE_S, of_cluster=True)
    assert asked == SaveRequest(
        context_id="a", name="chat/é", durable=True, overwrite_version=2, ttl=Ttl(60.5, True), labels={"k": "v"}
    )
    assert response.snapshot == SNAPSHOT
    await grpc_server.snapshots.Save(pb.SaveRequest(context_id="a", name="n"))
    assert grpc_server.last("save")[1] == SaveRequest(context_id="a", name="n")


@pytest.mark.parametrize("take", [False, True])
async def test_open_and_take(grpc_server: Any, take: bool) -> None:
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
        response = await grpc_server.snapshots.Take(pb.TakeRequest(**settings))
    else:
        response = await grpc_server.snapshots.Open(pb.OpenRequest(version=2, **settings))
    request, taken = grpc_server.last("open")[1]
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
    await (
        grpc_server.snapshots.Take(pb.TakeRequest(name="n"))
        if take
        else grpc_server.snapshots.Open(pb.OpenRequest(name="n"))
    )
    assert grpc_server.last("open")[1] == (OpenRequest(name="n"), take)


async def test_reading_changing_and_deleting(grpc_server: Any) -> None:
    response = await grpc_server.snapshots.GetSnapshot(pb.GetSnapshotRequest(name="n"))
    assert grpc_server.last("inspect_snapshot")[1] == ("n", None, False, False)
    assert not response.snapshot.HasField("expiry")
    await grpc_server.snapshots.GetSnapshot(pb.GetSnapshotRequest(name="n", version=3))
    assert grpc_server.last("inspect_snapshot")[1] == ("n", 3, False, False)

    await grpc_server.snapshots.UpdateSnapshot(pb.UpdateSnapshotRequest(name="n", ttl={}))
    assert grpc_server.last("update_snapshot")[1] == ("n", None, Ttl(None), None)
    request = pb.UpdateSnapshotRequest(name="n", version=3, labels={"labels": {"k": "v"}})
    changed = await grpc_server.snapshots.UpdateSnapshot(request)
    assert grpc_server.last("update_snapshot")[1] == ("n", 3, None, {"k": "v"})
    assert changed.snapshot == SNAPSHOT

    deleted = await grpc_server.snapshots.DeleteSnapshot(pb.DeleteSnapshotRequest(name="n"))
    assert (grpc_server.last("delete_snapshot")[1], deleted.versions_deleted) == (("n", None), 2)
    await grpc_server.snapshots.DeleteSnapshot(pb.DeleteSnapshotRequest(name="n", version=1))
    assert grpc_server.last("delete_snapshot")[1] == ("n", 1)


async def test_lists_come_in_pages(grpc_server: Any) -> None:
    names = await pages(grpc_server.snapshots.ListSnapshots, pb.ListSnapshotsRequest(prefix="n", limit=2))
    assert [[snapshot.name for snapshot in page.snapshots] for page in names] == [["n", "na"], ["nb", "o"]]
    assert grpc_server.last("snapshots")[1] == ("n", "na", 3)
    versions = await pages(
        grpc_server.snapshots.ListSnapshotVersions, pb.ListSnapshotVersionsRequest(name="n", limit=3)
    )
    assert [[snapshot.version for snapshot in page.snapshots] for page in versions] == [[12, 11, 3], [1]]
    assert grpc_server.last("history")[1] == "n"
    published = await pages(grpc_server.snapshots.ListPublications, pb.ListPublicationsRequest(limit=2))
    ids = [[each.publication_id for each in page.publications] for page in published]
    assert ids == [["p1", "p2"], ["p3"]]


async def pages(method: Any, request: Any) -> list[Any]:
    answers = [await method(request)]
    while answers[-1].next_page_token:
        request.page_token = answers[-1].next_page_token
        answers.append(await method(request))
    return answers


async def test_publish_and_unpublish(grpc_server: Any) -> None:
    response = await grpc_server.snapshots.Publish(
        pb.PublishRequest(context_id="a", ttl={"duration": MINUTE}, labels={"k": "v"})
    )
    assert grpc_server.last("publish")[1] == ("a", Ttl(60.5), {"k": "v"})
    assert response.publication == snapshot_pb2.Publication(
        publication_id="p1",
        tokens=4,
        pages=1,
        salt="s",
        created_at={"seconds": 1_700_000_000, "nanos": 250_000_000},
        labels={"k": "v"},
    )
    wanted = pb.UpdatePublicationRequest(publication_id="p1", ttl={}, labels={})
    changed = await grpc_server.snapshots.UpdatePublication(wanted)
    assert grpc_server.last("update_publication")[1] == ("p1", Ttl(None), {})
    assert changed.publication == response.publication
    await grpc_server.snapshots.Unpublish(pb.UnpublishRequest(publication_id="p1"))
    assert grpc_server.last("unpublish")[1] == "p1"
