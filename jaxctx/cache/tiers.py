"""Tiers: which pages have copies in host memory and on disk, and in which order copies are given up.

When a page leaves the device it is copied to a host slot. When no host slot is free, the copy that was put there first
moves to a disk slot. When no disk slot is free either, the oldest copy there is dropped and only token lineage is left.
Copies are kept when a page returns to the device, but they are then the first to be given up. This is bookkeeping only:
data movements are appended to `moves`, which the engine carries out in that order. Called by `block_manager` only.

    device ──save──▶ host ──spill──▶ disk ──▶ lineage only
       ▲──────load────┘ ▲─────fetch────┘

A child of the page tree leaves every tier before its parent does, as it leaves the device before it. Where fetched
pages disturb that order, the children of a page that is lost are dropped with it.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxctx.cache.context import OffloadedPage
from jaxctx.cache.prefix_index import NOWHERE, PageNode

TierEntry: TypeAlias = PageNode | OffloadedPage


class MoveKind(enum.Enum):
    """What a `Move` does with the data of one page."""

    COPY = "page to page"
    SAVE = "page to host slot"  # the page may be written again at once
    LOAD = "host slot to page"
    SPILL = "host slot to disk slot"  # the host slot may be used again at once
    FETCH = "disk slot to host slot"  # the host slot is not ready before the data has arrived
    DROP = "host slot to nowhere"


@dataclass(frozen=True, slots=True)
class Move:
    """Bring the data of one page from `source` to `target`; `kind` says which of them is a page or a slot."""

    kind: MoveKind
    source: int
    target: int = NOWHERE


class Slots:
    """The slots of one tier, and the entries that have one, the next to be given up first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))
        self.order: OrderedDict[TierEntry, None] = OrderedDict()

    @property
    def used(self) -> int:
        """How many slots are not free."""
        return self.total - len(self.free)


class Tiers:
    """`host` and `disk` slots. Either may be 0, but pages on disk return to the device by way of the host only."""

    def __init__(self, host: int, disk: int) -> None:
        self.host = Slots(host)
        self.disk = Slots(disk)
        self.moves: list[Move] = []
        self._next_staged = host  # staged slots are numbered from the end of the tier's own slots on

    def copy(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Copy pages on the device, one by one."""
        for source, target in zip(sources, targets, strict=True):
            self.moves.append(Move(MoveKind.COPY, source, target))

    def save(self, entry: TierEntry, page: int) -> None:
        """The entry's data leaves `page`: keep a copy in host memory if a slot can be had, else forget it if lost."""
        if entry.host == NOWHERE:
            slot = self._allocate_host_slot(entry)
            if slot is None:
                self._forget_if_lost(entry)
                return
            entry.host = slot
            self.moves.append(Move(MoveKind.SAVE, page, slot))
        self.host.order[entry] = None
        self.host.order.move_to_end(entry)

    def protect(self, entry: TierEntry) -> None:
        """Do not give up the entry's host copy before `load`, which follows as soon as there is a page for it."""
        self.host.order.pop(entry, None)

    def load(self, entry: TierEntry, page: int) -> None:
        """Bring the entry's data from the host to `page`. Its copies are the first to be given up from now on."""
        self.moves.append(Move(MoveKind.LOAD, entry.host, page))
        if self._is_own_host_slot(entry.host):
            self.host.order[entry] = None
            self.host.order.move_to_end(entry, last=False)
        if entry.disk != NOWHERE:
            self.disk.order.move_to_end(entry, last=False)

    def fetch(self, entry: TierEntry) -> None:
        """Begin to bring the entry's data from disk to a host slot, if one can be had."""
        slot = self._allocate_host_slot(entry)
        if slot is not None:
            entry.host = slot
            self.host.order[entry] = None
            self.moves.append(Move(MoveKind.FETCH, entry.disk, slot))

    def stage(self, entry: OffloadedPage) -> None:
        """Give the entry a host slot beyond the tier's own, for data that arrives later and is loaded once."""
        entry.host = self._next_staged
        self._next_staged += 1

    def drop(self, entry: TierEntry) -> None:
        """Free the entry's slots: its copies are not needed any more."""
        if entry.host != NOWHERE:
            self.moves.append(Move(MoveKind.DROP, entry.host))
            if self._is_own_host_slot(entry.host):
                self.host.order.pop(entry, None)
                self.host.free.append(entry.host)
            entry.host = NOWHERE
        if entry.disk != NOWHERE:
            self.disk.order.pop(entry, None)
            self.disk.free.append(entry.disk)
            entry.disk = NOWHERE

    def drop_lost(self, entry: TierEntry) -> None:
        """The entry's copies cannot be read: drop them, and forget the entry if it is not on the device."""
        self.drop(entry)
        self._forget_if_lost(entry)

    def clear(self) -> None:
        """Drop all copies."""
        for entry in [*self.host.order, *self.disk.order]:
            self.drop_lost(entry)

    def _is_own_host_slot(self, slot: int) -> bool:
        """Whether it is one of the tier's slots, not a staged one."""
        return slot < self.host.total

    def _allocate_host_slot(self, entry: TierEntry) -> int | None:
        """A host slot for `entry`, for which another copy may be given up, but not its own copy on disk."""
        if self.host.free:
            return self.host.free.pop()
        if not self.host.order:
            return None
        self.disk.order.pop(entry, None)  # protects the copy on disk while the victim is spilled
        victim, _ = self.host.order.popitem(last=False)
        slot = victim.host
        victim.host = NOWHERE
        if victim.page == NOWHERE:
            self._keep_on_disk(victim, slot)
        self._forget_if_lost(victim)
        if entry.disk != NOWHERE:
            self.disk.order[entry] = None
        return slot

    def _keep_on_disk(self, entry: TierEntry, host_slot: int) -> None:
        """Spill the data of a host slot to disk, unless a copy is there already or the tier has no slots."""
        if entry.disk != NOWHERE:
            self.disk.order.move_to_end(entry)
            return
        victim = None
        if self.disk.free:
            entry.disk = self.disk.free.pop()
        elif self.disk.order:
            victim, _ = self.disk.order.popitem(last=False)
            entry.disk = victim.disk
            victim.disk = NOWHERE
        else:
            return
        self.moves.append(Move(MoveKind.SPILL, host_slot, entry.disk))
        self.disk.order[entry] = None
        if victim is not None:
            self._forget_if_lost(victim)  # only now: the victim may be the parent of `entry`

    def _forget_if_lost(self, entry: TierEntry) -> None:
        """Remove a node from the index if no tier has its data, and with it all nodes behind it."""
        if not (isinstance(entry, PageNode) and entry.lost and entry.indexed):
            return
        lost = [entry]
        for node in lost:  # grows while it is walked
            lost += node.children.values()
            self.drop(node)
            node.forget()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many pages a context would find, by tier. Those on the device come first, the others follow them."""

    device: int  # pages on the device
    unheld: int  # of these, pages that no context holds
    host: int  # pages in host memory
    disk: int  # pages on disk
    offloaded: int = 0  # tokens of the last page, if that is no committed page but offloaded data


def count_on_device(path: Sequence[TierEntry]) -> int:
    """How many leading entries of a path are on the device."""
    for position, entry in enumerate(path):
        if entry.page == NOWHERE:
            return position
    return len(path)


def summarize(path: Sequence[TierEntry]) -> PrefixMatch:
    """The entries of a path, counted by tier."""
    device = count_on_device(path)
    unheld = sum(isinstance(entry, PageNode) and entry.holders == 0 for entry in path[:device])
    host = sum(entry.host != NOWHERE for entry in path[device:])
    disk = len(path) - device - host
    last = path[-1] if path else None
    offloaded = last.tokens if isinstance(last, OffloadedPage) else 0
    return PrefixMatch(device, unheld, host, disk, offloaded)
