# ruff: noqa: N802 - gRPC names the methods
"""SnapshotService: decode, validate, engine, encode."""

from functools import partial

from jaxctx.engine.interface import Engine
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2_grpc
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service, one, page_of, unary
from jaxctx_server.validate import contexts, snapshots


class SnapshotService(Service, snapshot_service_pb2_grpc.SnapshotServiceServicer):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    Save = unary(one(snapshots.save), Engine.save, pb.SaveResponse, "snapshot")
    Open = unary(one(snapshots.open_), Engine.open, pb.OpenResponse)
    Take = unary(one(partial(snapshots.open_, take=True)), Engine.open, pb.TakeResponse)
    GetSnapshot = unary(snapshots.version, Engine.snapshot, pb.GetSnapshotResponse, "snapshot")
    UpdateSnapshot = unary(snapshots.update, Engine.update_snapshot, pb.UpdateSnapshotResponse, "snapshot")
    DeleteSnapshot = unary(snapshots.version, Engine.delete_snapshot, pb.DeleteSnapshotResponse, "versions_deleted")
    Publish = unary(snapshots.publish, Engine.publish, pb.PublishResponse, "publication")
    UpdatePublication = unary(
        snapshots.update_publication, Engine.update_publication, pb.UpdatePublicationResponse, "publication"
    )
    Unpublish = unary(one(snapshots.unpublish), Engine.unpublish, pb.UnpublishResponse)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        served, caller, (prefix, after, limit) = self.begin(context, request, snapshots.snapshots)
        found = await served.engine.snapshots(caller, prefix, after, limit + 1)
        return page_of(found, limit, lambda info: info.name, pb.ListSnapshotsResponse, "snapshots")

    async def ListSnapshotVersions(
        self, request: pb.ListSnapshotVersionsRequest, context: Context
    ) -> pb.ListSnapshotVersionsResponse:
        served, caller, (name, below, limit) = self.begin(context, request, snapshots.versions)
        found = [info for info in await served.engine.history(caller, name) if info.version < below]
        return page_of(found, limit, lambda info: str(info.version), pb.ListSnapshotVersionsResponse, "snapshots")

    async def ListPublications(
        self, request: pb.ListPublicationsRequest, context: Context
    ) -> pb.ListPublicationsResponse:
        served, caller, (after, limit) = self.begin(context, request, contexts.page)
        everything = sorted(await served.engine.publications(caller), key=lambda each: each.publication_id)
        found = [each for each in everything if each.publication_id > after]
        return page_of(found, limit, lambda each: each.publication_id, pb.ListPublicationsResponse, "publications")
