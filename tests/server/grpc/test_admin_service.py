"""AdminService over gRPC."""

from __future__ import annotations

from typing import Any

from jaxctx.v1 import admin_service_pb2


async def test_admin(grpc_server: Any) -> None:
    response = await grpc_server.admin.GetStats(admin_service_pb2.GetStatsRequest())
    (engine,) = response.engines
    assert engine.info.model_id == "fake"
    assert dict(engine.info.mesh) == {"tensor": 1}
    assert (engine.stats.pages_free, engine.stats.tokens_generated) == (90, 5)
    assert (await grpc_server.admin.ClearCache(admin_service_pb2.ClearCacheRequest())).pages_dropped == 9
