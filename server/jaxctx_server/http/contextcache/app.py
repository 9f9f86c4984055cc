"""The paths of the context cache."""

from starlette.routing import Route

from jaxctx_server.http.contextcache.routes import (
    create_context,
    delete_context,
    fork_context,
    get_context,
    list_contexts,
    update_context,
)
from jaxctx_server.http.endpoint import api_route
from jaxctx_server.http.headers import ID_HEADER, TTL_HEADER

GENERATE = "/jaxctx.v1.ContextService/Generate"
LIST_SNAPSHOTS = "/jaxctx.v1.SnapshotService/ListSnapshots"
GET_SNAPSHOT = "/jaxctx.v1.SnapshotService/GetSnapshot"
UPDATE_SNAPSHOT = "/jaxctx.v1.SnapshotService/UpdateSnapshot"
DELETE_SNAPSHOT = "/jaxctx.v1.SnapshotService/DeleteSnapshot"
SAVE = "/jaxctx.v1.SnapshotService/Save"
CONTEXT = "/v1/context/{session_id}"


def contextcache_routes() -> list[Route]:
    """All paths of the context cache."""
    chosen = (ID_HEADER, TTL_HEADER)
    return [
        api_route("/v1/context", create_context, ["POST"], method=GENERATE, headers=chosen),
        api_route("/v1/context", list_contexts, method=LIST_SNAPSHOTS),
        api_route(CONTEXT, get_context, method=GET_SNAPSHOT),
        api_route(CONTEXT, update_context, ["PATCH"], method=UPDATE_SNAPSHOT),
        api_route(CONTEXT, delete_context, ["DELETE"], method=DELETE_SNAPSHOT),
        api_route(f"{CONTEXT}/fork", fork_context, ["POST"], method=SAVE, headers=chosen),
    ]
