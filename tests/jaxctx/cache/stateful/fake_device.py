"""The fake device: page array, host memory and disk of an engine, as three dictionaries that only remember.

Each page and slot holds one value per token. `FakeDevice` carries moves out exactly, in their order. What is fetched
arrives late or never, and what nobody needs any more is overwritten with poison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from jaxctx.cache.context_cache import ContextCache
from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.errors import DataLoss
from tests.jaxctx.cache.invariants import is_free

Data: TypeAlias = list[object]


@dataclass
class Slot:
    """Data in host memory, from the time `at` on; None if it will never come."""

    data: Data | None
    at: int = 0


class FakeDevice:
    """Pages `first .. first + pages - 1`; slots come into being as they are written. `now` is moved by the world."""

    def __init__(self, first: int, pages: int, page_size: int) -> None:
        self.poison: Data = ["poison"] * page_size
        self.pages: dict[int, Data] = {page: list(self.poison) for page in range(first, first + pages)}
        self.host: dict[int, Slot] = {}
        self.disk: dict[int, Slot] = {}
        self.now = 0
        self.delay = 0  # of what is fetched

    def carry_out(self, moves: Iterable[Move]) -> None:
        for move in moves:
            match move:
                case Move(MoveKind.COPY, source, target):
                    self.pages[target] = self.pages[source][:]
                case Move(MoveKind.SAVE, page, slot):
                    self.host[slot] = Slot(self.pages[page][:])
                case Move(MoveKind.LOAD, slot, page):
                    held = self.host[slot]
                    assert held.data is not None, "data that never came is used"
                    assert held.at <= self.now, "data is used before it came"
                    self.pages[page] = held.data[:]
                case Move(MoveKind.SPILL, slot, disk):
                    self.disk[disk] = self.host.pop(slot)
                case Move(MoveKind.FETCH, disk, slot):
                    held = self.disk[disk]
                    self.host[slot] = Slot(held.data, max(held.at, self.now) + self.delay)
                case Move(MoveKind.DROP, slot):
                    del self.host[slot]

    def ready(self, slot: int) -> bool:
        """As an engine says it."""
        held = self.host[slot]
        if held.at > self.now:
            return False
        if held.data is None:
            raise DataLoss("it did not come back")
        return True

    def on_the_way(self) -> list[Slot]:
        """What has not arrived yet."""
        return [slot for slot in self.host.values() if slot.at > self.now]

    def spoil(self, cache: ContextCache) -> None:
        """Nothing can be read where nobody needs it."""
        for page in self.pages:
            if is_free(cache.block_manager.pool, page):
                self.pages[page] = self.poison[:]
        for store, slots in ((self.host, cache.block_manager.tiers.host), (self.disk, cache.block_manager.tiers.disk)):
            for slot in slots.free if len(slots.free) < 99 else ():
                if slot in store:
                    store[slot] = Slot(self.poison[:])

    def lose(self, number: int) -> None:
        """What every third slot of the disk holds cannot be read any more."""
        for slot, held in self.disk.items():
            if (slot + number) % 3 == 0:
                held.data = None
