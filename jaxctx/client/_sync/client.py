# Generated from jaxctx/client/client.py by scripts/stubs. Not edited by hand.
"""The client: everything that can be done with a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc

from jaxctx import convert
from jaxctx.client import requests
from jaxctx.client._sync.channel import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, Channel, Closeable
from jaxctx.client._sync.context import Context, close_all
from jaxctx.client._sync.session import Session
from jaxctx.client.options import ChatOptions
from jaxctx.client.tls import Tls
from jaxctx.types import (
    AdapterInfo,
    ContextEvent,
    ContextInfo,
    EngineStats,
    EngineStatus,
    FillResult,
    GetSnapshotResult,
    Model,
    PlanResult,
    Publication,
    RenderedChat,
    Snapshot,
)
from jaxctx.v1 import (
    admin_service_pb2,
    context_service_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_service_pb2,
)


class Client(Closeable):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    `target` is "host:port" or "unix:/path". `tls` switches TLS on, with files; `credentials` does so too, with any
    credentials of gRPC. A file that is wrong raises InvalidArgument. `timeout_s` is the deadline of calls that give
    none of their own (None: none); of `generate` it covers the whole stream. A deadline of `math.inf` is none. Calls
    that can be repeated safely are, a few times, while the server is unavailable. Leaving the `with` block closes
    the connection; contexts stay on the server.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._channel = Channel(target, credentials, api_key, timeout_s, tls)

    # --- Contexts

    def create(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
        context_id: str | None = None,
        model_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int | None = None,
        manual_commit: bool | None = None,
        pinned: bool | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        pin_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """A new context, filled at once if `text`, `tokens` or `messages` are given.

        If filling fails, the context is closed again.

        Args:
            text: As in `Context.fill`, like `tokens`, `messages`, `chat_options` and the two flags.
            tokens: Token ids.
            messages: Messages for the model's chat template.
            chat_options: Tools and other options of `messages`.
            add_generation_prompt: Whether `messages` end with what opens an answer of the assistant.
            add_special_tokens: Whether the tokenizer adds its special tokens to `text`.
            context_id: Chosen by the caller so that a retry is safe (a second request of the same id raises
                AlreadyExists): 1 to 64 characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. None:
                128 random bits from the server.
            model_id: The model to compute with, or the name of an adapter. None: the server's default.
            salt: Contexts of different salts never share pages; up to 256 bytes.
            adapter: The LoRA adapter to compute with, by its name, see `load_adapter`. None: none, unless `model_id` is
                one.
            priority: -100 to 100; higher runs first.
            manual_commit: Full pages are committed only by `Context.commit`.
            pinned: Never evicted under memory pressure. More than the caller may pin raises ResourceExhausted
                (PIN_BUDGET).
            labels: The caller's notes: up to 32, with keys of 1 to 64 bytes and values of up to 256.
            ttl_s: Seconds to live; `math.inf`, or None: for ever.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            pin_s: Seconds to stay pinned; above 0, up to 10 years; needs `pinned`. None: until unpinned.
            timeout_s: Deadline of each of the two calls, in seconds. None: the client's. After a fill that failed, the
                new context is closed, for which the error waits 5 seconds at most.
        """
        request = requests.build_request(
            context_service_pb2.CreateContextRequest,
            context_id=context_id,
            model_id=model_id,
            salt=salt,
            adapter=adapter,
            priority=priority,
            manual_commit=manual_commit,
            pinned=pinned,
            labels=labels,
            ttl=requests.time_to_live(ttl_s, sliding),
            pin_for=requests.duration_field("pin_for", pin_s),
        )
        response = self._channel.call(self._channel.contexts.CreateContext, request, timeout_s)
        context = self._context(convert.context_info_from_proto(response.context))
        if text is None and tokens is None and messages is None:
            return context
        try:
            context.fill(
                text,
                tokens=tokens,
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                chat_options=chat_options,
                add_special_tokens=add_special_tokens,
                timeout_s=timeout_s,
            )
        except GeneratorExit:  # the caller is gone: there is no one to close it for
            raise
        except BaseException:
            close_all([context])
            raise
        return context

    def context(self, context_id: str, *, timeout_s: float | None = None) -> Context:
        """A context that exists, made by any client on any connection. Raises NotFound if none has this id."""
        context = Context(self._channel, context_id)
        context.refresh(timeout_s=timeout_s)
        return context

    def contexts(
        self, *, include_program_contexts: bool = False, page: int = 100, timeout_s: float | None = None
    ) -> Iterator[Context]:
        """The caller's contexts in the order of their ids, fetched `page` (1 to 1000) at a time.

        `include_program_contexts`: also those that the server made for the caller's programs, with the label `jaxctx`
        = `program`. GraphTask.context_id and SubmitCallRequest say how long they exist.
        """
        request = requests.build_request(
            context_service_pb2.ListContextsRequest, include_program_contexts=include_program_contexts, limit=page
        )
        for response in self._channel.pages(self._channel.contexts.ListContexts, request, timeout_s):
            for context in response.contexts:
                yield self._context(convert.context_info_from_proto(context))

    def watch(
        self, *, include_program_contexts: bool = False, timeout_s: float | None = None
    ) -> Iterator[ContextEvent]:
        """The caller's contexts as they are, then every change of them, until the iteration is left. No deadline.

        `include_program_contexts`: as in `contexts`.
        """
        request = requests.build_request(
            context_service_pb2.WatchContextsRequest, include_program_contexts=include_program_contexts
        )
        responses = self._channel.stream(self._channel.contexts.WatchContexts, request, timeout_s, endless=True)
        with contextlib.closing(responses) as changes:
            for change in changes:
                yield convert.context_event_from_proto(change)

    def plan(
        self,
        text: str | None = None,
        *,
        model_id: str = "",
        salt: str = "",
        adapter: str = "",
        tokens: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        chat_options: ChatOptions | None = None,
        add_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What filling a new context would find in the cache and need, without doing it.

        `model_id`, `salt` and `adapter` are those of the new context; the other arguments are those of `Context.fill`.
        """
        content = requests.content_fields(
            text, tokens, messages, add_generation_prompt, add_special_tokens, chat_options
        )
        request = requests.build_request(
            context_service_pb2.PlanRequest, model_id=model_id, salt=salt, adapter=adapter, **content
        )
        response = self._channel.call(self._channel.contexts.Plan, request, timeout_s)
        return convert.plan_result_from_proto(response)

    # --- Snapshots

    def open(
        self,
        name: str,
        *,
        version: int | None = None,
        recompute: bool | None = None,
        context_id: str | None = None,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """A new context from a snapshot. Opening twice gives two independent contexts.

        Args:
            name: The snapshot's name.
            version: The version, from 1. None: the latest.
            recompute: Accept a snapshot of another model revision, and compute its tokens anew. Otherwise that raises
                FailedPrecondition (MODEL_MISMATCH).
            context_id: As in `create`, like `priority`, `pinned`, `pin_s`, `ttl_s` and `sliding`.
            priority: -100 to 100; higher runs first.
            pinned: Never evicted under memory pressure.
            pin_s: Seconds to stay pinned.
            ttl_s: Seconds to live.
            sliding: Every use starts the time to live again.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.OpenRequest,
            name=name,
            version=version,
            recompute=recompute,
            context_id=context_id,
            priority=priority,
            pinned=pinned,
            pin_for=requests.duration_field("pin_for", pin_s),
            ttl=requests.time_to_live(ttl_s, sliding),
        )
        response = self._channel.call(self._channel.snapshots.Open, request, timeout_s)
        return self._opened_context(convert.open_response_from_proto(response))

    def take(
        self,
        name: str,
        *,
        recompute: bool | None = None,
        context_id: str | None = None,
        priority: int | None = None,
        pinned: bool | None = None,
        pin_s: float | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        timeout_s: float | None = None,
    ) -> Context:
        """As `open` of the latest version, and delete the name atomically: of two racing calls one gets NotFound.

        Raises Aborted (VERSION_MISMATCH), and deletes nothing, if meanwhile another version became the latest.
        """
        request = requests.build_request(
            snapshot_service_pb2.TakeRequest,
            name=name,
            recompute=recompute,
            context_id=context_id,
            priority=priority,
            pinned=pinned,
            pin_for=requests.duration_field("pin_for", pin_s),
            ttl=requests.time_to_live(ttl_s, sliding),
        )
        response = self._channel.call(self._channel.snapshots.Take, request, timeout_s)
        return self._opened_context(convert.take_response_from_proto(response))

    def snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> Snapshot:
        """One version of a snapshot, counted from 1; None: the latest."""
        request = requests.build_request(snapshot_service_pb2.GetSnapshotRequest, name=name, version=version)
        response = self._channel.call(self._channel.snapshots.GetSnapshot, request, timeout_s)
        return convert.snapshot_from_proto(response.snapshot)

    def snapshot_content(
        self,
        name: str,
        *,
        version: int | None = None,
        include_attachment: bool = True,
        include_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> GetSnapshotResult:
        """One version of a snapshot with its attachment and, if wanted, its tokens.

        Args:
            name: The snapshot's name.
            version: Which version, counted from 1. None: the latest.
            include_attachment: Return the attachment; a damaged one raises DataLoss.
            include_tokens: Return the tokens, buffered ones included.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.GetSnapshotRequest,
            name=name,
            version=version,
            include_attachment=include_attachment,
            include_tokens=include_tokens,
        )
        response = self._channel.call(self._channel.snapshots.GetSnapshot, request, timeout_s)
        return convert.get_snapshot_result_from_proto(response)

    def snapshots(self, *, prefix: str = "", page: int = 100, timeout_s: float | None = None) -> Iterator[Snapshot]:
        """The latest version of each name that begins with `prefix`, in the order of the names.

        They are fetched `page` (1 to 1000) at a time.
        """
        request = requests.build_request(snapshot_service_pb2.ListSnapshotsRequest, prefix=prefix, limit=page)
        for response in self._channel.pages(self._channel.snapshots.ListSnapshots, request, timeout_s):
            for snapshot in response.snapshots:
                yield convert.snapshot_from_proto(snapshot)

    def history(self, name: str, *, timeout_s: float | None = None) -> list[Snapshot]:
        """All versions of a name that are kept, latest first."""
        request = requests.build_request(snapshot_service_pb2.ListSnapshotVersionsRequest, name=name)
        versions: list[Snapshot] = []
        for response in self._channel.pages(self._channel.snapshots.ListSnapshotVersions, request, timeout_s):
            versions.extend(convert.snapshot_from_proto(snapshot) for snapshot in response.snapshots)
        return versions

    def update_snapshot(
        self,
        name: str,
        *,
        version: int | None = None,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Change time to live or labels of a version. What is None stays as it is.

        Args:
            name: The snapshot's name.
            version: The version, from 1. None: the latest.
            ttl_s: Seconds to keep it from now on; `math.inf`: for ever.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            labels: All labels from now on.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.UpdateSnapshotRequest,
            name=name,
            version=version,
            ttl=requests.time_to_live(ttl_s, sliding),
            labels=requests.all_labels(snapshot_service_pb2.UpdateSnapshotRequest.Labels, labels),
        )
        response = self._channel.call(self._channel.snapshots.UpdateSnapshot, request, timeout_s)
        return convert.snapshot_from_proto(response.snapshot)

    def delete_snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete one version of a name (None: all of them). Returns how many versions were deleted.

        Contexts that were opened from them stay.
        """
        request = requests.build_request(snapshot_service_pb2.DeleteSnapshotRequest, name=name, version=version)
        response = self._channel.call(self._channel.snapshots.DeleteSnapshot, request, timeout_s)
        return response.versions_deleted

    def publications(self, *, timeout_s: float | None = None) -> list[Publication]:
        """The caller's publications in the order of their ids."""
        request = requests.build_request(snapshot_service_pb2.ListPublicationsRequest)
        publications: list[Publication] = []
        for response in self._channel.pages(self._channel.snapshots.ListPublications, request, timeout_s):
            publications.extend(convert.publication_from_proto(each) for each in response.publications)
        return publications

    def update_publication(
        self,
        publication_id: str,
        *,
        ttl_s: float | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Publication:
        """Change time to live or labels of a publication. What is None stays as it is.

        Args:
            publication_id: The publication's id.
            ttl_s: Seconds to publish it from now on; `math.inf`: until `unpublish`.
            sliding: Every use starts the time to live again; needs `ttl_s`.
            labels: All labels from now on.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            snapshot_service_pb2.UpdatePublicationRequest,
            publication_id=publication_id,
            ttl=requests.time_to_live(ttl_s, sliding),
            labels=requests.all_labels(snapshot_service_pb2.UpdatePublicationRequest.Labels, labels),
        )
        response = self._channel.call(self._channel.snapshots.UpdatePublication, request, timeout_s)
        return convert.publication_from_proto(response.publication)

    def unpublish(self, publication_id: str, *, timeout_s: float | None = None) -> None:
        """End a publication. Contexts that share its pages keep them.

        Raises NotFound (PUBLICATION_NOT_FOUND) for an unknown id.
        """
        request = requests.build_request(snapshot_service_pb2.UnpublishRequest, publication_id=publication_id)
        self._channel.call(self._channel.snapshots.Unpublish, request, timeout_s)

    # --- Models

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The models, in the order of their ids."""
        request = requests.build_request(model_service_pb2.ListModelsRequest)
        models: list[Model] = []
        for response in self._channel.pages(self._channel.models.ListModels, request, timeout_s):
            models.extend(convert.model_from_proto(model) for model in response.models)
        return models

    def model(self, model_id: str = "", *, timeout_s: float | None = None) -> Model:
        """One model. Without an id it is the server's default."""
        request = requests.build_request(model_service_pb2.GetModelRequest, model_id=model_id)
        response = self._channel.call(self._channel.models.GetModel, request, timeout_s)
        return convert.model_from_proto(response.model)

    def tokenize(
        self, text: str, *, model_id: str = "", add_special_tokens: bool | None = None, timeout_s: float | None = None
    ) -> list[int]:
        """The token ids of a text of up to 2 MiB.

        `add_special_tokens`: whether the tokenizer adds its special tokens (beginning of sequence). None: yes, as for
        an empty context.
        """
        request = requests.build_request(
            model_service_pb2.TokenizeRequest, model_id=model_id, text=text, add_special_tokens=add_special_tokens
        )
        response = self._channel.call(self._channel.models.Tokenize, request, timeout_s)
        return list(response.tokens)

    def detokenize(
        self,
        tokens: Sequence[int],
        *,
        model_id: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """The text of up to 131,072 token ids, 0 to vocab_size - 1 each. Those that the tokenizer lacks have no text.

        `skip_special_tokens`: leave special tokens out of the text.
        """
        request = requests.build_request(
            model_service_pb2.DetokenizeRequest,
            model_id=model_id,
            tokens=tokens,
            skip_special_tokens=skip_special_tokens,
        )
        response = self._channel.call(self._channel.models.Detokenize, request, timeout_s)
        return response.text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model_id: str = "",
        add_generation_prompt: bool | None = None,
        chat_options: ChatOptions | None = None,
        timeout_s: float | None = None,
    ) -> RenderedChat:
        """The text and tokens that the model's chat template makes of messages.

        Args:
            messages: 1 to 8192 messages in order, as in `Context.fill`; at most 2 MiB together.
            chat_options: Tools and other options of `messages`.
            model_id: The model. One without a template raises FailedPrecondition (NO_CHAT_TEMPLATE).
            add_generation_prompt: Whether to end with what opens an answer of the assistant. None: if the last role is
                "user" or "tool".
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            model_service_pb2.ApplyChatTemplateRequest,
            model_id=model_id,
            messages=requests.chat_messages(messages, add_generation_prompt, chat_options),
        )
        response = self._channel.call(self._channel.models.ApplyChatTemplate, request, timeout_s)
        return convert.rendered_chat_from_proto(response)

    # --- Sessions

    def create_session(
        self, session_id: str | None = None, *, ttl_s: float | None = None, timeout_s: float | None = None
    ) -> Session:
        """A new session, without variables.

        Args:
            session_id: As `context_id` in `create`; one that exists raises AlreadyExists. None: 128 random bits from
                the server.
            ttl_s: Seconds that it stays without being used; above 0, up to 10 years. None: an hour.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            session_service_pb2.CreateSessionRequest,
            session_id=session_id,
            ttl=requests.duration_field("ttl", ttl_s),
        )
        response = self._channel.call(self._channel.sessions.CreateSession, request, timeout_s)
        return Session(self._channel, convert.session_info_from_proto(response.session))

    def session(self, session_id: str, *, timeout_s: float | None = None) -> Session:
        """A session that exists; its time to live starts again. Raises NotFound (SESSION_NOT_FOUND)."""
        request = requests.build_request(session_service_pb2.GetSessionRequest, session_id=session_id)
        response = self._channel.call(self._channel.sessions.GetSession, request, timeout_s)
        return Session(self._channel, convert.session_info_from_proto(response.session))

    def sessions(self, *, page: int = 100, timeout_s: float | None = None) -> Iterator[Session]:
        """The caller's sessions in the order of their ids, fetched `page` (1 to 1000) at a time."""
        request = requests.build_request(session_service_pb2.ListSessionsRequest, limit=page)
        for response in self._channel.pages(self._channel.sessions.ListSessions, request, timeout_s):
            for session in response.sessions:
                yield Session(self._channel, convert.session_info_from_proto(session))

    # --- Administration

    def engines(self, *, timeout_s: float | None = None) -> list[EngineStatus]:
        """The engines and their load; in a router, as of their last reports.

        While a step takes longer than a second, an engine's load is that before the step.
        """
        request = requests.build_request(admin_service_pb2.GetStatsRequest)
        response = self._channel.call(self._channel.admin.GetStats, request, timeout_s)
        return [convert.engine_status_from_proto(engine) for engine in response.engines]

    def stats(self, *, timeout_s: float | None = None) -> EngineStats:
        """Load and memory of all engines together; draining if all are."""
        loads = [engine.stats for engine in self.engines(timeout_s=timeout_s)]
        return EngineStats(
            pages_total=sum(load.pages_total for load in loads),
            pages_free=sum(load.pages_free for load in loads),
            pages_cached=sum(load.pages_cached for load in loads),
            pages_held=sum(load.pages_held for load in loads),
            pages_reserved=sum(load.pages_reserved for load in loads),
            contexts=sum(load.contexts for load in loads),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            draining=all(load.draining for load in loads),
            steps=sum(load.steps for load in loads),
            tokens_computed=sum(load.tokens_computed for load in loads),
            tokens_cached=sum(load.tokens_cached for load in loads),
            tokens_generated=sum(load.tokens_generated for load in loads),
            preemptions=sum(load.preemptions for load in loads),
            suspensions=sum(load.suspensions for load in loads),
            compilations_after_ready=sum(load.compilations_after_ready for load in loads),
            functions_compiling=sum(load.functions_compiling for load in loads),
            tokens_restored=sum(load.tokens_restored for load in loads),
            host_pages_total=sum(load.host_pages_total for load in loads),
            host_pages_used=sum(load.host_pages_used for load in loads),
            disk_pages_total=sum(load.disk_pages_total for load in loads),
            disk_pages_used=sum(load.disk_pages_used for load in loads),
            snapshots=sum(load.snapshots for load in loads),
            publications=sum(load.publications for load in loads),
            expired=sum(load.expired for load in loads),
            tokens_drafted=sum(load.tokens_drafted for load in loads),
            tokens_accepted=sum(load.tokens_accepted for load in loads),
            tokens_queried=sum(load.tokens_queried for load in loads),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
            requests_admitted=sum(load.requests_admitted for load in loads),
            queue_seconds=sum(load.queue_seconds for load in loads),
            step_seconds=sum(load.step_seconds for load in loads),
            adapters=sum(load.adapters for load in loads),
            tokens_drafted_by_model=sum(load.tokens_drafted_by_model for load in loads),
            tokens_accepted_by_model=sum(load.tokens_accepted_by_model for load in loads),
        )

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Let the server refuse new work with Unavailable (DRAINING) and finish running work; then return.

        The server goes on draining if the caller does not wait. An engine of a router takes work until the router has
        moved its contexts to other engines, as far as it can.
        """
        request = requests.build_request(admin_service_pb2.DrainRequest)
        self._channel.call(self._channel.admin.Drain, request, timeout_s)

    def clear_cache(self, *, timeout_s: float | None = None) -> int:
        """Drop every cached page that no context holds, in a router of all engines. Returns how many pages."""
        request = requests.build_request(admin_service_pb2.ClearCacheRequest)
        response = self._channel.call(self._channel.admin.ClearCache, request, timeout_s)
        return response.pages_dropped

    def load_adapter(
        self, name: str, directory: str = "", *, model_id: str = "", timeout_s: float | None = None
    ) -> AdapterInfo:
        """Load a LoRA adapter, to be called `name`; in a router, on all engines of the model `model_id`.

        `directory` is the name of a directory in the server's --adapter-dir, as PEFT writes it; empty: `name`. Contexts
        that use an adapter that was called so before keep it. Raises InvalidArgument for a directory that is damaged or
        of another model, NotFound (ADAPTER_NOT_FOUND), ResourceExhausted (ADAPTER_SLOTS), FailedPrecondition
        (NO_ADAPTERS).
        """
        request = requests.build_request(
            admin_service_pb2.LoadAdapterRequest, name=name, directory=directory, model_id=model_id
        )
        response = self._channel.call(self._channel.admin.LoadAdapter, request, timeout_s)
        return convert.adapter_from_proto(response.adapter)

    def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> AdapterInfo:
        """Forget an adapter's name; contexts that use the adapter keep it. Raises NotFound (ADAPTER_NOT_FOUND)."""
        request = requests.build_request(admin_service_pb2.UnloadAdapterRequest, name=name)
        response = self._channel.call(self._channel.admin.UnloadAdapter, request, timeout_s)
        return convert.adapter_from_proto(response.adapter)

    def adapters(self, *, timeout_s: float | None = None) -> list[AdapterInfo]:
        """The adapters in the order of their names; then those without a name that contexts still use."""
        request = requests.build_request(admin_service_pb2.ListAdaptersRequest)
        response = self._channel.call(self._channel.admin.ListAdapters, request, timeout_s)
        return [convert.adapter_from_proto(adapter) for adapter in response.adapters]

    def close(self) -> None:
        """Close the connection. Calls under way end with Cancelled, later ones raise FailedPrecondition."""
        self._channel.close()

    def _context(self, info: ContextInfo) -> Context:
        return Context(self._channel, info.context_id, info)

    def _opened_context(self, opened: FillResult) -> Context:
        context = self._context(opened.context)
        context.opened = opened
        return context
