# ruff: noqa: N802 - gRPC names the methods
"""SnapshotService: decode, validate, engine, encode."""

from jaxctx.engine.interface import Changes, Engine, OpenRequest, SaveRequest
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2_grpc
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import PAGE_SIZE, Service, page_of, unary


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

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        served, caller = self.begin(context, request)
        limit = request.limit or PAGE_SIZE
        found = await served.engine.snapshots(caller, request.prefix, request.page_token, limit + 1)
        return page_of(found, limit, lambda info: info.name, pb.ListSnapshotsResponse, "snapshots")

    async def ListSnapshotVersions(
        self, request: pb.ListSnapshotVersionsRequest, context: Context
    ) -> pb.ListSnapshotVersionsResponse:
        served, caller = self.begin(context, request)
        below = int(request.page_token or 2**31 - 1)
        found = [info for info in await served.engine.history(caller, request.name) if info.version < below]
        return page_of(
            found,
            request.limit or PAGE_SIZE,
            lambda info: str(info.version),
            pb.ListSnapshotVersionsResponse,
            "snapshots",
        )

    async def ListPublications(
        self, request: pb.ListPublicationsRequest, context: Context
    ) -> pb.ListPublicationsResponse:
        served, caller = self.begin(context, request)
        everything = sorted(await served.engine.publications(caller), key=lambda each: each.publication_id)
        found = [each for each in everything if each.publication_id > request.page_token]
        return page_of(
            found,
            request.limit or PAGE_SIZE,
            lambda each: each.publication_id,
            pb.ListPublicationsResponse,
            "publications",
        )
