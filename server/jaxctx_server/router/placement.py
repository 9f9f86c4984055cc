"""Placements: the engine that each context was last on, and the ids that calls use now or are about to create."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router.engines import set_engine_id

MAX_PLACEMENTS = 1 << 17  # contexts whose engine is remembered; the latest used


class ContextKey(NamedTuple):
    """A context, among those of all tenants."""

    tenant: str
    context_id: str


class CreatedKey(NamedTuple):
    """Something that a call is about to make, under an id or name that its request chooses."""

    tenant: str
    find_rpc: str  # the RPC that finds what has the id or name
    name: str


@dataclass(slots=True)
class Placement:
    """Where a context is, or was."""

    handle: EngineHandle
    created: pb.CreateContextRequest | None = None  # the request that created it, while there was no other one for it
    adapter_revision: str = ""  # the content of its adapter, as of the last response; empty: none, or not known
    moving: asyncio.Task[Any] | None = None  # the task that moves it to another engine, or has moved it


class ContextInUse:
    """A context that at least one call uses. The object exists as long as such a call holds it."""

    __slots__ = ("__weakref__",)


class PlacementTable:
    """The placements of a router. Used on the event loop."""

    def __init__(self) -> None:
        self._placements: OrderedDict[ContextKey, Placement] = OrderedDict()
        self._being_created: WeakValueDictionary[CreatedKey, asyncio.Lock] = WeakValueDictionary()
        self._in_use: WeakValueDictionary[ContextKey, ContextInUse] = WeakValueDictionary()

    def get(self, key: ContextKey) -> Placement | None:
        """Where a context is, if that is remembered."""
        return self._placements.get(key)

    def use(self, key: ContextKey) -> Placement | None:
        """As `get`, for a call: placements that are not used are forgotten first."""
        placement = self._placements.get(key)
        if placement is not None:
            self._placements.move_to_end(key)
        return placement

    def remember(
        self, tenant: str, handle: EngineHandle, context: Context, created: pb.CreateContextRequest | None = None
    ) -> None:
        """Remember that the context of a response is on this engine. `created`: the request that just created it."""
        if context.context_id:
            placement = Placement(handle, created, context.adapter_revision)
            self._placements[ContextKey(tenant, context.context_id)] = placement
            while len(self._placements) > MAX_PLACEMENTS:
                self._placements.popitem(last=False)

    def record_response(self, tenant: str, handle: EngineHandle, context: Context) -> None:
        """Remember that the context of an engine's response is on this engine, and name the engine in the response."""
        set_engine_id([context], handle)
        self.remember(tenant, handle, context)

    def add_unknown(self, key: ContextKey, handle: EngineHandle) -> None:
        """Remember that a context was found on this engine, unless its placement is known."""
        self._placements.setdefault(key, Placement(handle))

    def forget(self, key: ContextKey) -> None:
        """Forget a context that was closed, or that has to be looked for again."""
        self._placements.pop(key, None)

    def on_engine(self, handle: EngineHandle) -> dict[ContextKey, Placement]:
        """The contexts that are on this engine, as far as is known; some may have ended there by themselves."""
        return {key: placement for key, placement in self._placements.items() if placement.handle is handle}

    def tenants(self) -> set[str]:
        """The tenants of all contexts that are known."""
        return {tenant for tenant, _ in self._placements}

    @contextmanager
    def in_use(self, key: ContextKey) -> Iterator[None]:
        """While entered, the context counts as used by a call."""
        use = self._in_use.setdefault(key, ContextInUse())
        try:
            yield
        finally:
            del use

    def is_in_use(self, key: ContextKey) -> bool:
        """Whether a call uses the context."""
        return key in self._in_use

    def creation_lock(self, key: CreatedKey) -> asyncio.Lock:
        """The lock to hold while something is made under a chosen id or name, so that only one call makes it."""
        return self._being_created.setdefault(key, asyncio.Lock())

    def idle(self, keys: Iterable[ContextKey]) -> list[ContextKey]:
        """Those of the contexts that no call uses."""
        return [key for key in keys if not self.is_in_use(key)]
