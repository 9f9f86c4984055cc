# ruff: noqa: N802 - gRPC names the methods
"""SnapshotService over gRPC: snapshots. Each method calls its namesake of the service layer."""

from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1.snapshot_service_pb2_grpc import SnapshotServiceServicer
from jaxctx_server.grpc.caller import CallerFactory, Context
from jaxctx_server.service.interface import SnapshotService


class SnapshotServicer(SnapshotServiceServicer):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    def __init__(self, service: SnapshotService, callers: CallerFactory) -> None:
        self._service = service
        self._callers = callers

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        return await self._service.save(self._callers.caller(context), request)

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        return await self._service.open(self._callers.caller(context), request)

    async def Take(self, request: pb.TakeRequest, context: Context) -> pb.TakeResponse:
        return await self._service.take(self._callers.caller(context), request)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:
        return await self._service.get_snapshot(self._callers.caller(context), request)

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        return await self._service.list_snapshots(self._callers.caller(context), request)

    async def ListSnapshotVersions(
        self, request: pb.ListSnapshotVersionsRequest, context: Context
    ) -> pb.ListSnapshotVersionsResponse:
        return await self._service.list_snapshot_versions(self._callers.caller(context), request)

    async def UpdateSnapshot(self, request: pb.UpdateSnapshotRequest, context: Context) -> pb.UpdateSnapshotResponse:
        return await self._service.update_snapshot(self._callers.caller(context), request)

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotResponse:
        return await self._service.delete_snapshot(self._callers.caller(context), request)

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        return await self._service.publish(self._callers.caller(context), request)

    async def Unpublish(self, request: pb.UnpublishRequest, context: Context) -> pb.UnpublishResponse:
        return await self._service.unpublish(self._callers.caller(context), request)

    async def UpdatePublication(
        self, request: pb.UpdatePublicationRequest, context: Context
    ) -> pb.UpdatePublicationResponse:
        return await self._service.update_publication(self._callers.caller(context), request)

    async def ListPublications(
        self, request: pb.ListPublicationsRequest, context: Context
    ) -> pb.ListPublicationsResponse:
        return await self._service.list_publications(self._callers.caller(context), request)
