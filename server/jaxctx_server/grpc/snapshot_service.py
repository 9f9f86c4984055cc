"""SnapshotService: decode, validate, engine, encode."""

from jaxctx.engine.interface import OpenRequest
from jaxctx_server.grpc.service import Service, handed, with_engine_calls


@with_engine_calls
class SnapshotService(Service):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    Open = handed("Open", "open", [OpenRequest])
    Take = handed("Take", "open", [OpenRequest, lambda _: True])
