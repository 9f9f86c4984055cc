"""SnapshotService on an engine: what the engine is asked for, and how its answers come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxctx import errors, types
from jaxctx.engine.interface import Caller
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.snapshots import LocalSnapshotService
from tests.server.fake_engine import FakeEngine

ALICE = Caller("alice", 1060.0)
TTL = {"duration": {"seconds": 5}, "sliding": True}


@pytest.fixture
def service(lifecycle: ServerLifecycle) -> LocalSnapshotService:
    return LocalSnapshotService(lifecycle)


def last(engine: FakeEngine) -> Any:
    """Name, caller and argument of the engine's latest call."""
    return engine.calls[-1]


async def test_a_context_is_saved(service: LocalSnapshotService, engine: FakeEngine) -> None:
    request = pb.SaveRequest(context_id="x", name="n", durable=True, overwrite_version=2, ttl=TTL, labels={"a": "b"})
    response = await service.save(ALICE, request)
    assert (response.snapshot.name, response.snapshot.version, response.snapshot.size_bytes) == ("n", 3, 2**40)
    asked = types.SaveRequest(
        context_id="x",
        name="n",
        durable=True,
        overwrite_version=2,
        ttl=types.Ttl(5.0, sliding=True),
        labels={"a": "b"},
    )
    assert last(engine) == ("save", ALICE, asked)


@pytest.mark.parametrize("take", [False, True])
async def test_a_snapshot_is_opened_or_taken(service: LocalSnapshotService, engine: FakeEngine, take: bool) -> None:
    response: Any
    if take:
        response = await service.take(ALICE, pb.TakeRequest(name="n", context_id="x", priority=3))
    else:
        response = await service.open(ALICE, pb.OpenRequest(name="n", context_id="x", priority=3))
    assert (response.context.context_id, response.restored, response.computed) == ("x", 2, 1)
    name, caller, (asked, taken) = last(engine)
    assert (name, caller, taken) == ("open", ALICE, take)
    assert (asked.name, asked.context_id, asked.priority, asked.version) == ("n", "x", 3, None)


@pytest.mark.parametrize(("fields", "version"), [({}, None), ({"version": 2}, 2)])
async def test_calls_about_one_version_or_the_latest_or_all(
    service: LocalSnapshotService, engine: FakeEngine, fields: Any, version: int | None
) -> None:
    found = await service.get_snapshot(ALICE, pb.GetSnapshotRequest(name="n", **fields))
    assert found.snapshot.name == "n"
    assert last(engine) == ("inspect_snapshot", ALICE, ("n", version, False, False))
    assert (found.attachment, found.HasField("tokens")) == (b"", False)
    deleted = await service.delete_snapshot(ALICE, pb.DeleteSnapshotRequest(name="n", **fields))
    assert deleted.versions_deleted == 2
    assert last(engine) == ("delete_snapshot", ALICE, ("n", version))
    request = pb.UpdateSnapshotRequest(name="n", ttl=TTL, labels={"labels": {}}, **fields)
    assert (await service.update_snapshot(ALICE, request)).snapshot.version == 3
    assert last(engine) == ("update_snapshot", ALICE, ("n", version, types.Ttl(5.0, sliding=True), {}))


async def test_the_attachment_and_the_tokens_come_if_they_are_asked_for(
    service: LocalSnapshotService, engine: FakeEngine
) -> None:
    found = await service.get_snapshot(ALICE, pb.GetSnapshotRequest(name="n", include_attachment=True))
    assert (found.attachment, found.HasField("tokens")) == (b"attached\x00\xff", False)
    found = await service.get_snapshot(ALICE, pb.GetSnapshotRequest(name="n", version=2, include_tokens=True))
    assert last(engine) == ("inspect_snapshot", ALICE, ("n", 2, False, True))
    assert (found.attachment, list(found.tokens.ids)) == (b"", [5, 6, 7])


async def test_an_attachment_is_saved_and_the_versions_to_keep(
    service: LocalSnapshotService, engine: FakeEngine
) -> None:
    request = pb.SaveRequest(context_id="x", name="n", attachment=b"\x00\xff", max_versions=1)
    await service.save(ALICE, request)
    assert last(engine)[2] == types.SaveRequest(context_id="x", name="n", attachment=b"\x00\xff", max_versions=1)


async def test_only_a_server_of_the_cluster_saves_for_a_move(service: LocalSnapshotService, engine: FakeEngine) -> None:
    request = pb.SaveRequest(context_id="x", name="n", for_move=True)
    with pytest.raises(errors.PermissionDenied, match="for_move"):
        await service.save(ALICE, request)
    assert engine.calls == []
    await service.save(replace(ALICE, of_cluster=True), request)
    assert last(engine)[2] == types.SaveRequest(context_id="x", name="n", for_move=True)


async def test_an_update_changes_only_what_it_names(service: LocalSnapshotService, engine: FakeEngine) -> None:
    await service.update_snapshot(ALICE, pb.UpdateSnapshotRequest(name="n"))
    assert last(engine) == ("update_snapshot", ALICE, ("n", None, None, None))


async def test_snapshots_come_in_pages(service: LocalSnapshotService, engine: FakeEngine) -> None:
    first = await service.list_snapshots(ALICE, pb.ListSnapshotsRequest(prefix="n", limit=2))
    assert ([snapshot.name for snapshot in first.snapshots], first.next_page_token) == (["n", "na"], "na")
    assert last(engine) == ("snapshots", ALICE, ("n", "", 3))
    rest = await service.list_snapshots(ALICE, pb.ListSnapshotsRequest(limit=2, page_token="na"))
    assert ([snapshot.name for snapshot in rest.snapshots], rest.next_page_token) == (["nb", "o"], "")


async def test_versions_come_in_pages_the_latest_first(service: LocalSnapshotService) -> None:
    first = await service.list_snapshot_versions(ALICE, pb.ListSnapshotVersionsRequest(name="n", limit=2))
    assert ([snapshot.version for snapshot in first.snapshots], first.next_page_token) == ([12, 11], "11")
    request = pb.ListSnapshotVersionsRequest(name="n", limit=2, page_token="11")
    rest = await service.list_snapshot_versions(ALICE, request)
    assert ([snapshot.version for snapshot in rest.snapshots], rest.next_page_token) == ([3, 1], "")


async def test_a_context_is_published(service: LocalSnapshotService, engine: FakeEngine) -> None:
    response = await service.publish(ALICE, pb.PublishRequest(context_id="x", ttl=TTL, labels={"a": "b"}))
    assert response.publication.publication_id == "p1"
    assert last(engine) == ("publish", ALICE, ("x", types.Ttl(5.0, sliding=True), {"a": "b"}))


async def test_a_publication_is_changed_and_ended(service: LocalSnapshotService, engine: FakeEngine) -> None:
    request = pb.UpdatePublicationRequest(publication_id="p1", labels={"labels": {"a": "b"}})
    assert (await service.update_publication(ALICE, request)).publication.publication_id == "p1"
    assert last(engine) == ("update_publication", ALICE, ("p1", None, {"a": "b"}))
    assert await service.unpublish(ALICE, pb.UnpublishRequest(publication_id="p1")) == pb.UnpublishResponse()
    assert last(engine) == ("unpublish", ALICE, "p1")


async def test_publications_come_in_pages(service: LocalSnapshotService) -> None:
    first = await service.list_publications(ALICE, pb.ListPublicationsRequest(limit=2))
    assert [each.publication_id for each in first.publications] == ["p1", "p2"]
    rest = await service.list_publications(ALICE, pb.ListPublicationsRequest(limit=2, page_token=first.next_page_token))
    assert ([each.publication_id for each in rest.publications], rest.next_page_token) == (["p3"], "")


async def test_an_error_of_the_engine_is_raised(service: LocalSnapshotService, engine: FakeEngine) -> None:
    engine.error = errors.Aborted("another version came first", reason="VERSION_CONFLICT")
    with pytest.raises(errors.Aborted):
        await service.save(ALICE, pb.SaveRequest(context_id="x", name="n"))


async def test_a_router_has_no_snapshots_of_its_own(router_lifecycle: ServerLifecycle) -> None:
    with pytest.raises(errors.FailedPrecondition) as raised:
        await LocalSnapshotService(router_lifecycle).get_snapshot(ALICE, pb.GetSnapshotRequest(name="n"))
    assert raised.value.reason == "WRONG_ROLE"
