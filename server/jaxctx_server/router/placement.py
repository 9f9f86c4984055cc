"""Where contexts are: on which engine each was last, and the ids that calls are at work on or are about to use."""

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
    created: pb.CreateContextRequest | None = None  # how it was created, until something else is asked of it
    moving: asyncio.Task[Any] | None = None  # what moves it to another engine, or has


class ContextInUse:
    """A context that at least one call is at work on. Exists as long as such a call holds it."""

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
        """A context of a response is on this engine. `created`: by this request it was created just now."""
        if context.context_id:
            self._placements[ContextKey(tenant, context.context_id)] = Placement(handle, created)
            while len(self._placements) > MAX_PLACEMENTS:
                self._placements.popitem(last=False)

    def add_unknown(self, key: ContextKey, handle: EngineHandle) -> None:
        """A context was found on this engine. Nothing happens if its placement is known."""
        self._placements.setdefault(key, Placement(handle))

    def forget(self, key: ContextKey) -> None:
        """A context was closed, or is to be looked for anew."""
        self._placements.pop(key, None)

    def on_engine(self, handle: EngineHandle) -> dict[ContextKey, Placement]:
        """The contexts that are on this engine, as far as is known; some may have ended there by themselves."""
        return {key: placement for key, placement in self._placements.items() if placement.handle is handle}

    def tenants(self) -> set[str]:
        """The tenants of all contexts that are known."""
        return {tenant for tenant, _ in self._placements}

    @contextmanager
    def in_use(self, key: ContextKey) -> Iterator[None]:
        """Around a call that is at work on a context."""
        use = self._in_use.setdefault(key, ContextInUse())
        try:
            yield
        finally:
            del use

    def is_in_use(self, key: ContextKey) -> bool:
        """Whether a call is at work on a context."""
        return key in self._in_use

    def creation_lock(self, key: CreatedKey) -> asyncio.Lock:
        """The lock to hold while something is made under a chosen id or name, so that only one call makes it."""
        return self._being_created.setdefault(key, asyncio.Lock())

    def idle(self, keys: Iterable[ContextKey]) -> list[ContextKey]:
        """Those of the contexts that no call is at work on."""
        return [key for key in keys if not self.is_in_use(key)]
