"""Transfers: the cache's page moves, carried out in their order.

Everything on the device is dispatched at once and runs behind the steps that were dispatched before; what goes to disk
or comes from there is done by the tier's own threads. Nothing here waits. Called on the step thread.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from jaxctx.cache.tiers import Move, PageCopy, PageFetch, PageLoad, PageSave, PageSpill, SlotDrop
from jaxctx.engine.device import Device
from jaxctx.engine.tiers import DiskTier, HostTier, PageLost
from jaxctx.errors import DataLoss


class Transfers:
    """Between the device, host memory and, where there is one, disk."""

    def __init__(self, device: Device, disk_pages: int, disk_file: Path | None) -> None:
        """`disk_file` None: in the system's directory for temporary files."""
        self._device = device
        self._host = HostTier()
        self._disk: DiskTier | None = None
        if disk_pages:
            path = disk_file or Path(tempfile.gettempdir()) / f"jaxctx-{uuid.uuid4()}.pages"
            self._disk = DiskTier(path, disk_pages, device.page_shape, device.page_dtype, self._host)
        self.on_arrival: Callable[[], None] = _nothing  # called from any thread when data has come from a disk
        self._on_drop: dict[int, Callable[[], None]] = {}

    def stage(self, slot: int, data: Future[np.ndarray], on_drop: Callable[[], None]) -> None:
        """Data that will come from elsewhere; `on_drop` is called when it is not needed any more."""
        self._host.put(slot, data)
        self._on_drop[slot] = on_drop

    def ready(self, slot: int) -> bool:
        """Whether the data of a host slot is there. Raises DataLoss if it never will be."""
        if not self._host.ready(slot):
            return False
        try:
            self._host.get(slot)
        except PageLost as error:
            raise DataLoss(str(error)) from error
        return True

    def page(self, data: bytes | memoryview) -> np.ndarray:
        """A page's array from its bytes."""
        return np.frombuffer(data, self._device.page_dtype).reshape(self._device.page_shape)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Do them all, ahead of every later step."""
        for batch in _batches(moves):
            match batch[0]:
                case PageCopy():
                    self._device.copy_pages([move for move in batch if isinstance(move, PageCopy)])
                case PageSave():
                    saves = [move for move in batch if isinstance(move, PageSave)]
                    for move, data in zip(saves, self._device.save_pages([s.page for s in saves]), strict=True):
                        self._host.put(move.slot, data)
                case PageLoad():
                    loads = [move for move in batch if isinstance(move, PageLoad)]
                    self._device.load_pages(
                        [load.page for load in loads], [self._host.get(load.slot) for load in loads]
                    )
                case PageSpill(slot, disk):
                    assert self._disk is not None
                    self._disk.spill(slot, disk)
                case PageFetch(disk, slot):
                    assert self._disk is not None
                    self._disk.fetch(disk, slot).add_done_callback(lambda _: self.on_arrival())
                case SlotDrop(slot):
                    self._host.drop(slot)
                    self._on_drop.pop(slot, _nothing)()

    def close(self) -> None:
        """Stop the threads, remove the file."""
        if self._disk is not None:
            self._disk.close()


def _batches(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Neighbours that one call of the device may do in any order: of one kind, and none touches another's target."""
    batch: list[Move] = []
    touched: set[int] = set()
    for move in moves:
        many = isinstance(move, PageCopy | PageSave | PageLoad)
        target = move.target if isinstance(move, PageCopy) else move.page if isinstance(move, PageLoad) else None
        reads = {move.source} if isinstance(move, PageCopy) else set()
        if batch and not (many and type(move) is type(batch[0]) and target not in touched and not reads & touched):
            yield batch
            batch, touched = [], set()
        batch.append(move)
        if target is not None:
            touched.add(target)
    if batch:
        yield batch


def _nothing() -> None:
    pass
