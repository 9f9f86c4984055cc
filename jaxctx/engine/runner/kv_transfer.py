"""KV transfers: the cache's page moves, carried out in their order, and the data of pages that left the device.

The cache decides which slot holds what, and which page moves where. All calls come from the step thread and return at
once: work on the device is dispatched after the steps that were dispatched before; threads read and write the disk. A
slot whose data has not arrived yet holds a future. Data that cannot be read back exactly as it was written is lost: the
answer is DataLoss, never other data.

Order. Slots are reused at once, so moves must take effect in the order of the calls.
Host slots: only the step thread changes the table, and the arrays in it are never written to. A spill takes the array
that the slot holds at that time, and a fetch fills its own future, not the slot. So data that arrives late never
reaches a slot that has been given to other data since.
Disk slots: each belongs to one thread, which runs its jobs first in, first out: all writes and reads of a slot happen
in the order of the calls, and slots do not overlap in the file. A write may wait for an earlier fetch on another
thread. Every wait is for an earlier job, so the earliest one never waits, and no wait lasts for ever.
"""

import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
import xxhash

from jaxctx.cache.tiers import Move, MoveKind
from jaxctx.errors import DataLoss

log = logging.getLogger("jaxctx.engine")

PageData: TypeAlias = jax.Array | np.ndarray
"""One page outside the pools, `[layers, 2, kv_heads, page_size, head_dim]`; see `page_functions`."""

HostEntry: TypeAlias = PageData | Future[PageData]
"""What a host slot holds: a page, or one that is on its way."""

DISK_THREADS = 2


class PageDevice(Protocol):
    """What transfers need of a `ModelRunner`."""

    page_shape: tuple[int, ...]
    page_dtype: np.dtype[Any]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def save_pages(self, pages: Sequence[int]) -> Sequence[PageData]: ...

    def load_pages(self, pages: Sequence[int], data: Sequence[PageData]) -> None: ...


class HostTier:
    """The pages in host memory, by slot. Nobody may write to data that was put here."""

    def __init__(self) -> None:
        self._entries: dict[int, HostEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, slot: int, entry: HostEntry) -> None:
        """The slot holds this from now on, instead of what it held."""
        self._entries[slot] = entry

    def entry(self, slot: int) -> HostEntry:
        """What the slot holds, arrived or not. Raises KeyError for an empty slot."""
        return self._entries[slot]

    def remove(self, slot: int) -> None:
        """The slot is empty from now on, if it was not before."""
        self._entries.pop(slot, None)

    def is_ready(self, slot: int) -> bool:
        """Whether `page` has an answer. Raises DataLoss if it never will."""
        entry = self._entries[slot]
        if isinstance(entry, Future) and not entry.done():
            return False
        self.page(slot)
        return True

    def page(self, slot: int) -> PageData:
        """The data of a slot that is ready. Raises DataLoss."""
        entry = self._entries[slot]
        if not isinstance(entry, Future):
            return entry
        try:
            return entry.result(timeout=0)
        except CancelledError:
            raise DataLoss("what it comes from was closed") from None


class DiskTier:
    """Pages in one file of `slots` pages, which does not outlive the process.

    Every page has a checksum, in memory. Pages wait in memory until they are written, at most `pending` of them: one
    more is lost, as is one for which the disk has no space.
    """

    def __init__(
        self, path: Path, slots: int, page_shape: tuple[int, ...], page_dtype: np.dtype[Any], *, pending: int = 1024
    ) -> None:
        """Raises OSError if there can be no file at `path`; one that is there already is replaced."""
        self._path = path
        self._page_shape, self._page_dtype = page_shape, page_dtype
        self._page_bytes = int(np.prod(page_shape)) * page_dtype.itemsize
        self._free_writes = threading.Semaphore(pending)
        self._checksums: dict[int, int] = {}  # by slot, of what is in the file; only the slot's thread uses its entry
        self._is_failing = False  # so that a failing disk is reported once
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._file, slots * self._page_bytes)
        self._threads = [ThreadPoolExecutor(1, f"jaxctx-disk-{i}") for i in range(DISK_THREADS)]

    def spill(self, entry: HostEntry, slot: int) -> None:
        """Write the page of a host slot to the disk slot. The host slot may be reused at once."""
        if self._free_writes.acquire(blocking=False):
            self._thread_of(slot).submit(self._write, slot, entry)
        else:
            self._thread_of(slot).submit(self._forget, slot)

    def fetch(self, slot: int) -> Future[PageData]:
        """Read the slot, which may be reused at once. The future may fail with DataLoss."""
        return self._thread_of(slot).submit(self._read, slot)

    def close(self) -> None:
        """End the threads without waiting for what is queued, and remove the file."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.shutdown()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def _thread_of(self, slot: int) -> ThreadPoolExecutor:
        """The thread that does all work of a slot, in order."""
        return self._threads[slot % len(self._threads)]

    def _forget(self, slot: int) -> None:
        """Note that the slot's data is lost: the file may still have older data there."""
        self._checksums.pop(slot, None)

    def _write(self, slot: int, entry: HostEntry) -> None:
        self._forget(slot)
        try:
            page = np.ascontiguousarray(entry.result() if isinstance(entry, Future) else entry)
            raw = page.reshape(-1).view(np.uint8)
            self._write_bytes(raw, slot * self._page_bytes)
            self._checksums[slot] = xxhash.xxh3_64_intdigest(raw)
            self._is_failing = False
        except Exception as error:  # of the disk, of the device, or the page was lost before
            if not self._is_failing:
                log.warning("a page could not be kept on disk: %s", error)
            self._is_failing = True
        finally:
            self._free_writes.release()

    def _write_bytes(self, raw: np.ndarray, offset: int) -> None:
        done = 0
        while done < len(raw):  # the system may write less than it was given
            done += os.pwrite(self._file, raw[done:], offset + done)

    def _read(self, slot: int) -> np.ndarray:
        if slot not in self._checksums:
            raise DataLoss("the page was not kept on disk")
        page = np.empty(self._page_shape, self._page_dtype)
        raw = page.reshape(-1).view(np.uint8)
        try:
            done = self._read_bytes(raw, slot * self._page_bytes)
        except OSError as error:
            raise DataLoss(f"the page could not be read: {error}") from error
        if done < len(raw) or xxhash.xxh3_64_intdigest(raw) != self._checksums[slot]:
            raise DataLoss("the page is not as it was written")
        return page

    def _read_bytes(self, raw: np.ndarray, offset: int) -> int:
        """Fill `raw` from the file; returns how many bytes there were."""
        done = 0
        while count := os.preadv(self._file, [raw[done:]], offset + done):  # 0 at the end of the file or of `raw`
            done += count
        return done


class KVTransfer:
    """Moves pages between the device, host memory and, where there is one, disk."""

    def __init__(self, device: PageDevice, disk_pages: int, disk_file: Path | None) -> None:
        """`disk_file` None: in the system's directory for temporary files. Raises OSError if it cannot be made."""
        self._device = device
        self.host = HostTier()
        self._disk: DiskTier | None = None
        if disk_pages:
            path = disk_file or Path(tempfile.gettempdir()) / f"jaxctx-{uuid.uuid4()}.pages"
            self._disk = DiskTier(path, disk_pages, device.page_shape, device.page_dtype)
        self.on_arrival: Callable[[], None] = _do_nothing
        """Called from any thread when data has arrived in a host slot, or is lost."""
        self._on_drop: dict[int, Callable[[], None]] = {}  # by host slot

    def is_ready(self, slot: int) -> bool:
        """Whether the data of a host slot has arrived. Raises DataLoss if it never will."""
        return self.host.is_ready(slot)

    def stage(self, slot: int, data: Future[PageData], on_drop: Callable[[], None] | None = None) -> None:
        """A host slot for data that will come from elsewhere; `on_drop` is called when it is not needed any more."""
        self.host.put(slot, data)
        data.add_done_callback(self._arrived)
        if on_drop is not None:
            self._on_drop[slot] = on_drop

    def _arrived(self, data: Future[PageData]) -> None:
        self.on_arrival()

    def carry_out(self, moves: Iterable[Move]) -> None:
        """Do all moves, in this order, ahead of every later step. Neighbours of one kind go together."""
        for kind, group in groupby(moves, _kind_of_group):
            match kind:
                case MoveKind.COPY:
                    copies = list(group)
                    self._device.copy_pages([move.source for move in copies], [move.target for move in copies])
                case MoveKind.SAVE:
                    self._save(list(group))
                case MoveKind.LOAD:
                    self._load_and_drop(group)
                case MoveKind.SPILL:
                    self._spill(group)
                case MoveKind.FETCH:
                    self._fetch(group)

    def _save(self, moves: Sequence[Move]) -> None:
        """Copy pages to host slots. If a slot is a target twice, the last move counts."""
        page_of = {move.target: move.source for move in moves}  # by host slot
        saved = self._device.save_pages(list(page_of.values()))
        for slot, data in zip(page_of, saved, strict=True):
            self.host.put(slot, data)

    def _load_and_drop(self, moves: Iterable[Move]) -> None:
        """Load pages from host slots, and empty host slots."""
        loads: dict[int, PageData] = {}  # by page: where one is a target twice, the last move counts
        for move in moves:
            if move.kind is MoveKind.LOAD:
                loads[move.target] = self.host.page(move.source)
            else:
                self.host.remove(move.source)
                on_drop = self._on_drop.pop(move.source, None)
                if on_drop is not None:
                    on_drop()
        self._device.load_pages(list(loads), list(loads.values()))

    def _spill(self, moves: Iterable[Move]) -> None:
        """Write host slots to disk slots."""
        assert self._disk is not None
        for move in moves:
            self._disk.spill(self.host.entry(move.source), move.target)

    def _fetch(self, moves: Iterable[Move]) -> None:
        """Disk slots to host slots, which are ready when the data has been read."""
        assert self._disk is not None
        for move in moves:
            self.stage(move.target, self._disk.fetch(move.source))

    def close(self) -> None:
        """Stop the threads, remove the file."""
        if self._disk is not None:
            self._disk.close()


def _kind_of_group(move: Move) -> MoveKind:
    """What is loaded is dropped next, more often than not: so drops may stand among loads and go with them."""
    return MoveKind.LOAD if move.kind is MoveKind.DROP else move.kind


def _do_nothing() -> None:
    pass
