"""Lists of a router: how much each engine is asked for, and what happens where none knows."""

from __future__ import annotations

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.router.listing import entries_to_ask_for
from tests.server.router.fake_router import FakeRouter

ALICE = Caller("alice")
REQUEST = pb.ListSnapshotVersionsRequest(name="n")


@pytest.mark.parametrize(("limit", "asked"), [(0, 101), (1, 2), (999, 1000), (1000, 1000)])
def test_one_more_than_a_page_is_asked_for_but_no_more_than_an_engine_gives(limit: int, asked: int) -> None:
    assert entries_to_ask_for(limit) == asked


async def test_engines_that_know_nothing_of_it_are_left_out(router: FakeRouter) -> None:
    router.connections["a"].errors["ListSnapshotVersions"] = [errors.NotFound("no such snapshot")]
    pages = await router.lister.pages(lambda engine: engine.snapshots.ListSnapshotVersions, ALICE, REQUEST)
    assert [handle.id for handle, _ in pages] == ["b"]


async def test_an_error_other_than_not_found_is_raised(router: FakeRouter) -> None:
    router.connections["a"].errors["ListSnapshotVersions"] = [errors.Unavailable("gone", reason="ENGINE_LOST")]
    with pytest.raises(errors.Unavailable):
        await router.lister.pages(lambda engine: engine.snapshots.ListSnapshotVersions, ALICE, REQUEST)


async def test_where_no_engine_knows_of_it_it_is_not_found(router: FakeRouter) -> None:
    for connection in router.connections.values():
        connection.errors["ListSnapshotVersions"] = [errors.NotFound("none", reason="SNAPSHOT_NOT_FOUND")] * 2
    with pytest.raises(errors.NotFound) as raised:
        await router.lister.pages(lambda engine: engine.snapshots.ListSnapshotVersions, ALICE, REQUEST)
    assert raised.value.reason == "SNAPSHOT_NOT_FOUND"


async def test_where_an_engine_that_may_know_does_not_answer_it_is_unavailable(router: FakeRouter) -> None:
    router.lose("b", may_come_back=True)
    router.connections["a"].errors["ListSnapshotVersions"] = [errors.NotFound("none")] * 2
    with pytest.raises(errors.Unavailable) as raised:
        await router.lister.pages(lambda engine: engine.snapshots.ListSnapshotVersions, ALICE, REQUEST)
    assert raised.value.reason == "ENGINE_LOST"
