"""States that are kept for a caller under a name: what a context holds, and a JSON document beside it.

A stored state is one snapshot: its tokens and pages are the context's, its attachment is the document. So a response, a
conversation or a cached context lives, expires, is durable and is deleted as its pages are, in its owner's namespace,
and no table is kept beside it. Where the server has a store it survives a restart; else it lives in memory until the
server ends.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from jaxctx.errors import FailedPrecondition, InvalidArgument, NotFound
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import json_text

Json = dict[str, Any]
MAX_DOCUMENT_BYTES = 4 << 20  # as JSON: as large as the attachment of a snapshot may be
MAX_VERSIONS = 2  # of a state: who has just read the one before can still open it


@dataclass(frozen=True, slots=True)
class StoredState:
    """One version of a stored state."""

    snapshot: Snapshot
    document: Json
    tokens: tuple[int, ...] = ()  # if they were asked for

    @property
    def name(self) -> str:
        """The name of the snapshot."""
        return self.snapshot.name

    @property
    def version(self) -> int:
        """The version of the snapshot, to overwrite or to open exactly this one."""
        return self.snapshot.version


async def save_state(
    call: HttpCall,
    context_id: str,
    name: str,
    document: Json | None,
    ttl: Ttl,
    *,
    replaces: int | None = None,
    must_last: bool = True,
    labels: Mapping[str, str] | None = None,
    max_versions: int = MAX_VERSIONS,
) -> Snapshot:
    """Keep the state of a context and a document under a name. Returns once that is as durable as the server can make
    it; with `must_last` false it is only kept in memory.

    `document` None: there is none. `replaces` is the version that this one replaces; None: the name is new.
    `max_versions` is how many versions of the name are kept. Raises AlreadyExists, Aborted (VERSION_MISMATCH) if
    another version became the latest meanwhile, and ResourceExhausted for a quota.
    """
    request = pb.SaveRequest(
        context_id=context_id,
        name=name,
        overwrite_version=replaces,
        ttl=ttl,
        durable=must_last,
        labels=labels,
        attachment=b"" if document is None else json_text(document).encode(),
        max_versions=max_versions,
    )
    try:
        return (await call.unary(call.services.snapshots.save, request)).snapshot
    except FailedPrecondition as error:
        if error.reason != "NO_STORE":
            raise
    request.durable = False
    return (await call.unary(call.services.snapshots.save, request)).snapshot


def check_document(document: Json, field: str) -> None:
    """Raise InvalidArgument, naming the field, for a document that is too large to be kept."""
    size_bytes = len(json_text(document).encode())
    if size_bytes > MAX_DOCUMENT_BYTES:
        description = f"makes what is kept {size_bytes} bytes large; up to {MAX_DOCUMENT_BYTES} are kept"
        raise InvalidArgument.field(field, description)


async def load_state(call: HttpCall, name: str, *, include_tokens: bool = False) -> StoredState:
    """The latest version of a stored state.

    Raises NotFound (SNAPSHOT_NOT_FOUND), also for a name that no snapshot can have, and for a snapshot without a
    document: its owner saved it by that name, and it is none of the states that are kept here. DataLoss for one that is
    damaged.
    """
    request = pb.GetSnapshotRequest(name=name, include_attachment=True, include_tokens=include_tokens)
    try:
        found = await call.unary(call.services.snapshots.get_snapshot, request)
    except InvalidArgument:
        raise no_state() from None
    try:
        document = json.loads(found.attachment)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise no_state()
    return StoredState(found.snapshot, document, tuple(found.tokens.ids))


def no_state() -> NotFound:
    """The error for a name under which nothing is stored."""
    return NotFound("there is no such stored state", reason="SNAPSHOT_NOT_FOUND")


async def delete_state(call: HttpCall, name: str) -> None:
    """Delete all versions of a stored state. Raises NotFound (SNAPSHOT_NOT_FOUND)."""
    await call.unary(call.services.snapshots.delete_snapshot, pb.DeleteSnapshotRequest(name=name))


def ttl_of(seconds: float | None, *, sliding: bool = False) -> Ttl:
    """A time to live. None: for ever."""
    if seconds is None:
        return Ttl()
    whole = int(seconds)
    return Ttl(duration=Duration(seconds=whole, nanos=int((seconds - whole) * 1e9)), sliding=sliding)
