# ruff: noqa: N802 - gRPC names the methods
"""SnapshotService: decode, validate, engine, encode."""

from functools import partial

from jaxctx.answers import Snapshot
from jaxctx.codec import encode
from jaxctx.v1 import snapshot_pb2, snapshot_service_pb2_grpc
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service, first_page
from jaxctx_server.validate import contexts, snapshots


class SnapshotService(Service, snapshot_service_pb2_grpc.SnapshotServiceServicer):
    """See the service in protos/jaxctx/v1/snapshot_service.proto."""

    async def Save(self, request: pb.SaveRequest, context: Context) -> pb.SaveResponse:
        served, caller, wanted = self.begin(context, request, snapshots.save)
        return pb.SaveResponse(snapshot=_snapshot(await served.engine.save(caller, wanted)))

    async def Open(self, request: pb.OpenRequest, context: Context) -> pb.OpenResponse:
        served, caller, wanted = self.begin(context, request, snapshots.open_)
        return encode(await served.engine.open(caller, wanted), pb.OpenResponse)

    async def Take(self, request: pb.TakeRequest, context: Context) -> pb.TakeResponse:
        served, caller, wanted = self.begin(context, request, partial(snapshots.open_, take=True))
        return encode(await served.engine.open(caller, wanted), pb.TakeResponse)

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.GetSnapshotResponse:
        served, caller, asked = self.begin(context, request, snapshots.version)
        return pb.GetSnapshotResponse(snapshot=_snapshot(await served.engine.snapshot(caller, *asked)))

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        served, caller, (prefix, after, limit) = self.begin(context, request, snapshots.snapshots)
        found = await served.engine.snapshots(caller, prefix=prefix, after=after, limit=limit + 1)
        listed, token = first_page(found, limit, lambda info: info.name)
        return pb.ListSnapshotsResponse(snapshots=map(_snapshot, listed), next_page_token=token)

    async def ListSnapshotVersions(
        self, request: pb.ListSnapshotVersionsRequest, context: Context
    ) -> pb.ListSnapshotVersionsResponse:
        served, caller, (name, below, limit) = self.begin(context, request, snapshots.versions)
        found = [info for info in await served.engine.history(caller, name) if info.version < below]
        listed, token = first_page(found, limit, lambda info: str(info.version))
        return pb.ListSnapshotVersionsResponse(snapshots=map(_snapshot, listed), next_page_token=token)

    async def UpdateSnapshot(self, request: pb.UpdateSnapshotRequest, context: Context) -> pb.UpdateSnapshotResponse:
        served, caller, (name, version, changes) = self.begin(context, request, snapshots.update)
        changed = await served.engine.update_snapshot(caller, name, version, **changes)
        return pb.UpdateSnapshotResponse(snapshot=_snapshot(changed))

    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotResponse:
        served, caller, asked = self.begin(context, request, snapshots.version)
        return pb.DeleteSnapshotResponse(versions_deleted=await served.engine.delete_snapshot(caller, *asked))

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        served, caller, (context_id, ttl, labels) = self.begin(context, request, snapshots.publish)
        published = await served.engine.publish(caller, context_id, ttl=ttl, labels=labels)
        return pb.PublishResponse(publication=encode(published, snapshot_pb2.Publication))

    async def UpdatePublication(
        self, request: pb.UpdatePublicationRequest, context: Context
    ) -> pb.UpdatePublicationResponse:
        served, caller, (publication_id, changes) = self.begin(context, request, snapshots.update_publication)
        changed = await served.engine.update_publication(caller, publication_id, **changes)
        return pb.UpdatePublicationResponse(publication=encode(changed, snapshot_pb2.Publication))

    async def Unpublish(self, request: pb.UnpublishRequest, context: Context) -> pb.UnpublishResponse:
        served, caller, publication_id = self.begin(context, request, snapshots.unpublish)
        await served.engine.unpublish(caller, publication_id)
        return pb.UnpublishResponse()

    async def ListPublications(
        self, request: pb.ListPublicationsRequest, context: Context
    ) -> pb.ListPublicationsResponse:
        served, caller, (after, limit) = self.begin(context, request, contexts.page)
        everything = sorted(await served.engine.publications(caller), key=lambda each: each.publication_id)
        found = [each for each in everything if each.publication_id > after]
        listed, token = first_page(found, limit, lambda each: each.publication_id)
        return pb.ListPublicationsResponse(
            publications=[encode(each, snapshot_pb2.Publication) for each in listed], next_page_token=token
        )


def _snapshot(kept: Snapshot) -> snapshot_pb2.Snapshot:
    return encode(kept, snapshot_pb2.Snapshot)
