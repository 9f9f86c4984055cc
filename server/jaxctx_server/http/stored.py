"""States that are kept for a caller under a name: what a context holds, and a JSON document beside it.

A stored state is one snapshot: its tokens and pages are the context's, its attachment is the document. So a response, a
conversation or a cached context lives, expires, is durable and is deleted as its pages are, in its owner's namespace,
and no table is kept beside it. Where the server has a store it survives a restart; else it lives in memory until the
server ends.

A document may be large: it is read and written on a thread, within its caller's budget of time (`large_json.py`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration

from jaxctx.errors import FailedPrecondition, InvalidArgument, NotFound
from jaxctx.v1 import snapshot_service_pb2 as pb
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.large_json import is_surely_within, write_json

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
    field: str = "document",
    name_is_drawn: bool = False,
) -> Snapshot:
    """Keep the state of a context and a document under a name. Returns once that is as durable as the server can make
    it; with `must_last` false it is only kept in memory.

    `document` None: there is none. `replaces` is the version that this one replaces; None: the name is new.
    `max_versions` is how many versions of the name are kept. `name_is_drawn`: this server drew it at random.

    A large document waits for its turn, however long that takes, as what it tells of is done. Raises InvalidArgument
    naming `field` for a document that is too large, AlreadyExists, Aborted (VERSION_MISMATCH) if another version became
    the latest meanwhile, and ResourceExhausted for a quota.
    """
    attachment = b"" if document is None else await encode_document(call, document, field, patient=True)
    request = pb.SaveRequest(
        context_id=context_id,
        name=name,
        overwrite_version=replaces,
        ttl=ttl,
        durable=must_last,
        labels=labels,
        attachment=attachment,
        max_versions=max_versions,
    )
    try:
        return (await call.unary(call.services.snapshots.save, request, patient=True, draws_ids=name_is_drawn)).snapshot
    except FailedPrecondition as error:
        if error.reason != "NO_STORE":
            raise
    request.durable = False
    return (await call.unary(call.services.snapshots.save, request, patient=True, draws_ids=name_is_drawn)).snapshot


async def check_document(call: HttpCall, document: Json, field: str) -> None:
    """Raise InvalidArgument, naming the field, for a document that is too large to be kept, and ResourceExhausted
    (QUEUE_FULL) if the caller's large requests take too long.
    """
    if not is_surely_within(document, MAX_DOCUMENT_BYTES):
        await encode_document(call, document, field)


async def encode_document(call: HttpCall, document: Json, field: str, *, patient: bool = False) -> bytes:
    """A document as it is kept. Raises as `check_document`; with `patient` it waits instead of being refused."""
    encoded = await write_json(call, document, json_bytes, patient=patient)
    if len(encoded) > MAX_DOCUMENT_BYTES:
        description = f"makes what is kept {len(encoded)} bytes large; up to {MAX_DOCUMENT_BYTES} are kept"
        raise InvalidArgument.field(field, description)
    return encoded


def json_bytes(document: Json) -> bytes:
    """A document as JSON."""
    return json_text(document).encode()


def any_document(document: Json) -> bool:
    """Accepts every document."""
    return True


async def load_state(
    call: HttpCall,
    name: str,
    *,
    include_tokens: bool = False,
    is_wanted: Callable[[Json], bool] = any_document,
    patient: bool = False,
) -> StoredState:
    """The latest version of a stored state. `is_wanted` tells whether a document is of the kind that is looked for.

    Raises NotFound (SNAPSHOT_NOT_FOUND), also for a name that no snapshot can have, and for a snapshot without such a
    document: its owner saved it by that name, and it is none of the states that are kept here. DataLoss for one that is
    damaged, and ResourceExhausted (QUEUE_FULL) if it is large and the caller's large requests take too long; with
    `patient` it waits instead.
    """
    request = pb.GetSnapshotRequest(name=name, include_attachment=True, include_tokens=include_tokens)
    try:
        found = await call.unary(call.services.snapshots.get_snapshot, request)
    except InvalidArgument:
        raise no_state() from None
    read = partial(read_document, found.attachment, is_wanted)
    document = await call.convert(len(found.attachment), read, patient=patient)
    if document is None:
        raise no_state()
    return StoredState(found.snapshot, document, tuple(found.tokens.ids))


def read_document(data: bytes, is_wanted: Callable[[Json], bool]) -> Json | None:
    """The document of an attachment. None: it has none of this kind."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and is_wanted(document) else None


def no_state() -> NotFound:
    """The error for a name under which nothing is stored."""
    return NotFound("there is no such stored state", reason="SNAPSHOT_NOT_FOUND")


async def delete_state(call: HttpCall, name: str, version: int | None = None) -> None:
    """Delete all versions of a stored state, or one. Raises NotFound (SNAPSHOT_NOT_FOUND)."""
    request = pb.DeleteSnapshotRequest(name=name, version=version)
    await call.unary(call.services.snapshots.delete_snapshot, request)


def ttl_of(seconds: float | None, *, sliding: bool = False) -> Ttl:
    """A time to live. None: for ever."""
    if seconds is None:
        return Ttl()
    whole = int(seconds)
    return Ttl(duration=Duration(seconds=whole, nanos=int((seconds - whole) * 1e9)), sliding=sliding)
