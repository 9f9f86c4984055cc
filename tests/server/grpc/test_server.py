"""The gRPC server: addresses, options of the transport, reflection, and its own limits."""

from __future__ import annotations

from typing import Any

from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.grpc.server import SERVICES, options
from tests.server.harness import create, failure


async def test_over_a_unix_socket(open_grpc_server: Any, tmp_path: Any) -> None:
    async with open_grpc_server(address=f"unix:{tmp_path}/socket") as grpc_server:
        response = await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id="a"))
        assert response.context.context_id == "a"


async def test_reflection_lists_the_services(grpc_server: Any) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(grpc_server.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxctx.v1.ContextService"),
    ]
    listed, file = [response async for response in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= names
    assert len(file.file_descriptor_response.file_descriptor_proto) >= 1


async def test_messages_and_headers_beyond_the_limit_are_refused(grpc_server: Any) -> None:
    too_large = pb.FillRequest(context_id="a", text="x" * (9 << 20))
    assert (await failure(grpc_server.contexts.Fill(too_large))).code == "RESOURCE_EXHAUSTED"
    many = tuple((f"header-{i}", "x" * 1000) for i in range(40))
    refused = await failure(grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=many))
    assert refused.code == "RESOURCE_EXHAUSTED"
    await create(grpc_server)


def test_options_of_the_transport() -> None:
    names = dict(options(5))
    assert names["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert names["grpc.keepalive_permit_without_calls"] == 1
    assert names["grpc.so_reuseport"] == 0
    assert names["grpc.max_concurrent_streams"] == 5
