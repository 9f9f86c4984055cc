"""SnapshotService: decode, validate, engine, encode."""

from jaxctx_server.grpc.service import Service, with_engine_calls


@with_engine_calls
class SnapshotService(Service):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""
