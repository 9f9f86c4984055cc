"""The gRPC server: its services, its addresses, and the options of its transport."""

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxctx.rpc import SERVICES as CONTRACT
from jaxctx.v1.admin_service_pb2_grpc import add_AdminServiceServicer_to_server
from jaxctx.v1.context_service_pb2_grpc import add_ContextServiceServicer_to_server
from jaxctx.v1.engine_service_pb2_grpc import add_EngineServiceServicer_to_server
from jaxctx.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from jaxctx.v1.session_service_pb2_grpc import add_SessionServiceServicer_to_server
from jaxctx.v1.snapshot_service_pb2_grpc import add_SnapshotServiceServicer_to_server
from jaxctx_server.grpc.admin_service import AdminServicer
from jaxctx_server.grpc.caller import CallerFactory
from jaxctx_server.grpc.context_service import ContextServicer
from jaxctx_server.grpc.engine_service import EngineServicer
from jaxctx_server.grpc.health_service import HealthServicer
from jaxctx_server.grpc.interceptor import CallInterceptor
from jaxctx_server.grpc.model_service import ModelServicer
from jaxctx_server.grpc.session_service import SessionServicer
from jaxctx_server.grpc.snapshot_service import SnapshotServicer
from jaxctx_server.services import Backend

HEALTH = "grpc.health.v1.Health"
SERVICES = tuple(service.full_name for service in CONTRACT.values())
HANDSHAKE_TIMEOUT_MS = 10_000  # from the start of a connection to the end of its handshakes, that of TLS included
# Those that a router has its engines answer.
SERVICES_OF_ENGINES = ("jaxctx.v1.ContextService", "jaxctx.v1.SnapshotService", "jaxctx.v1.ModelService")


def options(max_calls: int) -> list[tuple[str, int]]:
    """Options of the transport. Sizes in bytes, times in milliseconds."""
    return [
        ("grpc.max_receive_message_length", 8 << 20),  # a text of 2 MiB, or the ids of a long context, and some more
        ("grpc.max_send_message_length", 64 << 20),  # all tokens of a long context, or the logits of a forward pass
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.absolute_max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
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


def make_server(backend: Backend) -> grpc.aio.Server:
    """A server without addresses, not started. Must be called on the event loop that will run it."""
    services, lifecycle = backend.services, backend.lifecycle
    server = grpc.aio.server(interceptors=[CallInterceptor(backend.pipeline)], options=options(backend.max_calls))
    callers = CallerFactory(backend.clock)
    add_ContextServiceServicer_to_server(ContextServicer(services.contexts, callers), server)
    add_SnapshotServiceServicer_to_server(SnapshotServicer(services.snapshots, callers), server)
    add_ModelServiceServicer_to_server(ModelServicer(services.models, callers), server)
    add_SessionServiceServicer_to_server(SessionServicer(services.sessions, callers), server)
    add_AdminServiceServicer_to_server(AdminServicer(services.admin, callers), server)
    add_EngineServiceServicer_to_server(EngineServicer(services.engines), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(lifecycle, SERVICES, SERVICES_OF_ENGINES), server)
    reflection.enable_server_reflection((*SERVICES, HEALTH, reflection.SERVICE_NAME), server)
    return server
