"""The services of the contract.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from jaxctx.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    context_service_pb2,
    context_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    requests,
    session_service_pb2,
    session_service_pb2_grpc,
    snapshot_service_pb2,
    snapshot_service_pb2_grpc,
)

SERVICES: Mapping[str, ServiceDescriptor] = {
    "AdminService": admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
    "ContextService": context_service_pb2.DESCRIPTOR.services_by_name["ContextService"],
    "EngineService": engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"],
    "ModelService": model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    "SessionService": session_service_pb2.DESCRIPTOR.services_by_name["SessionService"],
    "SnapshotService": snapshot_service_pb2.DESCRIPTOR.services_by_name["SnapshotService"],
}
METHODS: Mapping[str, MethodDescriptor] = {
    method.name: method for service in SERVICES.values() for method in service.methods
}
# What has a server serve a servicer.
SERVE: Mapping[str, Callable[[Any, Any], None]] = {
    "AdminService": admin_service_pb2_grpc.add_AdminServiceServicer_to_server,
    "ContextService": context_service_pb2_grpc.add_ContextServiceServicer_to_server,
    "EngineService": engine_service_pb2_grpc.add_EngineServiceServicer_to_server,
    "ModelService": model_service_pb2_grpc.add_ModelServiceServicer_to_server,
    "SessionService": session_service_pb2_grpc.add_SessionServiceServicer_to_server,
    "SnapshotService": snapshot_service_pb2_grpc.add_SnapshotServiceServicer_to_server,
}
# Methods of an engine, and what they take of requests.
ENGINE_CALLS: Mapping[str, tuple[str, Sequence[str | type]]] = {
    "CreateContext": ("create", [requests.CreateRequest]),
    "UpdateContext": ("update", ["context_id", requests.UpdateRequest]),
    "Rewind": ("rewind", ["context_id", "to"]),
    "CloseContext": ("close", ["context_id"]),
    "Generate": ("generate", [requests.GenerateRequest]),
    "ClearCache": ("clear_cache", []),
    "Fork": ("fork", ["context_id", "child_ids", "n"]),
    "Truncate": ("truncate", ["context_id", "tokens"]),
    "Forward": ("forward", [requests.ForwardRequest]),
    "ReservePages": ("reserve_pages", ["context_id", "pages"]),
    "CommitPages": ("commit_pages", ["context_id", "pages"]),
    "ReleasePages": ("release_pages", ["context_id", "pages"]),
    "GetContext": ("inspect", ["context_id", "include_pages", "include_tokens", "include_ancestors"]),
    "ListContexts": ("list", ["page_token", "limit", "include_program_contexts"]),
    "WatchContexts": ("watch", ["include_program_contexts"]),
    "Compare": ("compare", ["a", "b"]),
    "Save": ("save", [requests.SaveRequest]),
    "Open": ("open", [requests.OpenRequest]),
    "Take": ("take", [requests.OpenRequest]),
    "GetSnapshot": ("snapshot", ["name", "version"]),
    "ListSnapshots": ("snapshots", ["prefix", "page_token", "limit"]),
    "ListSnapshotVersions": ("history", ["name"]),
    "UpdateSnapshot": ("update_snapshot", ["name", "version", requests.Changes]),
    "DeleteSnapshot": ("delete_snapshot", ["name", "version"]),
    "Publish": ("publish", ["context_id", requests.Changes]),
    "UpdatePublication": ("update_publication", ["publication_id", requests.Changes]),
    "Unpublish": ("unpublish", ["publication_id"]),
    "ListPublications": ("publications", []),
}
