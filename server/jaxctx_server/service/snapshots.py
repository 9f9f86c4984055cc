"""SnapshotService on the engine of this process."""

from jaxctx import convert
from jaxctx.engine.interface import Caller, Engine
from jaxctx.errors import PermissionDenied
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.service.paging import entries_to_find, page_by_id, page_by_version


class LocalSnapshotService:
    """Implements `jaxctx_server.service.interface.SnapshotService`."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    def _engine(self) -> Engine:
        return self._lifecycle.model().engine

    async def save(self, caller: Caller, request: pb.SaveRequest) -> pb.SaveResponse:
        if request.for_move and not caller.of_cluster:
            raise PermissionDenied("for_move: only another server of the cluster may move a context")
        snapshot = await self._engine().save(caller, convert.save_request_from_proto(request))
        return pb.SaveResponse(snapshot=convert.snapshot_to_proto(snapshot))

    async def open(self, caller: Caller, request: pb.OpenRequest) -> pb.OpenResponse:
        result = await self._engine().open(caller, convert.open_request_from_proto(request))
        return convert.open_response_to_proto(result)

    async def take(self, caller: Caller, request: pb.TakeRequest) -> pb.TakeResponse:
        result = await self._engine().take(caller, convert.take_request_from_proto(request))
        return convert.take_response_to_proto(result)

    async def get_snapshot(self, caller: Caller, request: pb.GetSnapshotRequest) -> pb.GetSnapshotResponse:
        version = request.version if request.HasField("version") else None
        result = await self._engine().inspect_snapshot(
            caller, request.name, version, request.include_attachment, request.include_tokens
        )
        return convert.get_snapshot_result_to_proto(result)

    async def list_snapshots(self, caller: Caller, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsResponse:
        found = entries_to_find(request.limit)
        snapshots = await self._engine().snapshots(caller, request.prefix, request.page_token, found)
        page = page_by_id(snapshots, lambda snapshot: snapshot.name, page_token=request.page_token, found=found)
        return pb.ListSnapshotsResponse(
            snapshots=[convert.snapshot_to_proto(snapshot) for snapshot in page.entries],
            next_page_token=page.next_page_token,
        )

    async def list_snapshot_versions(
        self, caller: Caller, request: pb.ListSnapshotVersionsRequest
    ) -> pb.ListSnapshotVersionsResponse:
        found = entries_to_find(request.limit)
        versions = await self._engine().history(caller, request.name)
        page = page_by_version(versions, lambda snapshot: snapshot.version, page_token=request.page_token, found=found)
        return pb.ListSnapshotVersionsResponse(
            snapshots=[convert.snapshot_to_proto(snapshot) for snapshot in page.entries],
            next_page_token=page.next_page_token,
        )

    async def update_snapshot(self, caller: Caller, request: pb.UpdateSnapshotRequest) -> pb.UpdateSnapshotResponse:
        version = request.version if request.HasField("version") else None
        update = convert.update_snapshot_request_from_proto(request)
        snapshot = await self._engine().update_snapshot(caller, request.name, version, update)
        return pb.UpdateSnapshotResponse(snapshot=convert.snapshot_to_proto(snapshot))

    async def delete_snapshot(self, caller: Caller, request: pb.DeleteSnapshotRequest) -> pb.DeleteSnapshotResponse:
        version = request.version if request.HasField("version") else None
        versions_deleted = await self._engine().delete_snapshot(caller, request.name, version)
        return pb.DeleteSnapshotResponse(versions_deleted=versions_deleted)

    async def publish(self, caller: Caller, request: pb.PublishRequest) -> pb.PublishResponse:
        publication = await self._engine().publish(
            caller, request.context_id, convert.publish_request_from_proto(request)
        )
        return pb.PublishResponse(publication=convert.publication_to_proto(publication))

    async def unpublish(self, caller: Caller, request: pb.UnpublishRequest) -> pb.UnpublishResponse:
        await self._engine().unpublish(caller, request.publication_id)
        return pb.UnpublishResponse()

    async def update_publication(
        self, caller: Caller, request: pb.UpdatePublicationRequest
    ) -> pb.UpdatePublicationResponse:
        update = convert.update_publication_request_from_proto(request)
        publication = await self._engine().update_publication(caller, request.publication_id, update)
        return pb.UpdatePublicationResponse(publication=convert.publication_to_proto(publication))

    async def list_publications(
        self, caller: Caller, request: pb.ListPublicationsRequest
    ) -> pb.ListPublicationsResponse:
        publications = await self._engine().publications(caller)
        page = page_by_id(
            publications,
            lambda publication: publication.publication_id,
            page_token=request.page_token,
            found=entries_to_find(request.limit),
        )
        return pb.ListPublicationsResponse(
            publications=[convert.publication_to_proto(publication) for publication in page.entries],
            next_page_token=page.next_page_token,
        )
