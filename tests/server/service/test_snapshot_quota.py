"""Quotas of snapshots: those of the engine of this process, and none that a router knows."""

from __future__ import annotations

import pytest

from jaxctx.engine.interface import Caller
from jaxctx.errors import ResourceExhausted
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.snapshot_quota import LocalSnapshotQuota, UnknownSnapshotQuota
from jaxctx_server.services import Services
from tests.server.fake_engine import FakeEngine

ALICE = Caller("alice")


async def test_the_engine_says_it(lifecycle: ServerLifecycle, engine: FakeEngine) -> None:
    quota = LocalSnapshotQuota(lifecycle)
    await quota.check(ALICE, 2)
    assert engine.calls[-1] == ("check_snapshot_quota", ALICE, 2)
    engine.error = ResourceExhausted("full", reason="QUOTA")
    with pytest.raises(ResourceExhausted):
        await quota.check(ALICE, 1)


@pytest.mark.parametrize("is_router", [False, True])
async def test_who_knows_it_in_each_role(is_router: bool) -> None:
    quota = Services.make(ServerLifecycle(), lambda: 0.0, "", is_router=is_router).snapshot_quota
    assert type(quota) is (UnknownSnapshotQuota if is_router else LocalSnapshotQuota)
    if is_router:
        await quota.check(ALICE, 10**9)
