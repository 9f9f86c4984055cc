"""The services of the contract, as transports call them: one Protocol a service, one method an RPC.

Every method takes the caller and the contract's request message, which is valid by the time it arrives here. It returns
the contract's response message, or for a streaming RPC an asynchronous generator of them. Such a generator must be
closed (`contextlib.aclosing`) as soon as it is no longer read: that ends its work. Every method raises the errors
of `jaxctx.errors` that protos/jaxctx/v1 describes for its RPC, and no others on purpose.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from jaxctx.engine.interface import Caller
from jaxctx.v1 import (
    admin_service_pb2,
    context_service_pb2,
    engine_service_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)


class ContextService(Protocol):
    """Contexts: create, fill, generate, fork, rewind, inspect, close (context_service.proto)."""

    async def create_context(
        self, caller: Caller, request: context_service_pb2.CreateContextRequest
    ) -> context_service_pb2.CreateContextResponse:
        """A new, empty context."""

    async def fill(self, caller: Caller, request: context_service_pb2.FillRequest) -> context_service_pb2.FillResponse:
        """Append text, tokens or messages to a context."""

    async def flush(
        self, caller: Caller, request: context_service_pb2.FlushRequest
    ) -> context_service_pb2.FlushResponse:
        """Compute what is buffered in a context."""

    def generate(
        self, caller: Caller, request: context_service_pb2.GenerateRequest
    ) -> AsyncGenerator[context_service_pb2.GenerateResponse, None]:
        """Continue a context and stream the output."""

    async def forward(
        self, caller: Caller, request: context_service_pb2.ForwardRequest
    ) -> context_service_pb2.ForwardResponse:
        """One forward pass over explicit tokens, positions and attention masks."""

    async def fork(self, caller: Caller, request: context_service_pb2.ForkRequest) -> context_service_pb2.ForkResponse:
        """Children that begin as the context is now."""

    async def truncate(
        self, caller: Caller, request: context_service_pb2.TruncateRequest
    ) -> context_service_pb2.TruncateResponse:
        """Drop trailing tokens that are in no committed page."""

    async def rewind(
        self, caller: Caller, request: context_service_pb2.RewindRequest
    ) -> context_service_pb2.RewindResponse:
        """Go back to any length."""

    async def switch_adapter(
        self, caller: Caller, request: context_service_pb2.SwitchAdapterRequest
    ) -> context_service_pb2.SwitchAdapterResponse:
        """Go on with another adapter, or none."""

    async def get_context(
        self, caller: Caller, request: context_service_pb2.GetContextRequest
    ) -> context_service_pb2.GetContextResponse:
        """The counters of a context; on request its pages, tokens and ancestors."""

    async def list_contexts(
        self, caller: Caller, request: context_service_pb2.ListContextsRequest
    ) -> context_service_pb2.ListContextsResponse:
        """A page of the caller's contexts in the order of their ids."""

    def watch_contexts(
        self, caller: Caller, request: context_service_pb2.WatchContextsRequest
    ) -> AsyncGenerator[context_service_pb2.WatchContextsResponse, None]:
        """The caller's contexts, and then every change of them."""

    async def compare(
        self, caller: Caller, request: context_service_pb2.CompareRequest
    ) -> context_service_pb2.CompareResponse:
        """How many tokens two contexts have in common."""

    async def update_context(
        self, caller: Caller, request: context_service_pb2.UpdateContextRequest
    ) -> context_service_pb2.UpdateContextResponse:
        """Change priority, pin, time to live or labels of a context."""

    async def plan(self, caller: Caller, request: context_service_pb2.PlanRequest) -> context_service_pb2.PlanResponse:
        """What a fill would find in the cache and need, without doing it."""

    async def reserve_pages(
        self, caller: Caller, request: context_service_pb2.ReservePagesRequest
    ) -> context_service_pb2.ReservePagesResponse:
        """Allocate working pages ahead."""

    async def commit_pages(
        self, caller: Caller, request: context_service_pb2.CommitPagesRequest
    ) -> context_service_pb2.CommitPagesResponse:
        """Make the first full working pages immutable and shareable."""

    async def release_pages(
        self, caller: Caller, request: context_service_pb2.ReleasePagesRequest
    ) -> context_service_pb2.ReleasePagesResponse:
        """Give back working pages from the end, with the tokens in them."""

    async def close_context(
        self, caller: Caller, request: context_service_pb2.CloseContextRequest
    ) -> context_service_pb2.CloseContextResponse:
        """Give up a context."""


class SnapshotService(Protocol):
    """Snapshots under names, and publications for other tenants (snapshot_service.proto)."""

    async def save(
        self, caller: Caller, request: snapshot_service_pb2.SaveRequest
    ) -> snapshot_service_pb2.SaveResponse:
        """Keep a context's present state under a name."""

    async def open(
        self, caller: Caller, request: snapshot_service_pb2.OpenRequest
    ) -> snapshot_service_pb2.OpenResponse:
        """A new context from a snapshot."""

    async def take(
        self, caller: Caller, request: snapshot_service_pb2.TakeRequest
    ) -> snapshot_service_pb2.TakeResponse:
        """A new context from a snapshot, which is deleted with that."""

    async def get_snapshot(
        self, caller: Caller, request: snapshot_service_pb2.GetSnapshotRequest
    ) -> snapshot_service_pb2.GetSnapshotResponse:
        """One version of a snapshot."""

    async def list_snapshots(
        self, caller: Caller, request: snapshot_service_pb2.ListSnapshotsRequest
    ) -> snapshot_service_pb2.ListSnapshotsResponse:
        """A page of the caller's snapshots, the latest version of each, in the order of their names."""

    async def list_snapshot_versions(
        self, caller: Caller, request: snapshot_service_pb2.ListSnapshotVersionsRequest
    ) -> snapshot_service_pb2.ListSnapshotVersionsResponse:
        """A page of the versions of one snapshot, latest first."""

    async def update_snapshot(
        self, caller: Caller, request: snapshot_service_pb2.UpdateSnapshotRequest
    ) -> snapshot_service_pb2.UpdateSnapshotResponse:
        """Change time to live or labels of a version of a snapshot."""

    async def delete_snapshot(
        self, caller: Caller, request: snapshot_service_pb2.DeleteSnapshotRequest
    ) -> snapshot_service_pb2.DeleteSnapshotResponse:
        """Delete a snapshot or one version of it."""

    async def publish(
        self, caller: Caller, request: snapshot_service_pb2.PublishRequest
    ) -> snapshot_service_pb2.PublishResponse:
        """Let contexts of all tenants share the full pages of a context."""

    async def unpublish(
        self, caller: Caller, request: snapshot_service_pb2.UnpublishRequest
    ) -> snapshot_service_pb2.UnpublishResponse:
        """End a publication."""

    async def update_publication(
        self, caller: Caller, request: snapshot_service_pb2.UpdatePublicationRequest
    ) -> snapshot_service_pb2.UpdatePublicationResponse:
        """Change time to live or labels of a publication."""

    async def list_publications(
        self, caller: Caller, request: snapshot_service_pb2.ListPublicationsRequest
    ) -> snapshot_service_pb2.ListPublicationsResponse:
        """A page of the caller's publications in the order of their ids."""


class ModelService(Protocol):
    """Models and tokenizers (model_service.proto)."""

    async def list_models(
        self, caller: Caller, request: model_service_pb2.ListModelsRequest
    ) -> model_service_pb2.ListModelsResponse:
        """A page of the models in the order of their ids."""

    async def get_model(
        self, caller: Caller, request: model_service_pb2.GetModelRequest
    ) -> model_service_pb2.GetModelResponse:
        """One model."""

    async def tokenize(
        self, caller: Caller, request: model_service_pb2.TokenizeRequest
    ) -> model_service_pb2.TokenizeResponse:
        """Token ids of a text."""

    async def detokenize(
        self, caller: Caller, request: model_service_pb2.DetokenizeRequest
    ) -> model_service_pb2.DetokenizeResponse:
        """Text of token ids."""

    async def apply_chat_template(
        self, caller: Caller, request: model_service_pb2.ApplyChatTemplateRequest
    ) -> model_service_pb2.ApplyChatTemplateResponse:
        """Text and tokens that the model's chat template makes of messages."""


class SessionService(Protocol):
    """Sessions, semantic variables, semantic calls and native steps (session_service.proto)."""

    async def create_session(
        self, caller: Caller, request: session_service_pb2.CreateSessionRequest
    ) -> session_service_pb2.CreateSessionResponse:
        """A new session without variables."""

    async def get_session(
        self, caller: Caller, request: session_service_pb2.GetSessionRequest
    ) -> session_service_pb2.GetSessionResponse:
        """A session and the numbers of its variables, calls and started tasks."""

    async def list_sessions(
        self, caller: Caller, request: session_service_pb2.ListSessionsRequest
    ) -> session_service_pb2.ListSessionsResponse:
        """A page of the caller's sessions in the order of their ids."""

    async def delete_session(
        self, caller: Caller, request: session_service_pb2.DeleteSessionRequest
    ) -> session_service_pb2.DeleteSessionResponse:
        """Cancel what runs in a session and give back its pages."""

    async def create_variable(
        self, caller: Caller, request: session_service_pb2.CreateVariableRequest
    ) -> session_service_pb2.CreateVariableResponse:
        """A new variable, set or not."""

    async def set_variable(
        self, caller: Caller, request: session_service_pb2.SetVariableRequest
    ) -> session_service_pb2.SetVariableResponse:
        """Give a variable its text."""

    async def get_variable(
        self, caller: Caller, request: session_service_pb2.GetVariableRequest
    ) -> session_service_pb2.GetVariableResponse:
        """A variable as it is, or once it is set."""

    def read_variable(
        self, caller: Caller, request: session_service_pb2.ReadVariableRequest
    ) -> AsyncGenerator[session_service_pb2.ReadVariableResponse, None]:
        """Ask for a variable and stream its text."""

    async def list_variables(
        self, caller: Caller, request: session_service_pb2.ListVariablesRequest
    ) -> session_service_pb2.ListVariablesResponse:
        """A page of a session's variables in the order of their ids, without their texts."""

    async def submit_call(
        self, caller: Caller, request: session_service_pb2.SubmitCallRequest
    ) -> session_service_pb2.SubmitCallResponse:
        """Add a semantic call or a native step."""

    async def cancel_call(
        self, caller: Caller, request: session_service_pb2.CancelCallRequest
    ) -> session_service_pb2.CancelCallResponse:
        """Fail what has not ended of a call, and what needs it."""

    async def get_graph(
        self, caller: Caller, request: session_service_pb2.GetGraphRequest
    ) -> session_service_pb2.GetGraphResponse:
        """The tasks of a session: inputs, output, phase and engine of each."""


class AdminService(Protocol):
    """Load, drain, cache and adapters of a server (admin_service.proto)."""

    async def get_stats(
        self, caller: Caller, request: admin_service_pb2.GetStatsRequest
    ) -> admin_service_pb2.GetStatsResponse:
        """Description and load of each engine."""

    async def drain(self, caller: Caller, request: admin_service_pb2.DrainRequest) -> admin_service_pb2.DrainResponse:
        """Refuse new work, let running work finish, then return."""

    async def clear_cache(
        self, caller: Caller, request: admin_service_pb2.ClearCacheRequest
    ) -> admin_service_pb2.ClearCacheResponse:
        """Drop every cached page that no context holds."""

    async def load_adapter(
        self, caller: Caller, request: admin_service_pb2.LoadAdapterRequest
    ) -> admin_service_pb2.LoadAdapterResponse:
        """Load an adapter under a name."""

    async def unload_adapter(
        self, caller: Caller, request: admin_service_pb2.UnloadAdapterRequest
    ) -> admin_service_pb2.UnloadAdapterResponse:
        """Forget an adapter's name."""

    async def list_adapters(
        self, caller: Caller, request: admin_service_pb2.ListAdaptersRequest
    ) -> admin_service_pb2.ListAdaptersResponse:
        """The adapters that are loaded."""


class EngineService(Protocol):
    """Engines of a router (engine_service.proto)."""

    def register(
        self, peer_host: str, request: engine_service_pb2.RegisterRequest
    ) -> AsyncGenerator[engine_service_pb2.RegisterResponse, None]:
        """Register the engine that listens on the request's port at `peer_host` ("": this machine), for as long as the
        generator runs; or have an engine that leaves evacuated. Raises FailedPrecondition (WRONG_ROLE) where the server
        is no router.
        """
