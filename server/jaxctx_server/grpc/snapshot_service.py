# ruff: noqa: N802 - gRPC names the methods
"""SnapshotService: decode, validate, engine, encode."""

from __future__ import annotations

from collections.abc import Callable

from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2_grpc
from jaxctx_server import snapshot_requests as requests
from jaxctx_server.grpc import encode
from jaxctx_server.grpc.decode import decode
from jaxctx_server.grpc.pipeline import Context, caller
from jaxctx_server.serving import Serving
from jaxctx_server.validate import snapshots


class SnapshotService(snapshot_service_pb2_grpc.SnapshotServiceServicer):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        """`clock`: the one of the engine's deadlines."""
        self._serving = serving
        self._clock = clock

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        served = self._serving.served()
        save = snapshots.save(served.limits, decode(request, requests.SaveRequest))
        saved = await served.engine.save(caller(context, self._clock), save)
        return pb.SaveResponse(snapshot=encode.snapshot(saved))

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        served = self._serving.served()
        opened = snapshots.open_(served.limits, decode(request, requests.OpenRequest))
        result = await served.engine.open(caller(context, self._clock), opened)
        return encode.filled(pb.OpenResponse, result, served.engine.info.model_id)

    async def Take(self, request: pb.TakeRequest, context: Context) -> pb.TakeResponse:
        served = self._serving.served()
        take = snapshots.open_(served.limits, decode(request, requests.TakeRequest))
        result = await served.engine.open(caller(context, self._clock), take)
        return encode.filled(pb.TakeResponse, result, served.engine.info.model_id)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:
        served = self._serving.served()
        get = snapshots.version(served.limits, decode(request, requests.GetSnapshotRequest))
        found = await served.engine.snapshot(caller(context, self._clock), get.name, get.version)
        return pb.GetSnapshotResponse(snapshot=encode.snapshot(found))

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        served = self._serving.served()
        prefix, page = snapshots.snapshots(served.limits, decode(request, requests.ListSnapshotsRequest))
        found = await served.engine.snapshots(
            caller(context, self._clock), prefix=prefix, after=page.after, limit=page.limit + 1
        )
        listed = found[: page.limit]
        return pb.ListSnapshotsResponse(
            snapshots=[encode.snapshot(info) for info in listed],
            next_page_token=listed[-1].name if len(found) > len(listed) else "",
        )

    async def ListSnapshotVersions(
        self, request: pb.ListSnapshotVersionsRequest, context: Context
    ) -> pb.ListSnapshotVersionsResponse:
        served = self._serving.served()
        name, below, page = snapshots.versions(served.limits, decode(request, requests.ListSnapshotVersionsRequest))
        kept = await served.engine.history(caller(context, self._clock), name)
        found = [info for info in kept if info.version < below]
        listed = found[: page.limit]
        return pb.ListSnapshotVersionsResponse(
            snapshots=[encode.snapshot(info) for info in listed],
            next_page_token=str(listed[-1].version) if len(found) > len(listed) else "",
        )

    async def UpdateSnapshot(self, request: pb.UpdateSnapshotRequest, context: Context) -> pb.UpdateSnapshotResponse:
        served = self._serving.served()
        update = snapshots.update(served.limits, decode(request, requests.UpdateSnapshotRequest))
        changed = await served.engine.update_snapshot(
            caller(context, self._clock), update.name, ttl=update.ttl, labels=update.labels
        )
        return pb.UpdateSnapshotResponse(snapshot=encode.snapshot(changed))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotResponse:
        served = self._serving.served()
        delete = snapshots.version(served.limits, decode(request, requests.DeleteSnapshotRequest))
        deleted = await served.engine.delete_snapshot(caller(context, self._clock), delete.name, delete.version)
        return pb.DeleteSnapshotResponse(versions_deleted=deleted)

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        served = self._serving.served()
        publish = snapshots.publish(served.limits, decode(request, requests.PublishRequest))
        published = await served.engine.publish(
            caller(context, self._clock), publish.context_id, ttl=publish.ttl, labels=publish.labels
        )
        return pb.PublishResponse(publication=encode.publication(published))

    async def Unpublish(self, request: pb.UnpublishRequest, context: Context) -> pb.UnpublishResponse:
        served = self._serving.served()
        publication_id = snapshots.unpublish(decode(request, requests.UnpublishRequest))
        await served.engine.unpublish(caller(context, self._clock), publication_id)
        return pb.UnpublishResponse()

    async def ListPublications(
        self, request: pb.ListPublicationsRequest, context: Context
    ) -> pb.ListPublicationsResponse:
        served = self._serving.served()
        page = snapshots.publications(served.limits, decode(request, requests.ListPublicationsRequest))
        everything = await served.engine.publications(caller(context, self._clock))
        in_order = sorted(everything, key=lambda each: each.publication_id)
        found = [each for each in in_order if each.publication_id > page.after]
        listed = found[: page.limit]
        return pb.ListPublicationsResponse(
            publications=[encode.publication(each) for each in listed],
            next_page_token=listed[-1].publication_id if len(found) > len(listed) else "",
        )
