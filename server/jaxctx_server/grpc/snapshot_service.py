"""SnapshotService: decode, validate, engine, encode."""

from jaxctx.engine.interface import Changes, Engine, OpenRequest, SaveRequest
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2_grpc
from jaxctx_server.grpc.service import Service, one_more, unary


class SnapshotService(Service, snapshot_service_pb2_grpc.SnapshotServiceServicer):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    Save = unary([SaveRequest], Engine.save, pb.SaveResponse, "snapshot")
    Open = unary([OpenRequest], Engine.open, pb.OpenResponse)
    Take = unary([OpenRequest, lambda _: True], Engine.open, pb.TakeResponse)
    GetSnapshot = unary(["name", "version"], Engine.snapshot, pb.GetSnapshotResponse, "snapshot")
    UpdateSnapshot = unary(["name", "version", Changes], Engine.update_snapshot, pb.UpdateSnapshotResponse, "snapshot")
    DeleteSnapshot = unary(["name", "version"], Engine.delete_snapshot, pb.DeleteSnapshotResponse, "versions_deleted")
    Publish = unary(["context_id", Changes], Engine.publish, pb.PublishResponse, "publication")
    UpdatePublication = unary(
        ["publication_id", Changes], Engine.update_publication, pb.UpdatePublicationResponse, "publication"
    )
    Unpublish = unary(["publication_id"], Engine.unpublish, pb.UnpublishResponse)
    ListSnapshots = unary(
        ["prefix", "page_token", one_more], Engine.snapshots, pb.ListSnapshotsResponse, "snapshots", by="name"
    )
    ListSnapshotVersions = unary(["name"], Engine.history, pb.ListSnapshotVersionsResponse, "snapshots", by="version")
    ListPublications = unary([], Engine.publications, pb.ListPublicationsResponse, "publications", by="publication_id")
