"""The adapters that an engine holds: names, slots and users.

A slot belongs to the content of an adapter, whatever it is called, so that two names of equal weights share one. It is
taken again once nothing is called so and no context uses it. Nothing here waits. Only the step thread uses a table, but
for `revisions`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxctx.cache.context_cache import ContextCache
from jaxctx.errors import FailedPrecondition, NotFound, ResourceExhausted
from jaxctx.model.adapters import Adapter
from jaxctx.types import AdapterInfo


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter in a slot."""

    adapter: Adapter
    slot: int  # from 1
    name: str  # that it was loaded as last
    names: set[str] = field(default_factory=set)  # that it has now
    loading: bool = True  # its parameters are not all there yet

    @property
    def content_hash(self) -> str:
        """What identifies it, see `Adapter`."""
        return self.adapter.content_hash


class AdapterTable:
    """The adapters in the slots of one engine; without slots there are never any."""

    def __init__(self, slots: int, cache: ContextCache) -> None:
        self._cache = cache
        self._slots: list[LoadedAdapter | None] = [None] * slots  # slot n at n - 1
        self._by_name: dict[str, LoadedAdapter] = {}
        self._slot_of: dict[str, int] = {}  # by content hash
        self.revisions: Mapping[str, str] = {}
        """Name → content hash, for any thread: it is replaced as a whole when a name comes or goes."""

    @property
    def slot_of(self) -> Mapping[str, int]:
        """Content hash → slot, of all adapters that a context may use."""
        return self._slot_of

    @property
    def count(self) -> int:
        """How many slots are taken."""
        return sum(each is not None for each in self._slots)

    def contents(self) -> list[Adapter | None]:
        """What is in each slot, or is to be."""
        return [None if each is None else each.adapter for each in self._slots]

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of this name. Raises NotFound (ADAPTER_NOT_FOUND)."""
        found = self._by_name.get(name)
        if found is None:
            raise NotFound(f"no adapter {name!r} is loaded", reason="ADAPTER_NOT_FOUND")
        return found

    def require(self, content_hash: str, name: str) -> str:
        """A name for the adapter of this content, which was called `name` when it was saved: that, if it still is.

        Raises FailedPrecondition (ADAPTER_MISMATCH) if it is in no slot.
        """
        slot = self._slot_of.get(content_hash)
        if slot is None:
            others = f"; the adapter that is called {name!r} here has other weights" if name in self._by_name else ""
            loaded = ", ".join(repr(each) for each in sorted(self._by_name)) or "none"
            message = f"saved with the adapter {name!r}, which is not loaded{others}; loaded are: {loaded}"
            raise FailedPrecondition(message, reason="ADAPTER_MISMATCH")
        found = self._slots[slot - 1]
        assert found is not None
        return name if name in found.names or not found.names else min(found.names)

    def infos(self) -> list[AdapterInfo]:
        """Every name and its adapter, in the order of the names; then adapters without a name that contexts use."""
        users = self._users()
        infos = [_info(found, name, users) for name, found in sorted(self._by_name.items())]
        unnamed = [each for each in self._slots if each is not None and not (each.names or each.loading)]
        return infos + [_info(each, each.name, users) for each in unnamed if users.get(each.content_hash)]

    def describe(self, name: str) -> AdapterInfo:
        """The adapter of this name. Raises NotFound (ADAPTER_NOT_FOUND)."""
        return _info(self.find(name), name, self._users())

    def begin(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Give the adapter a slot, which it keeps at least until `finish` or `abandon`.

        If it is there under any name, that is returned, with nothing to load. Raises ResourceExhausted (ADAPTER_SLOTS).
        """
        slot = self._slot_of.get(adapter.content_hash)
        if slot is not None:
            found = self._slots[slot - 1]
            assert found is not None
            return found
        loaded = LoadedAdapter(adapter, self._take_slot(), name)
        self._slots[loaded.slot - 1] = loaded
        return loaded

    def finish(self, loaded: LoadedAdapter, name: str) -> AdapterInfo:
        """Call it `name` from now on; its parameters are all there. What was called so loses the name."""
        before = self._by_name.get(name)
        if before is not None:
            before.names.discard(name)
        loaded.loading = False
        loaded.name = name
        loaded.names.add(name)
        self._by_name[name] = loaded
        self._slot_of[loaded.content_hash] = loaded.slot
        self._publish_names()
        return self.describe(name)

    def abandon(self, loaded: LoadedAdapter) -> None:
        """Give back the slot of a load that came to nothing."""
        if loaded.loading:
            self._slots[loaded.slot - 1] = None

    def unload(self, name: str) -> AdapterInfo:
        """Forget the name; contexts that use the adapter keep it. Raises NotFound (ADAPTER_NOT_FOUND)."""
        info = self.describe(name)
        self._by_name.pop(name).names.discard(name)
        self._publish_names()
        return info

    def _publish_names(self) -> None:
        self.revisions = {name: found.content_hash for name, found in self._by_name.items()}

    def _take_slot(self) -> int:
        """A slot that nothing needs, now free. Raises ResourceExhausted (ADAPTER_SLOTS)."""
        users = self._users()
        for number, each in enumerate(self._slots, 1):
            if each is not None and (each.loading or each.names or users.get(each.content_hash)):
                continue
            if each is not None:
                del self._slot_of[each.content_hash]
                self._slots[number - 1] = None
            return number
        taken = ", ".join(sorted({each.name for each in self._slots if each is not None}))
        message = f"all {len(self._slots)} slots for adapters are taken, by {taken}"
        raise ResourceExhausted(message, reason="ADAPTER_SLOTS", retry_after_s=1.0)

    def _users(self) -> Counter[str]:
        """Content hash → contexts that may compute with it: suspended ones, those of snapshots, and those that have
        switched to another one since, whose tokens before may have to be computed again.

        A publication computes nothing.
        """
        users = Counter[str]()
        if not self.count:
            return users  # no context has one, and there may be thousands
        for context in self._cache.context_table:
            switches = context.adapter_switches
            hashes = {context.identity.adapter, *(each.adapter_revision for each in switches)} - {""}
            if hashes and context.root not in self._cache.publications:
                users.update(hashes)
        return users


def _info(loaded: LoadedAdapter, name: str, users: Mapping[str, int]) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        revision=loaded.content_hash,
        rank=loaded.adapter.rank,
        parameters=loaded.adapter.parameters,
        contexts=users.get(loaded.content_hash, 0),
        unloaded=name not in loaded.names,
    )
