"""SnapshotService of a router."""

from jaxctx.engine.interface import Caller
from jaxctx.errors import PermissionDenied
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.router.forwarding import ForwardedCall, Forwarder
from jaxctx_server.router.listing import Lister, entries_to_ask_for
from jaxctx_server.router.placement import PlacementTable
from jaxctx_server.service.paging import page_by_id, page_by_version


class RouterSnapshotService:
    """Implements `jaxctx_server.service.interface.SnapshotService`."""

    def __init__(self, forwarder: Forwarder, lister: Lister, placements: PlacementTable) -> None:
        self._forwarder = forwarder
        self._lister = lister
        self._placements = placements

    async def save(self, caller: Caller, request: pb.SaveRequest) -> pb.SaveResponse:
        if request.for_move:  # engines cannot tell a call that is forwarded from one that the router makes itself
            raise PermissionDenied("for_move: only the router itself may move a context")
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.Save)
        return response

    async def open(self, caller: Caller, request: pb.OpenRequest) -> pb.OpenResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.Open)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def take(self, caller: Caller, request: pb.TakeRequest) -> pb.TakeResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.Take)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def get_snapshot(self, caller: Caller, request: pb.GetSnapshotRequest) -> pb.GetSnapshotResponse:
        call = ForwardedCall(caller=caller, request=request)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.GetSnapshot)
        return response

    async def list_snapshots(self, caller: Caller, request: pb.ListSnapshotsRequest) -> pb.ListSnapshotsResponse:
        asked = pb.ListSnapshotsRequest(
            prefix=request.prefix, limit=entries_to_ask_for(request.limit), page_token=request.page_token
        )
        pages = await self._lister.pages(lambda engine: engine.snapshots.ListSnapshots, caller, asked)
        snapshots = [snapshot for _, response in pages for snapshot in response.snapshots]
        snapshots.sort(
            key=lambda snapshot: snapshot.version
        )  # of a name on several engines the latest version is listed
        page = page_by_id(snapshots, lambda snapshot: snapshot.name, page_token=asked.page_token, found=asked.limit)
        return pb.ListSnapshotsResponse(snapshots=page.entries, next_page_token=page.next_page_token)

    async def list_snapshot_versions(
        self, caller: Caller, request: pb.ListSnapshotVersionsRequest
    ) -> pb.ListSnapshotVersionsResponse:
        asked = pb.ListSnapshotVersionsRequest(
            name=request.name, limit=entries_to_ask_for(request.limit), page_token=request.page_token
        )
        pages = await self._lister.pages(lambda engine: engine.snapshots.ListSnapshotVersions, caller, asked)
        versions = [snapshot for _, response in pages for snapshot in response.snapshots]
        page = page_by_version(
            versions, lambda snapshot: snapshot.version, page_token=asked.page_token, found=asked.limit
        )
        return pb.ListSnapshotVersionsResponse(snapshots=page.entries, next_page_token=page.next_page_token)

    async def update_snapshot(self, caller: Caller, request: pb.UpdateSnapshotRequest) -> pb.UpdateSnapshotResponse:
        call = ForwardedCall(caller=caller, request=request)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.UpdateSnapshot)
        return response

    async def delete_snapshot(self, caller: Caller, request: pb.DeleteSnapshotRequest) -> pb.DeleteSnapshotResponse:
        call = ForwardedCall(caller=caller, request=request)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.DeleteSnapshot)
        return response

    async def publish(self, caller: Caller, request: pb.PublishRequest) -> pb.PublishResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.Publish)
        return response

    async def unpublish(self, caller: Caller, request: pb.UnpublishRequest) -> pb.UnpublishResponse:
        call = ForwardedCall(caller=caller, request=request)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.Unpublish)
        return response

    async def update_publication(
        self, caller: Caller, request: pb.UpdatePublicationRequest
    ) -> pb.UpdatePublicationResponse:
        call = ForwardedCall(caller=caller, request=request)
        _, response = await self._forwarder.ask(call, lambda engine: engine.snapshots.UpdatePublication)
        return response

    async def list_publications(
        self, caller: Caller, request: pb.ListPublicationsRequest
    ) -> pb.ListPublicationsResponse:
        asked = pb.ListPublicationsRequest(limit=entries_to_ask_for(request.limit), page_token=request.page_token)
        pages = await self._lister.pages(lambda engine: engine.snapshots.ListPublications, caller, asked)
        publications = [publication for _, response in pages for publication in response.publications]
        page = page_by_id(
            publications,
            lambda publication: publication.publication_id,
            page_token=asked.page_token,
            found=asked.limit,
        )
        return pb.ListPublicationsResponse(publications=page.entries, next_page_token=page.next_page_token)
