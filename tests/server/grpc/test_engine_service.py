"""EngineService over gRPC: who registers, and that only a router takes engines."""

from typing import Any

import pytest

from jaxctx.v1 import engine_service_pb2 as pb
from jaxctx_server.grpc.engine_service import peer_host
from tests.server.harness import failure, method_of


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5B::1%5D:41234", "[::1]"),
        ("unix:", ""),
        ("unix:/run/socket", ""),
    ],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert peer_host(peer) == host


async def test_only_a_router_takes_engines(grpc_server: Any) -> None:
    register = method_of(grpc_server.channel, "Register")
    error = await failure(register(pb.RegisterRequest(port=1, incarnation="i")).read())
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "WRONG_ROLE")
