# Generated from jaxctx/client/client.py by scripts/stubs. Not edited by hand.
"""What can be done with a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Unpack

import grpc

from jaxctx.client._sync.channel import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, AsyncCloseable, Channel
from jaxctx.client._sync.context import Context
from jaxctx.client._sync.operations import ServerCalls
from jaxctx.client._sync.session import Session
from jaxctx.client.options import Content, CreateOptions
from jaxctx.convert import decode
from jaxctx.errors import JaxctxError
from jaxctx.types import ContextEvent, ContextInfo, EngineStats, FillResult, SessionInfo


class Client(ServerCalls[Context, Session], AsyncCloseable):
    """A connection to a jaxctx server. Every method may raise the errors of `jaxctx.errors`.

    `target` is "host:port" or "unix:/path"; `credentials` (grpc.ssl_channel_credentials) switches TLS on. `timeout_s`
    is the deadline of calls that give none of their own (None: none); of `generate` it covers the whole stream. Calls
    that can be repeated safely are, a few times, while the server is unavailable. Leaving the `with` block closes
    the connection; contexts live on.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._link = Channel(target, credentials, api_key, timeout_s)

    def _context(self, info: ContextInfo) -> Context:
        return Context(self._link, info.context_id, info)

    def _opened(self, opened: FillResult) -> Context:
        context = self._context(opened.context)
        context.opened = opened
        return context

    def _session(self, info: SessionInfo) -> Session:
        return Session(self._link, info)

    def create(
        self, text: str | None = None, *, timeout_s: float | None = None, **options: Unpack[CreateOptions]
    ) -> Context:
        """A new context, filled at once if text, `tokens` or `messages` are given; if that fails, none is left behind.

        `context_id`, if given, must be new (AlreadyExists). Other options: CreateContextRequest.
        """
        content: Any = {name: value for name, value in options.items() if name in Content.__annotations__}
        settings: Any = {name: value for name, value in options.items() if name not in content}
        new = self._create(timeout_s=timeout_s, **settings)
        if text is not None or content.get("tokens") is not None or content.get("messages") is not None:
            try:
                new.fill(text, timeout_s=timeout_s, **content)
            except GeneratorExit:  # nobody is left to close it for
                raise
            except BaseException:
                with contextlib.suppress(JaxctxError):
                    new.close()
                raise
        return new

    def context(self, context_id: str, *, timeout_s: float | None = None) -> Context:
        """An existing context, made by whichever connection. NotFound if there is none of this id."""
        found = Context(self._link, context_id)
        found.refresh(timeout_s=timeout_s)
        return found

    def watch(
        self, *, include_program_contexts: bool = False, timeout_s: float | None = None
    ) -> Iterator[ContextEvent]:
        """The caller's contexts as they are, then every change of them, until the iteration is left. No deadline.

        `include_program_contexts`: as in `contexts`.
        """
        wanted = {"include_program_contexts": include_program_contexts}
        with contextlib.closing(self._link.stream("WatchContexts", timeout_s, endless=True, **wanted)) as changes:
            for change in changes:
                yield decode(change, ContextEvent)

    def stats(self, *, timeout_s: float | None = None) -> EngineStats:
        """Load and memory of all engines together; draining if all are."""
        loads = [engine.stats for engine in self.engines(timeout_s=timeout_s)]
        sums = {each.name: sum(getattr(load, each.name) for load in loads) for each in fields(EngineStats)}
        return EngineStats(**{**sums, "draining": all(load.draining for load in loads)})

    def close(self) -> None:
        """Close the connection; calls under way end with Cancelled."""
        self._link.channel.close()
