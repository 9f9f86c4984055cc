"""The gRPC server: services, addresses, and the options of its transport."""

import time
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxctx.services import SERVE
from jaxctx.services import SERVICES as CONTRACT
from jaxctx_server.auth import Key
from jaxctx_server.cluster import ALONE, Cluster
from jaxctx_server.grpc.admin_service import AdminService, HealthService
from jaxctx_server.grpc.interceptor import CallInterceptor
from jaxctx_server.grpc.model_services import ContextService, ModelService, SnapshotService
from jaxctx_server.grpc.request_reader import RequestReader
from jaxctx_server.grpc.router import ROUTED, Router
from jaxctx_server.grpc.session_service import SessionService
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ServerLifecycle

HEALTH = "grpc.health.v1.Health"
SERVICES = tuple(service.full_name for service in CONTRACT.values())


def options(max_calls: int) -> list[tuple[str, int]]:
    """Of the transport. Sizes in bytes, times in milliseconds."""
    return [
        ("grpc.max_receive_message_length", 8 << 20),  # a text of 2 MiB, or the ids of a long context, and room
        ("grpc.max_send_message_length", 64 << 20),  # all tokens of a long context, or the logits of a pass
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", max_calls),
        # A prefill may be silent for long, so clients may ping, without calls too; and a client that is gone must show.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Connections end now and then, so that balancers can move them; calls that run may finish first.
        ("grpc.max_connection_age_ms", 3_600_000),
        ("grpc.max_connection_age_grace_ms", 2**31 - 1),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its connections without a word
    ]


def make_server(
    serving: ServerLifecycle,
    keys: KeyStore | Sequence[Key] | None,
    *,
    max_calls: int,
    clock: Callable[[], float] = time.monotonic,
    cluster: Cluster = ALONE,
    is_router: bool = False,
) -> grpc.aio.Server:
    """A server without addresses, not started. Must be called on the event loop that will run it.

    `clock` is the engine's clock of deadlines. `is_router`: engines elsewhere answer what needs a model.
    """
    pipeline = CallInterceptor(KeyStore.of(keys), max_calls, cluster.incarnation, RequestReader(serving))
    server = grpc.aio.server(interceptors=[pipeline], options=options(max_calls))
    router = Router(serving, clock, cluster.key)
    SERVE["EngineService"](router, server)
    for kind in (ContextService, SnapshotService, SessionService, ModelService, AdminService):
        is_routed = is_router and kind.__name__ in ROUTED
        SERVE[kind.__name__](router if is_routed else kind(serving, clock), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(serving, SERVICES), server)
    reflection.enable_server_reflection((*SERVICES, HEALTH, reflection.SERVICE_NAME), server)
    return server
