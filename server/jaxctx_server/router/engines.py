"""The engines of a router, as its other modules use them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import cast

from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RemoteEngine, RequestT, ResponseT, StubMethod, engine_lost
from jaxctx.errors import JaxctxError, Unavailable
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.lifecycle import ServerLifecycle


class RouterEngines:
    """The engines that answer now, those that may come back, and RPCs to them."""

    def __init__(self, lifecycle: ServerLifecycle) -> None:
        self._lifecycle = lifecycle

    def handles(self) -> list[EngineHandle]:
        """The engines that answer now, in the order in which they registered."""
        return self._lifecycle.served().engine_handles()

    def is_registered(self, handle: EngineHandle) -> bool:
        """Whether this registration of the engine has not ended."""
        return handle in self.handles()

    def by_load(self, model_id: str | None = None, first: EngineHandle | None = None) -> list[EngineHandle]:
        """The engines to ask, in order: `first` if it is among them, then by load; draining ones come last.

        `model_id` restricts them to those of a model ("": the default one), or an adapter; None: any. Raises NotFound
        (MODEL_NOT_FOUND), and Unavailable (ENGINE_LOST) before any engine has come.
        """
        if model_id is None:
            handles = self.handles()
        else:
            registry = self._lifecycle.served().engines
            name, _ = registry.find_model(model_id)
            handles = registry.serving(name)
        return sorted(handles, key=lambda handle: (handle is not first, handle.draining, handle.load))

    def may_come_back(self) -> bool:
        """Whether an engine that has registered does not answer now, and may again."""
        state = self._lifecycle.served()
        return any(
            address not in state.engines.handles and not watch.done()
            for address, watch in state.programs.watching.items()
        )

    def no_engine_error(self) -> Unavailable:
        """The error of a call for which there is no engine."""
        registry = self._lifecycle.served().engines
        return engine_lost() if registry.handles else registry.no_engine_error()

    async def ask_each(
        self,
        method: StubMethod[RequestT, ResponseT],
        caller: Caller,
        request: RequestT,
        handles: Sequence[EngineHandle],
        *,
        ignore: type[JaxctxError],
    ) -> dict[EngineHandle, ResponseT]:
        """The response of each of these engines, but of those that raise an `ignore` error."""
        responses = await asyncio.gather(
            *(self._ask_one(method, caller, request, handle, ignore) for handle in handles)
        )
        return {handle: response for handle, response in zip(handles, responses, strict=True) if response is not None}

    async def _ask_one(
        self,
        method: StubMethod[RequestT, ResponseT],
        caller: Caller,
        request: RequestT,
        handle: EngineHandle,
        ignore: type[JaxctxError],
    ) -> ResponseT | None:
        """The response of one engine; None if it raises an `ignore` error."""
        engine = remote_engine(handle)
        with suppress(ignore):
            return await engine.call(method(engine), caller, request)
        return None


def remote_engine(handle: EngineHandle) -> RemoteEngine:
    """The engine of a handle. A router has no other ones."""
    return cast(RemoteEngine, handle.engine)


def set_engine_id(contexts: Iterable[Context], handle: EngineHandle) -> None:
    """Set `engine_id` in contexts of an engine's response: the engine does not know its id on this router."""
    for context in contexts:
        if context.context_id:
            context.engine_id = handle.id
