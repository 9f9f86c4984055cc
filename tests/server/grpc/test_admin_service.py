"""AdminService over gRPC."""

from __future__ import annotations

from typing import Any

from jaxctx.model.config_reader import CheckpointError
from jaxctx.v1 import admin_service_pb2
from tests.server.harness import KEYS, bearer, failure


async def test_admin(grpc_server: Any) -> None:
    response = await grpc_server.admin.GetStats(admin_service_pb2.GetStatsRequest())
    (engine,) = response.engines
    assert engine.info.model_id == "fake"
    assert dict(engine.info.mesh) == {"tensor": 1}
    assert (engine.stats.pages_free, engine.stats.tokens_generated) == (90, 5)
    assert (await grpc_server.admin.ClearCache(admin_service_pb2.ClearCacheRequest())).pages_dropped == 9


async def test_adapters(grpc_server: Any) -> None:
    admin, engine = grpc_server.admin, grpc_server.engine
    loaded = (await admin.LoadAdapter(admin_service_pb2.LoadAdapterRequest(name="sql"))).adapter
    assert engine.calls[-1][2] == ("sql", "sql")
    assert (loaded.name, loaded.revision, loaded.rank, loaded.parameters) == ("sql", "content of sql", 4, 99)
    await admin.LoadAdapter(admin_service_pb2.LoadAdapterRequest(name="fr", directory="french", model_id="fake"))
    assert engine.calls[-1][2] == ("fr", "french")
    listed = (await admin.ListAdapters(admin_service_pb2.ListAdaptersRequest())).adapters
    assert [(each.name, each.revision, each.contexts) for each in listed] == [
        ("fr", "content of french", 2),
        ("sql", "content of sql", 2),
    ]
    (status,) = (await admin.GetStats(admin_service_pb2.GetStatsRequest())).engines
    assert dict(status.adapters) == {"fr": "content of french", "sql": "content of sql"}
    assert (await admin.UnloadAdapter(admin_service_pb2.UnloadAdapterRequest(name="sql"))).adapter == loaded
    error = await failure(admin.UnloadAdapter(admin_service_pb2.UnloadAdapterRequest(name="sql")))
    assert error.reason == "ADAPTER_NOT_FOUND"
    error = await failure(admin.LoadAdapter(admin_service_pb2.LoadAdapterRequest(name="x", model_id="other")))
    assert error.reason == "MODEL_NOT_FOUND"
    engine.error = CheckpointError("adapter_config.json: r: must be an integer")
    error = await failure(admin.LoadAdapter(admin_service_pb2.LoadAdapterRequest(name="x")))
    assert (error.reason, str(error)) == ("INVALID_FIELD", "adapter_config.json: r: must be an integer")


async def test_adapters_are_for_those_who_run_the_server(open_grpc_server: Any) -> None:
    async with open_grpc_server(keys=KEYS) as server:
        for request in (
            admin_service_pb2.LoadAdapterRequest(name="a"),
            admin_service_pb2.UnloadAdapterRequest(name="a"),
            admin_service_pb2.ListAdaptersRequest(),
        ):
            method = getattr(server.admin, type(request).__name__.removesuffix("Request"))
            error = await failure(method(request, metadata=bearer("a-key")))
            assert error.reason == "PERMISSION_DENIED"
        assert server.engine.calls == []
        await server.admin.LoadAdapter(admin_service_pb2.LoadAdapterRequest(name="a"), metadata=bearer("r-key"))
