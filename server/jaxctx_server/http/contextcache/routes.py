"""The paths below /v1/context: make, list, get, change, delete and fork kept contexts."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxctx.errors import InvalidArgument, NotFound
from jaxctx.v1.context_service_pb2 import CreateContextRequest
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.snapshot_service_pb2 import ListSnapshotsRequest, UpdateSnapshotRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.contextcache.errors import busy, not_found
from jaxctx_server.http.contextcache.headers import MAX_TTL_S, SESSION_ID, session_headers
from jaxctx_server.http.contextcache.stored_context import (
    MODEL,
    NAME_PREFIX,
    StoredContext,
    end_of,
    find_context,
    key_of,
    new_labels,
    save_context,
    snapshot_name,
    ttl_message,
)
from jaxctx_server.http.contextcache.use import claim_new
from jaxctx_server.http.generation import Generation, OpenedFrom, close_contexts, run
from jaxctx_server.http.openai.answer import answer
from jaxctx_server.http.openai.chat import ChatRequest, parse_chat
from jaxctx_server.http.openai.completions import CompletionRequest, parse_completion
from jaxctx_server.http.openai.request import parse_object, parse_truth
from jaxctx_server.http.stored import delete_state

Json = dict[str, Any]
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
PATCH_FIELDS = ("ttl_s", "permanent", "pinned")


async def create_context(call: HttpCall) -> Response:
    """POST /v1/context: an answer as of /v1/completions or /v1/chat/completions, whose end is kept."""
    return await answer(call, await call.parse_body(parse_prompt), makes_context=True)


def parse_prompt(data: bytes) -> CompletionRequest | ChatRequest:
    """The request of a body: of chat if it has `messages`. Raises InvalidArgument, naming the field."""
    fields = parse_object(data)
    if "messages" not in fields:
        return parse_completion(data)
    if "prompt" in fields:
        raise InvalidArgument.field("prompt", "must not be set together with messages")
    return parse_chat(data)


async def list_contexts(call: HttpCall) -> Response:
    """GET /v1/context: a page of the caller's contexts, in the order of their ids."""
    query = call.request.query_params
    request = ListSnapshotsRequest(prefix=NAME_PREFIX, limit=page_limit(query), page_token=query.get("page_token", ""))
    listed = await call.unary(call.services.snapshots.list_snapshots, request)
    now = call.frontend.kept_contexts.now()
    contexts = [
        StoredContext(snapshot.name.removeprefix(NAME_PREFIX), snapshot).json(now)
        for snapshot in listed.snapshots
        if MODEL in snapshot.labels
    ]
    return JSONResponse(
        {
            "object": "list",
            "data": contexts,
            "has_more": bool(listed.next_page_token),
            "next_page_token": listed.next_page_token,
        }
    )


def page_limit(query: Mapping[str, str]) -> int:
    """How many contexts a page has. Raises InvalidArgument."""
    text = query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise InvalidArgument.field("limit", f"must be a whole number from 1 to {MAX_LIMIT}")
    return int(text)


async def get_context(call: HttpCall) -> Response:
    """GET /v1/context/{session_id}. To look at a context is no use of it."""
    return context_response(call, await context_of_path(call))


async def update_context(call: HttpCall) -> Response:
    """PATCH /v1/context/{session_id}: another time to live from now on, or none."""
    ttl = await call.parse_body(parse_update)
    session_id = (await context_of_path(call)).session_id
    update = UpdateSnapshotRequest(name=snapshot_name(session_id), ttl=ttl)
    try:
        changed = (await call.unary(call.services.snapshots.update_snapshot, update)).snapshot
    except NotFound:
        raise call.frontend.kept_contexts.missing(key_of(call, session_id)) from None
    call.frontend.kept_contexts.remember(key_of(call, session_id), end_of(changed))
    return context_response(call, StoredContext(session_id, changed))


def parse_update(data: bytes) -> Ttl:
    """The new time to live of a body. Raises InvalidArgument, naming the field."""
    fields = parse_object(data)
    for name in fields:
        if name not in PATCH_FIELDS:
            raise InvalidArgument.field(name, "cannot be changed: `ttl_s` and `permanent` can")
    if "pinned" in fields:
        raise InvalidArgument.field("pinned", "has no meaning here: what is kept is not evicted before it ends")
    if "permanent" in fields and not parse_truth("permanent", fields["permanent"]):
        raise InvalidArgument.field("permanent", "must be true, or left out and `ttl_s` set")
    if ("permanent" in fields) == ("ttl_s" in fields):
        raise InvalidArgument.field("ttl_s", "must be set, or `permanent`, and not both")
    return ttl_message(None if "permanent" in fields else parse_seconds(fields["ttl_s"]))


def parse_seconds(value: object) -> int:
    """A time to live of a body. Raises InvalidArgument."""
    if type(value) is not int or not 1 <= value <= MAX_TTL_S:
        raise InvalidArgument.field("ttl_s", f"must be whole seconds, 1 to {MAX_TTL_S}")
    return value


async def delete_context(call: HttpCall) -> Response:
    """DELETE /v1/context/{session_id}. Forks of it remain."""
    session_id = path_id(call)
    key, contexts = key_of(call, session_id), call.frontend.kept_contexts
    contexts.claim(key)
    try:
        await find_context(call, session_id)
        try:
            await delete_state(call, snapshot_name(session_id))
        except NotFound:
            raise contexts.missing(key) from None
        contexts.forget(key)
    finally:
        contexts.release(key)
    return JSONResponse({"id": session_id, "object": "context.deleted", "session_id": session_id, "deleted": True})


async def fork_context(call: HttpCall) -> Response:
    """POST /v1/context/{session_id}/fork: another context that begins as this one stands. Its tokens are shared."""
    call.frontend.log_unknown_fields(tuple(await call.parse_body(parse_object)))
    base = await context_of_path(call)
    headers = session_headers(call.request.headers)
    new = await claim_new(call, headers)
    source = OpenedFrom(base.snapshot.name, base.snapshot.version)
    generation = Generation(create=CreateContextRequest(), source=source, keep=True)
    ttl = base.ttl if headers.ttl_s is None else new.ttl
    labels = new_labels(base.model_id, call.frontend.wall_time(), forked_from=base.session_id)
    try:
        async for _ in run(call, generation):
            pass
        forked = await save_context(call, generation.context_id, new.session_id, ttl, labels, replaces=None)
    except NotFound as error:
        if error.reason != "SNAPSHOT_NOT_FOUND":
            raise
        raise busy(base.session_id) from None  # which another request used meanwhile
    finally:
        new.release(call)
        call.frontend.run_in_background(close_contexts(call, generation.context_ids))
    return context_response(call, forked)


def path_id(call: HttpCall) -> str:
    """The session id in the path. Raises NotFound for what no context can have."""
    session_id: str = call.request.path_params["session_id"]
    if not SESSION_ID.fullmatch(session_id):
        raise not_found(session_id)
    return session_id


async def context_of_path(call: HttpCall) -> StoredContext:
    """The context that the path names. Raises NotFound (context_not_found, context_expired)."""
    return await find_context(call, path_id(call))


def context_response(call: HttpCall, context: StoredContext) -> Response:
    """A response with what the API tells of a context."""
    return JSONResponse(context.json(call.frontend.kept_contexts.now()))
