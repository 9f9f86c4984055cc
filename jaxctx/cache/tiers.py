"""Tiers: which pages have copies in host memory and on disk, and in what order they would be given up.

When a page leaves the device it is kept in a host slot; when host slots run out, the one that was put there first goes
to a disk slot; when those run out too, its data is gone and only lineage is left. Copies are kept when a page comes
back, until their slots are needed: they are the first to go then. Bookkeeping only: what is to be moved is appended to
`moves`, which the engine carries out in that order. Called by `memory` only.

    device ──save──▶ host ──spill──▶ disk ──▶ lineage
       ▲──────load────┘ ▲─────fetch────┘

A child of the page tree leaves every tier before its parent does, as it leaves the device before it. Where fetched
pages disturb that order, the children of a page that is lost are forgotten with it.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from jaxctx.cache.context import OffloadedPage
from jaxctx.cache.prefix_index import NOWHERE, PageNode

TierEntry: TypeAlias = PageNode | OffloadedPage


class MoveKind(enum.Enum):
    """What a `Move` does, from one end of it to the other."""

    COPY = "page to page"
    SAVE = "page to host slot"  # the page may be written again at once
    LOAD = "host slot to page"
    SPILL = "host slot to disk slot"  # the host slot may be used again at once
    FETCH = "disk slot to host slot"  # which is not ready before the data has arrived
    DROP = "host slot to nowhere"


@dataclass(frozen=True, slots=True)
class Move:
    """Bring the data of one page from `source` to `target`: a page, host slot or disk slot, as its way says."""

    way: MoveKind
    source: int
    target: int = NOWHERE


class Slots:
    """The slots of one tier, and what has them, first to go first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))
        self.order: OrderedDict[TierEntry, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self.total - len(self.free)


class Tiers:
    """`host` and `disk` slots; either may be none, but a disk without a host has no way to the device."""

    def __init__(self, host: int, disk: int) -> None:
        self.host = Slots(host)
        self.disk = Slots(disk)
        self.moves: list[Move] = []
        self._staged = host  # the next slot beyond the tier's own

    def copy(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """On the device, page by page."""
        self.moves += map(partial(Move, MoveKind.COPY), sources, targets)

    def save(self, item: TierEntry, page: int) -> None:
        """Its data leaves `page`: keep a copy if there is a place for one."""
        if item.host == NOWHERE:
            slot = self._host_slot(item)
            if slot is None:
                self._gone(item)
                return
            item.host = slot
            self.moves.append(Move(MoveKind.SAVE, page, slot))
        self.host.order[item] = None
        self.host.order.move_to_end(item)

    def hold(self, item: TierEntry) -> None:
        """Its host copy does not give way until `load`, which follows as soon as there is a page for it."""
        self.host.order.pop(item, None)

    def load(self, item: TierEntry, page: int) -> None:
        """Bring it to `page`. Its copies are the first to go from now on."""
        self.moves.append(Move(MoveKind.LOAD, item.host, page))
        if item.host < self.host.total:
            self.host.order[item] = None
            self.host.order.move_to_end(item, last=False)
        if item.disk != NOWHERE:
            self.disk.order.move_to_end(item, last=False)

    def fetch(self, item: TierEntry) -> None:
        """Begin to bring it from disk to a host slot, if there is one for it."""
        slot = self._host_slot(item)
        if slot is not None:
            item.host = slot
            self.host.order[item] = None
            self.moves.append(Move(MoveKind.FETCH, item.disk, slot))

    def stage(self, item: OffloadedPage) -> None:
        """A host slot beyond the tier's own, for data that is only passing through; it is ready when it has arrived."""
        item.host, self._staged = self._staged, self._staged + 1

    def drop(self, item: TierEntry) -> None:
        """Its copies are not needed any more."""
        if item.host != NOWHERE:
            self.moves.append(Move(MoveKind.DROP, item.host))
            if item.host < self.host.total:
                self.host.order.pop(item, None)
                self.host.free.append(item.host)
            item.host = NOWHERE
        if item.disk != NOWHERE:
            self.disk.order.pop(item, None)
            self.disk.free.append(item.disk)
            item.disk = NOWHERE

    def lose(self, item: TierEntry) -> None:
        """Its copies are gone: as if dropped, and what is then nowhere is forgotten."""
        self.drop(item)
        self._gone(item)

    def clear(self) -> None:
        for item in [*self.host.order, *self.disk.order]:
            self.lose(item)

    def _host_slot(self, item: TierEntry) -> int | None:
        """A slot for `item`, whose own copy on disk does not give way for it."""
        if self.host.free:
            return self.host.free.pop()
        if not self.host.order:
            return None
        self.disk.order.pop(item, None)
        victim, _ = self.host.order.popitem(last=False)
        slot, victim.host = victim.host, NOWHERE
        if victim.page == NOWHERE:
            self._keep_on_disk(victim, slot)
        self._gone(victim)
        if item.disk != NOWHERE:
            self.disk.order[item] = None
        return slot

    def _keep_on_disk(self, item: TierEntry, slot: int) -> None:
        if item.disk != NOWHERE:
            self.disk.order.move_to_end(item)
        elif self.disk.free or self.disk.order:
            victim = None
            if self.disk.free:
                item.disk = self.disk.free.pop()
            else:
                victim, _ = self.disk.order.popitem(last=False)
                item.disk, victim.disk = victim.disk, NOWHERE
            self.moves.append(Move(MoveKind.SPILL, slot, item.disk))
            self.disk.order[item] = None
            if victim is not None:
                self._gone(victim)  # perhaps the parent of `item`

    def _gone(self, item: TierEntry) -> None:
        """Forget a node that is nowhere, with all that stand behind it."""
        gone = [item] if isinstance(item, PageNode) and item.lost and item.indexed else []
        for node in gone:
            gone += node.children.values()
            self.drop(node)
            node.forget()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Pages that a context would find: on the device, `unheld` of them by nobody held, and behind these elsewhere."""

    device: int
    unheld: int
    host: int
    disk: int
    offloaded: int = 0  # tokens of the last one, if it is in no committed page


def on_device(path: Sequence[TierEntry]) -> int:
    """How many pages at the front of a path are on the device."""
    return next((count for count, item in enumerate(path) if item.page == NOWHERE), len(path))


def found(path: Sequence[TierEntry]) -> PrefixMatch:
    device = on_device(path)
    host = sum(item.host != NOWHERE for item in path[device:])
    unheld = sum(isinstance(item, PageNode) and item.holders == 0 for item in path[:device])
    offloaded = path[-1].tokens if path and isinstance(path[-1], OffloadedPage) else 0
    return PrefixMatch(device, unheld, host, len(path) - device - host, offloaded)
