"""Transfers: the cache's page moves, carried out in their order; the data of pages that left the device.

Which slot holds what, and what is moved where, is decided by the cache's bookkeeping. All calls come from the step
thread and return at once: what is on the device is dispatched behind the steps that were dispatched before, what goes
to disk or comes from there is done by threads. A slot whose data is on its way holds a future; what cannot be read back
exactly as it was written is lost, which is an answer (DataLoss), never other data.

Order. Slots are reused at once, so moves must take effect in the order of the calls.
Host slots: only the step thread changes the table, and what it holds is never written to. A spill takes along the array
that the slot holds now, and a fetch fills its own future, not the slot. So nothing that arrives late reaches a slot
that has been given to other data since.
Disk slots: each belongs to one thread, which takes its jobs first in, first out: all writes and reads of a slot happen
in the order of the calls, and slots do not overlap in the file. A write may wait for a fetch that was asked for before
it, on another thread; since every wait is for an earlier job, the earliest never waits, and none does for ever.
"""

import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import xxhash

from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.errors import DataLoss

log = logging.getLogger("jaxctx.engine")
PageData: TypeAlias = jax.Array | np.ndarray
THREADS = 2  # of a disk


class HostTier(dict[int, PageData | Future[PageData]]):
    """What each slot of host memory holds. Nobody may write to data that was put here."""

    def ready(self, slot: int) -> bool:
        """Whether `page` has an answer. Raises DataLoss if it never will."""
        data = self[slot]
        if isinstance(data, Future) and not data.done():
            return False
        self.page(slot)
        return True

    def page(self, slot: int) -> PageData:
        """What a slot that is ready holds. Raises DataLoss."""
        data = self[slot]
        if not isinstance(data, Future):
            return data
        try:
            return data.result(timeout=0)
        except CancelledError:
            raise DataLoss("what it comes from was closed") from None


class DiskTier:
    """Pages in one file of `slots` pages, which does not outlive the process.

    Every page has a checksum, in memory. Pages wait in memory until they are written, at most `pending` of them: one
    more is lost, as is one that the disk has no room for.
    """

    def __init__(
        self, path: Path, slots: int, page_shape: tuple[int, ...], page_dtype: np.dtype[Any], *, pending: int = 1024
    ) -> None:
        """Raises OSError if there can be no file at `path`; one that is there already is replaced."""
        self._path = path
        self._shape, self._dtype = page_shape, page_dtype
        self._page_bytes = int(np.prod(page_shape)) * page_dtype.itemsize
        self._room = threading.Semaphore(pending)
        self._sums: dict[int, int] = {}  # of what is in the file, by slot; an entry is its slot's thread's
        self._failing = False
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._file, slots * self._page_bytes)
        self._threads = [ThreadPoolExecutor(1, f"jaxctx-disk-{i}") for i in range(THREADS)]

    def spill(self, data: PageData | Future[PageData], slot: int) -> None:
        """Write what a host slot holds to the slot. The host slot may be used again at once."""
        self._submit(slot, self._write, data if self._room.acquire(blocking=False) else None)

    def fetch(self, slot: int) -> Future[PageData]:
        """Read the slot, which may be reused at once."""
        return self._submit(slot, self._read)

    def close(self) -> None:
        """End the threads without waiting for what is queued, and remove the file."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.shutdown()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _submit(self, slot: int, job: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._threads[slot % len(self._threads)].submit(job, slot, *args)

    def _write(self, slot: int, data: PageData | Future[PageData] | None) -> None:
        self._sums.pop(slot, None)
        if data is None:
            return
        try:
            page = np.ascontiguousarray(data.result() if isinstance(data, Future) else data)
            raw = page.reshape(-1).view(np.uint8)
            done = 0
            while done < self._page_bytes:
                done += os.pwrite(self._file, raw[done:], slot * self._page_bytes + done)
            self._sums[slot] = xxhash.xxh3_64_intdigest(raw)
            self._failing = False
        except Exception as error:  # of the disk, of the device, or the page was lost before
            if not self._failing:
                log.warning("a page could not be kept on disk: %s", error)
            self._failing = True
        finally:
            self._room.release()

    def _read(self, slot: int) -> np.ndarray:
        if slot not in self._sums:
            raise DataLoss("the page was not kept on disk")
        page = np.empty(self._shape, self._dtype)
        raw = page.reshape(-1).view(np.uint8)
        done = 0
        try:
            while count := os.preadv(self._file, [raw[done:]], slot * self._page_bytes + done):
                done += count
        except OSError as error:
            raise DataLoss(f"the page could not be read: {error}") from error
        if done < self._page_bytes or xxhash.xxh3_64_intdigest(raw) != self._sums[slot]:
            raise DataLoss("the page is not as it was written")
        return page


class Transfers:
    """Between the device, host memory and, where there is one, disk."""

    def __init__(self, device: ModelRunner, disk_pages: int, disk_file: Path | None) -> None:
        """`disk_file` None: in the system's directory for temporary files."""
        self._device = device
        self.host = HostTier()
        self._disk: DiskTier | None = None
        if disk_pages:
            path = disk_file or Path(tempfile.gettempdir()) / f"jaxctx-{uuid.uuid4()}.pages"
            self._disk = DiskTier(path, disk_pages, device.page_shape, device.page_dtype)
        self.on_arrival: Callable[[], None] = lambda: None  # called from any thread when data has come, or is lost
        self._on_drop: dict[int, Callable[[], None]] = {}

    def stage(self, slot: int, data: Future[PageData], on_drop: Callable[[], None] = lambda: None) -> None:
        """A host slot for data that will come from elsewhere; `on_drop` is called when it is not needed any more."""
        self.host[slot] = data
        data.add_done_callback(lambda _: self.on_arrival())
        self._on_drop[slot] = on_drop

    def carry_out(self, moves: Iterable[Move]) -> None:
        """Do them all, ahead of every later step. Neighbours of one way go together."""
        # What is loaded is dropped next, more often than not: drops may stand among loads.
        for way, group in groupby(moves, lambda move: MoveKind.LOAD if move.kind is MoveKind.DROP else move.kind):
            match way:
                case MoveKind.COPY:
                    copies = [*group]
                    self._device.copy_pages([move.source for move in copies], [move.target for move in copies])
                case MoveKind.SAVE:
                    saves = {move.target: move.source for move in group}
                    self.host.update(zip(saves, self._device.save_pages([*saves.values()]), strict=True))
                case MoveKind.LOAD:
                    loads: dict[int, PageData] = {}  # by page
                    for move in group:
                        if move.kind is MoveKind.LOAD:
                            loads[move.target] = self.host.page(move.source)
                        else:
                            self.host.pop(move.source, None)
                            self._on_drop.pop(move.source, lambda: None)()
                    self._device.load_pages([*loads], [*loads.values()])
                case MoveKind.SPILL:
                    assert self._disk is not None
                    for move in group:
                        self._disk.spill(self.host[move.source], move.target)
                case MoveKind.FETCH:
                    assert self._disk is not None
                    for move in group:
                        self.stage(move.target, self._disk.fetch(move.source))

    def close(self) -> None:
        """Stop the threads, remove the file."""
        if self._disk is not None:
            self._disk.close()
