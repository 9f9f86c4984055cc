# ruff: noqa: N802 - gRPC names the methods
"""EngineService over gRPC: engines register with a router."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import unquote

from jaxctx.v1 import engine_service_pb2 as pb
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceServicer
from jaxctx_server.grpc.caller import Context
from jaxctx_server.service.interface import EngineService


class EngineServicer(EngineServiceServicer):
    """See the service in protos/jaxctx/v1/engine_service.proto."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def Register(
        self, request: pb.RegisterRequest, context: Context
    ) -> AsyncGenerator[pb.RegisterResponse, None]:
        async with aclosing(self._service.register(peer_host(context.peer()), request)) as responses:
            async for response in responses:
                yield response


def peer_host(peer: str) -> str:
    """The host of a peer as gRPC names it, as ipv4:10.0.0.7:41234; empty for one of a Unix socket."""
    return unquote(peer).partition(":")[2].rpartition(":")[0]
