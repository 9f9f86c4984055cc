"""Superseded: what the server still looks up by name. SERVICES and METHODS are those of `jaxctx.rpc`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxctx.rpc import METHODS, SERVICES
from jaxctx.types import (
    CreateContextRequest,
    ForwardRequest,
    GenerateRequest,
    OpenRequest,
    RetentionUpdate,
    SaveRequest,
    UpdateContextRequest,
)
from jaxctx.v1 import (
    admin_service_pb2_grpc,
    context_service_pb2_grpc,
    engine_service_pb2_grpc,
    model_service_pb2_grpc,
    session_service_pb2_grpc,
    snapshot_service_pb2_grpc,
)

__all__ = ["ENGINE_CALLS", "METHODS", "SERVE", "SERVICES"]

# What has a server serve a servicer.
SERVE: Mapping[str, Callable[[Any, Any], None]] = {
    "AdminService": admin_service_pb2_grpc.add_AdminServiceServicer_to_server,
    "ContextService": context_service_pb2_grpc.add_ContextServiceServicer_to_server,
    "EngineService": engine_service_pb2_grpc.add_EngineServiceServicer_to_server,
    "ModelService": model_service_pb2_grpc.add_ModelServiceServicer_to_server,
    "SessionService": session_service_pb2_grpc.add_SessionServiceServicer_to_server,
    "SnapshotService": snapshot_service_pb2_grpc.add_SnapshotServiceServicer_to_server,
}
# Methods of an engine, and what they take of
ENGINE_CALLS: Mapping[str, tuple[str, Sequence[str | type]]] = {
    "CreateContext": ("create", [CreateContextRequest]),
    "UpdateContext": ("update", ["context_id", UpdateContextRequest]),
    "Rewind": ("rewind", ["context_id", "to"]),
    "CloseContext": ("close", ["context_id"]),
    "Generate": ("generate", [GenerateRequest]),
    "ClearCache": ("clear_cache", []),
    "Fork": ("fork", ["context_id", "child_ids", "n"]),
    "Truncate": ("truncate", ["context_id", "tokens"]),
    "Forward": ("forward", [ForwardRequest]),
    "ReservePages": ("reserve_pages", ["context_id", "pages"]),
    "CommitPages": ("commit_pages", ["context_id", "pages"]),
    "ReleasePages": ("release_pages", ["context_id", "pages"]),
    "GetContext": ("inspect", ["context_id", "include_pages", "include_tokens", "include_ancestors"]),
    "ListContexts": ("list", ["page_token", "limit", "include_program_contexts"]),
    "WatchContexts": ("watch", ["include_program_contexts"]),
    "Compare": ("compare", ["a", "b"]),
    "Save": ("save", [SaveRequest]),
    "Open": ("open", [OpenRequest]),
    "Take": ("take", [OpenRequest]),
    "GetSnapshot": ("snapshot", ["name", "version"]),
    "ListSnapshots": ("snapshots", ["prefix", "page_token", "limit"]),
    "ListSnapshotVersions": ("history", ["name"]),
    "UpdateSnapshot": ("update_snapshot", ["name", "version", RetentionUpdate]),
    "DeleteSnapshot": ("delete_snapshot", ["name", "version"]),
    "Publish": ("publish", ["context_id", RetentionUpdate]),
    "UpdatePublication": ("update_publication", ["publication_id", RetentionUpdate]),
    "Unpublish": ("unpublish", ["publication_id"]),
    "ListPublications": ("publications", []),
}
