"""SnapshotService of a router: snapshots and publications of all engines."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1.snapshot_pb2 import Publication, Snapshot
from jaxctx_server.router.placement import ContextKey
from tests.server.router.fake_router import FakeRouter

ALICE = Caller("alice", 1060.0)


def not_found_on(router: FakeRouter, address: str, rpc: str) -> None:
    """Have the next calls of an RPC at an engine end with NotFound."""
    router.connections[address].errors[rpc] = [errors.NotFound("nothing of that name")] * 3


async def test_a_context_is_saved_on_its_engine_under_a_name_that_is_free(router: FakeRouter) -> None:
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    not_found_on(router, "a", "Save")
    for address in ("a", "b"):
        not_found_on(router, address, "GetSnapshot")
    response = await router.snapshots.save(ALICE, pb.SaveRequest(context_id="x", name="n"))
    assert response.snapshot.version == 3
    assert len(router.connections["b"].requests_of("Save")) == 1


async def test_no_client_saves_for_a_move(router: FakeRouter) -> None:
    """Its quota would not count that."""
    for caller in (ALICE, Caller("alice", of_cluster=True)):
        with pytest.raises(errors.PermissionDenied, match="for_move"):
            await router.snapshots.save(caller, pb.SaveRequest(context_id="x", name="n", for_move=True))
    assert not any(connection.requests for connection in router.connections.values())


async def test_a_name_that_any_engine_has_is_taken(router: FakeRouter) -> None:
    not_found_on(router, "a", "GetSnapshot")
    with pytest.raises(errors.AlreadyExists):
        await router.snapshots.save(ALICE, pb.SaveRequest(context_id="x", name="n"))
    assert not any(connection.requests_of("Save") for connection in router.connections.values())


async def test_a_name_that_is_overwritten_is_to_be_there(router: FakeRouter) -> None:
    await router.snapshots.save(ALICE, pb.SaveRequest(context_id="x", name="n", overwrite_version=2))
    assert not any(connection.requests_of("GetSnapshot") for connection in router.connections.values())


@pytest.mark.parametrize("name", ["open", "take"])
async def test_an_opened_context_is_remembered_where_its_snapshot_is(router: FakeRouter, name: str) -> None:
    not_found_on(router, "a", name.capitalize())
    request: Any = {"open": pb.OpenRequest, "take": pb.TakeRequest}[name](name="n", context_id="x")
    response = await getattr(router.snapshots, name)(ALICE, request)
    assert response.context.engine_id == "b"
    placement = router.placements.get(ContextKey("alice", "x"))
    assert placement is not None
    assert placement.handle.id == "b"


@pytest.mark.parametrize("name", ["open", "take"])
async def test_an_id_of_another_engines_context_cannot_be_chosen(router: FakeRouter, name: str) -> None:
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    request: Any = {"open": pb.OpenRequest, "take": pb.TakeRequest}[name](name="n", context_id="x")
    with pytest.raises(errors.AlreadyExists):
        await getattr(router.snapshots, name)(ALICE, request)
    await getattr(router.snapshots, name)(Caller("bob"), request)  # ids are a tenant's own


async def test_a_snapshot_of_any_engine_is_found(router: FakeRouter) -> None:
    for rpc in ("GetSnapshot", "UpdateSnapshot", "DeleteSnapshot"):
        not_found_on(router, "a", rpc)
    request = pb.GetSnapshotRequest(name="n", version=3)
    assert (await router.snapshots.get_snapshot(ALICE, request)).snapshot.version == 3
    assert router.connections["b"].requests_of("GetSnapshot") == [request]
    assert (await router.snapshots.update_snapshot(ALICE, pb.UpdateSnapshotRequest(name="n"))).snapshot.name == "n"
    assert (await router.snapshots.delete_snapshot(ALICE, pb.DeleteSnapshotRequest(name="n"))).versions_deleted == 2


def snapshots(*names_and_versions: tuple[str, int]) -> list[Snapshot]:
    return [Snapshot(name=name, version=version) for name, version in names_and_versions]


async def test_snapshots_of_all_engines_are_listed_in_pages_with_their_latest_versions(router: FakeRouter) -> None:
    for address, found in (("a", snapshots(("m", 1), ("o", 9))), ("b", snapshots(("n", 1), ("o", 4)))):
        router.connections[address].responses["ListSnapshots"] = pb.ListSnapshotsResponse(snapshots=found)
    request = pb.ListSnapshotsRequest(prefix="p", limit=2)
    response = await router.snapshots.list_snapshots(ALICE, request)
    assert [snapshot.name for snapshot in response.snapshots] == ["m", "n"]
    assert response.next_page_token == "n"
    assert router.connections["a"].requests_of("ListSnapshots") == [pb.ListSnapshotsRequest(prefix="p", limit=3)]
    response = await router.snapshots.list_snapshots(ALICE, pb.ListSnapshotsRequest(limit=2, page_token="n"))
    assert [(snapshot.name, snapshot.version) for snapshot in response.snapshots] == [("o", 9)]
    assert response.next_page_token == ""


async def test_versions_of_all_engines_are_listed_the_latest_first(router: FakeRouter) -> None:
    for address, found in (("a", snapshots(("n", 12), ("n", 3))), ("b", snapshots(("n", 11), ("n", 3)))):
        router.connections[address].responses["ListSnapshotVersions"] = pb.ListSnapshotVersionsResponse(snapshots=found)
    request = pb.ListSnapshotVersionsRequest(name="n", limit=2)
    response = await router.snapshots.list_snapshot_versions(ALICE, request)
    assert [snapshot.version for snapshot in response.snapshots] == [12, 11]
    assert response.next_page_token == "11"
    request = pb.ListSnapshotVersionsRequest(name="n", limit=2, page_token="11")
    response = await router.snapshots.list_snapshot_versions(ALICE, request)
    assert [snapshot.version for snapshot in response.snapshots] == [3]


async def test_a_context_is_published_on_its_engine_and_the_publication_found_there(router: FakeRouter) -> None:
    for rpc in ("Publish", "Unpublish", "UpdatePublication"):
        not_found_on(router, "a", rpc)
    published = await router.snapshots.publish(ALICE, pb.PublishRequest(context_id="x"))
    assert published.publication.publication_id == "p1"
    update = pb.UpdatePublicationRequest(publication_id="p1")
    assert (await router.snapshots.update_publication(ALICE, update)).publication.publication_id == "p1"
    await router.snapshots.unpublish(ALICE, pb.UnpublishRequest(publication_id="p1"))
    assert [name for name, _, _ in router.connections["b"].requests] == ["Publish", "UpdatePublication", "Unpublish"]


async def test_publications_of_all_engines_are_listed_in_pages(router: FakeRouter) -> None:
    for address, ids in (("a", ["p1", "p4"]), ("b", ["p2", "p3"])):
        router.connections[address].responses["ListPublications"] = pb.ListPublicationsResponse(
            publications=[Publication(publication_id=each) for each in ids]
        )
    response = await router.snapshots.list_publications(ALICE, pb.ListPublicationsRequest(limit=3))
    assert [each.publication_id for each in response.publications] == ["p1", "p2", "p3"]
    assert response.next_page_token == "p3"


async def test_while_the_router_drains_nothing_is_saved_or_opened(router: FakeRouter) -> None:
    router.state.programs.draining = True
    for call in (
        router.snapshots.save(ALICE, pb.SaveRequest(context_id="x", name="n")),
        router.snapshots.open(ALICE, pb.OpenRequest(name="n")),
        router.snapshots.take(ALICE, pb.TakeRequest(name="n")),
    ):
        with pytest.raises(errors.Unavailable) as raised:
            await call
        assert raised.value.reason == "DRAINING"
    await router.snapshots.get_snapshot(ALICE, pb.GetSnapshotRequest(name="n"))
    assert [name for name, _, _ in router.connections["a"].requests] == ["GetSnapshot"]


async def test_attachments_and_tokens_pass_through(router: FakeRouter) -> None:
    not_found_on(router, "a", "GetSnapshot")
    request = pb.GetSnapshotRequest(name="n", include_attachment=True, include_tokens=True)
    found = await router.snapshots.get_snapshot(ALICE, request)
    assert (found.attachment, list(found.tokens.ids)) == (b"attached\x00\xff", [5, 6, 7])
    save = pb.SaveRequest(context_id="x", name="n", overwrite_version=2, attachment=b"\x00\xff", max_versions=1)
    await router.snapshots.save(ALICE, save)
    (sent,) = [each for connection in router.connections.values() for each in connection.requests_of("Save")]
    assert (sent.attachment, sent.max_versions) == (b"\x00\xff", 1)
