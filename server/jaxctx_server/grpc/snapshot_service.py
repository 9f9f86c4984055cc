"""SnapshotService: decode, validate, engine, encode."""

from jaxctx.engine.interface import OpenRequest
from jaxctx_server.grpc.service import Service, one_more, unary, with_engine_calls


@with_engine_calls
class SnapshotService(Service):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    Open = unary("Open", "open", [OpenRequest])
    Take = unary("Take", "open", [OpenRequest, lambda _: True])
    ListSnapshots = unary("ListSnapshots", "snapshots", ["prefix", "page_token", one_more])
