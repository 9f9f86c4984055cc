"""The same on a router, whose engines have the contexts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.router.conftest import cluster, router_cluster
from tests.e2e.router_cluster import RouterCluster, wait_until_nothing_is_held
from tests.engines import Clock
from tests.server.http.client import HttpClient, http_server
from tests.server.http.contextcache.harness import STORY, chunks_of, made, text_of, told, use

__all__ = ["cluster", "router_cluster"]


@pytest.fixture
async def routed(router_cluster: RouterCluster, clock: Clock) -> AsyncIterator[HttpClient]:
    async with http_server(router_cluster.backend, wall_time=clock.wall) as web:
        yield web
    await wait_until_nothing_is_held(router_cluster)


async def test_from_beginning_to_end(routed: HttpClient, clock: Clock) -> None:
    session_id, first = await made(routed, ttl=100)
    held = (await told(routed, session_id))["tokens"]
    again = await use(routed, session_id, prompt=STORY)
    assert (text_of(again), again.json["cache"]["status"]) == (first, "hit")
    assert (await told(routed, session_id))["tokens"] == held
    then = await use(routed, session_id, mode="append", prompt=" And", stream=True)
    assert chunks_of(then)[0]["cache"]["reused_tokens"] == held
    forked = (await routed("POST", f"/v1/context/{session_id}/fork", {})).json
    assert forked["tokens"] > held
    listed = {each["id"] for each in (await routed("GET", "/v1/context")).json["data"]}
    assert listed == {session_id, forked["id"]}
    assert (await routed("PATCH", f"/v1/context/{forked['id']}", {"ttl_s": 1000})).json["ttl_s"] == 1000
    clock.offset += 101
    assert (await routed("GET", f"/v1/context/{session_id}")).error == (404, "context_expired", None)
    assert (await routed("DELETE", f"/v1/context/{forked['id']}")).json["deleted"]
    assert (await routed("GET", f"/v1/context/{forked['id']}")).error == (404, "context_not_found", None)
    assert (await routed("GET", "/v1/context")).json["data"] == []
