"""The blocking client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, Unpack

import grpc

from jaxctx.client import answers, kept, requests
from jaxctx.client.blocking.connection import Connection
from jaxctx.client.blocking.context import Context
from jaxctx.client.kept import Publication, Snapshot
from jaxctx.client.link import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, CallDefaults
from jaxctx.client.options import CreateOptions, OpenOptions
from jaxctx.client.requests import Content, Message
from jaxctx.client.types import ContextEvent, Engine, EngineStats, Model, PlanResult, RenderedChat
from jaxctx.errors import AlreadyExists, JaxctxError
from jaxctx.v1 import admin_service_pb2, context_service_pb2, model_service_pb2, snapshot_service_pb2


class Client:
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    `target` is "host:port" or "unix:/path"; `credentials` (grpc.ssl_channel_credentials) switches TLS on. `timeout_s`
    is the deadline of calls that give none of their own (None: none); of `generate` it covers the whole stream. Calls
    that can be repeated safely are, a few times, while the server is unavailable. Leaving the `with` block closes the
    connection; contexts live on.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._connection = Connection(target, credentials, CallDefaults(api_key, timeout_s))

    def close(self) -> None:
        """Close the connection; calls under way end with Cancelled."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- contexts ----------------------------------------------------------------------------------------------------

    def create(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> Context:
        """A new context, filled at once if text, tokens or messages are given; if that fails, none is left behind.

        `context_id`, if given, must be new (AlreadyExists). Other options: CreateContextRequest.
        """
        context_id = options.get("context_id")
        chosen_id = requests.new_id() if context_id is None else context_id
        request = requests.create(chosen_id, options)
        try:
            response = self._connection.call(self._connection.contexts.CreateContext, request, timeout_s)
        except AlreadyExists:
            if context_id is not None:
                raise
            context = self.context(chosen_id, timeout_s=timeout_s)  # the answer to our first attempt was lost
        else:
            context = Context(self._connection, chosen_id, answers.context_info(response.context))
        if not (text is None and tokens is None and messages is None):
            try:
                context.fill(
                    text,
                    tokens=tokens,
                    messages=messages,
                    add_special_tokens=add_special_tokens,
                    add_generation_prompt=add_generation_prompt,
                    timeout_s=timeout_s,
                )
            except BaseException:
                with contextlib.suppress(JaxctxError):
                    context.close()
                raise
        return context

    def context(self, context_id: str, *, timeout_s: float | None = None) -> Context:
        """An existing context, made by whichever connection. NotFound if there is none of this id."""
        context = Context(self._connection, context_id)
        context.refresh(timeout_s=timeout_s)
        return context

    def contexts(self, *, page: int = 100, timeout_s: float | None = None) -> Iterator[Context]:
        """All contexts of the caller in the order of their ids, fetched `page` at a time."""
        request = requests.make(context_service_pb2.ListContextsRequest, limit=page)
        for part in self._connection.pages(self._connection.contexts.ListContexts, request, timeout_s):
            for context in part.contexts:
                yield Context(self._connection, context.context_id, answers.context_info(context))

    def watch(self, *, timeout_s: float | None = None) -> Iterator[ContextEvent]:
        """The caller's contexts as they are, then every change of them, until the iteration is left. No deadline."""
        request = context_service_pb2.WatchContextsRequest()
        for change in self._connection.events(self._connection.contexts.WatchContexts, request, timeout_s):
            yield answers.event(change)

    def plan(
        self,
        text: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        model_id: str = "",
        salt: str = "",
        timeout_s: float | None = None,
    ) -> PlanResult:
        """What filling a new context would find in the cache and need, without doing it."""
        content = Content(text, tokens, messages, add_special_tokens, add_generation_prompt)
        request = requests.plan(content, model_id=model_id, salt=salt)
        return answers.plan_result(self._connection.call(self._connection.contexts.Plan, request, timeout_s))

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def open(
        self,
        name: str,
        *,
        version: int | None = None,
        timeout_s: float | None = None,
        **options: Unpack[OpenOptions],
    ) -> Context:
        """A new context from a snapshot; its `opened` tells where its KV came from. Options: OpenRequest."""
        context_id = options.get("context_id")
        chosen_id = requests.new_id() if context_id is None else context_id
        request = kept.open_(name, version, chosen_id, options)
        try:
            response = self._connection.call(self._connection.snapshots.Open, request, timeout_s)
        except AlreadyExists:
            if context_id is not None:
                raise
            return self.context(chosen_id, timeout_s=timeout_s)  # the answer to our first attempt was lost
        return self._opened(response)

    def take(self, name: str, *, timeout_s: float | None = None, **options: Unpack[OpenOptions]) -> Context:
        """As `open` of the latest version, and the snapshot is no more: of two that take it one gets NotFound."""
        request = kept.take(name, options)
        response = self._connection.call(self._connection.snapshots.Take, request, timeout_s)
        return self._opened(response)

    def snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> Snapshot:
        """One version of a snapshot; by default the latest."""
        request = requests.make(snapshot_service_pb2.GetSnapshotRequest, name=name, version=version)
        response = self._connection.call(self._connection.snapshots.GetSnapshot, request, timeout_s)
        return kept.snapshot(response.snapshot)

    def snapshots(self, *, prefix: str = "", page: int = 100, timeout_s: float | None = None) -> Iterator[Snapshot]:
        """The latest version of each name that begins with `prefix`, in name order, fetched `page` at a time."""
        request = requests.make(snapshot_service_pb2.ListSnapshotsRequest, prefix=prefix, limit=page)
        for part in self._connection.pages(self._connection.snapshots.ListSnapshots, request, timeout_s):
            for snapshot in part.snapshots:
                yield kept.snapshot(snapshot)

    def history(self, name: str, *, timeout_s: float | None = None) -> list[Snapshot]:
        """All versions of a snapshot that are kept, latest first."""
        request = requests.make(snapshot_service_pb2.ListSnapshotVersionsRequest, name=name)
        parts = self._connection.pages(self._connection.snapshots.ListSnapshotVersions, request, timeout_s)
        return [kept.snapshot(snapshot) for part in parts for snapshot in part.snapshots]

    def update_snapshot(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        sliding: bool = False,
        labels: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Snapshot:
        """Change the latest version; None leaves a setting as it is, a `ttl_s` of `math.inf` is for ever."""
        request = kept.update(name, ttl_s, sliding, labels)
        response = self._connection.call(self._connection.snapshots.UpdateSnapshot, request, timeout_s)
        return kept.snapshot(response.snapshot)

    def delete_snapshot(self, name: str, *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Delete a snapshot, or one version of it; returns how many versions. Contexts opened from it live on."""
        request = requests.make(snapshot_service_pb2.DeleteSnapshotRequest, name=name, version=version)
        response = self._connection.call(self._connection.snapshots.DeleteSnapshot, request, timeout_s)
        return response.versions_deleted

    def publications(self, *, timeout_s: float | None = None) -> list[Publication]:
        """The caller's publications in the order of their ids."""
        request = snapshot_service_pb2.ListPublicationsRequest()
        parts = self._connection.pages(self._connection.snapshots.ListPublications, request, timeout_s)
        return [kept.publication(each) for part in parts for each in part.publications]

    def unpublish(self, publication_id: str, *, timeout_s: float | None = None) -> None:
        """End a publication; contexts that share its pages keep them."""
        request = requests.make(snapshot_service_pb2.UnpublishRequest, publication_id=publication_id)
        self._connection.call(self._connection.snapshots.Unpublish, request, timeout_s)

    def _opened(self, response: snapshot_service_pb2.OpenResponse | snapshot_service_pb2.TakeResponse) -> Context:
        opened = answers.fill_result(response)
        context = Context(self._connection, opened.context.context_id, opened.context)
        context.opened = opened
        return context

    # --- models ------------------------------------------------------------------------------------------------------

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The models that the server serves."""
        request = model_service_pb2.ListModelsRequest()
        parts = self._connection.pages(self._connection.models.ListModels, request, timeout_s)
        return [answers.model(model) for part in parts for model in part.models]

    def model(self, model_id: str = "", *, timeout_s: float | None = None) -> Model:
        """One model; by default the server's only, or default, one."""
        request = requests.make(model_service_pb2.GetModelRequest, model_id=model_id)
        return answers.model(self._connection.call(self._connection.models.GetModel, request, timeout_s).model)

    def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool | None = None,
        model_id: str = "",
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text; with special tokens, as at the start of a context, unless told otherwise."""
        request = requests.make(
            model_service_pb2.TokenizeRequest, model_id=model_id, text=text, add_special_tokens=add_special_tokens
        )
        return list(self._connection.call(self._connection.models.Tokenize, request, timeout_s).tokens)

    def detokenize(
        self,
        tokens: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model_id: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = requests.make(
            model_service_pb2.DetokenizeRequest,
            model_id=model_id,
            tokens=tokens,
            skip_special_tokens=skip_special_tokens,
        )
        return self._connection.call(self._connection.models.Detokenize, request, timeout_s).text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        model_id: str = "",
        timeout_s: float | None = None,
    ) -> RenderedChat:
        """What a fill with these messages appends to an empty context."""
        request = requests.apply_chat_template(messages, add_generation_prompt, model_id)
        response = self._connection.call(self._connection.models.ApplyChatTemplate, request, timeout_s)
        return RenderedChat(text=response.text, tokens=tuple(response.tokens))

    # --- administration ----------------------------------------------------------------------------------------------

    def engines(self, *, timeout_s: float | None = None) -> list[Engine]:
        """Each engine of the server, with its load and memory."""
        response = self._connection.call(
            self._connection.admin.GetStats, admin_service_pb2.GetStatsRequest(), timeout_s
        )
        return [answers.engine(engine) for engine in response.engines]

    def stats(self, *, timeout_s: float | None = None) -> EngineStats:
        """Load and memory of all engines together."""
        return answers.total(self.engines(timeout_s=timeout_s))

    def drain(self, *, timeout_s: float | None = None) -> None:
        """Make the server refuse new work, and wait until what runs is done."""
        self._connection.call(self._connection.admin.Drain, admin_service_pb2.DrainRequest(), timeout_s)

    def clear_cache(self, *, timeout_s: float | None = None) -> int:
        """Drop every cached page that no context holds; returns how many."""
        request = admin_service_pb2.ClearCacheRequest()
        return self._connection.call(self._connection.admin.ClearCache, request, timeout_s).pages_dropped
