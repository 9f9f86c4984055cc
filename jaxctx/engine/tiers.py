"""Tiers: the data of pages that left the device, in host memory and in a file on disk.

Which slot holds what, and what is moved where, is decided by the cache's bookkeeping; here the moves are carried out.
All calls come from the step thread and return at once. A slot whose data is on its way holds a future; what cannot be
read back exactly as it was written is lost, which is an answer (`PageLost`), never other data.

Order. Slots are reused at once, so moves must take effect in the order of the calls.
Host slots: only the step thread changes the table, and what it holds is never written to. A spill takes along the array
that the slot holds now, and a fetch fills its own future, not the slot. So nothing that arrives late reaches a slot
that has been given to other data since.
Disk slots: each belongs to one thread, which takes its jobs first in, first out: all writes and reads of a slot happen
in the order of the calls, and slots do not overlap in the file. A write may wait for a fetch that was asked for before
it, on another thread; since every wait is for an earlier job, the earliest unfinished job never waits, and none does
for ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import xxhash

log = logging.getLogger("jaxctx.engine")
PageData: TypeAlias = jax.Array | np.ndarray


class PageLost(Exception):
    """The data of a slot could not be kept, or did not come back as it was. Nothing was used of it."""


class HostTier:
    """Pages in host memory, by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, PageData | Future[np.ndarray]] = {}

    def put(self, slot: int, data: PageData | Future[np.ndarray]) -> None:
        """The slot holds `data` from now on, whatever it held before. Nobody may write to it any more."""
        self._slots[slot] = data

    def ready(self, slot: int) -> bool:
        """Whether `get` has an answer."""
        data = self._slots[slot]
        return not isinstance(data, Future) or data.done()

    def get(self, slot: int) -> PageData:
        """What a slot that is ready holds. Raises PageLost."""
        data = self._slots[slot]
        if not isinstance(data, Future):
            return data
        try:
            return data.result(timeout=0)
        except CancelledError:
            raise PageLost("the tier was closed") from None

    def held(self, slot: int) -> PageData | Future[np.ndarray]:
        """What the slot holds, ready or not."""
        return self._slots[slot]

    def drop(self, slot: int) -> None:
        """The slot's data is not needed any more."""
        self._slots.pop(slot, None)


class DiskTier:
    """Pages in one file of `slots` pages, which does not outlive the process.

    Every page has a checksum, in memory. Pages wait in memory until they are written, at most `pending` of them: one
    more is lost, as is one that the disk has no room for.
    """

    def __init__(
        self,
        path: Path,
        slots: int,
        page_shape: tuple[int, ...],
        page_dtype: np.dtype[Any],
        host: HostTier,
        *,
        pending: int = 1024,
        threads: int = 2,
    ) -> None:
        """Raises OSError if there can be no file at `path`; one that is there already is replaced."""
        self._path = path
        self._shape, self._dtype = page_shape, page_dtype
        self._page_bytes = int(np.prod(page_shape)) * page_dtype.itemsize
        self._host = host
        self._room = threading.Semaphore(pending)
        self._sums: dict[int, int] = {}  # of what is in the file, by slot; an entry is its slot's thread's
        self._failing = False
        path.unlink(missing_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._file, slots * self._page_bytes)
        self._threads = [ThreadPoolExecutor(1, f"jaxctx-disk-{i}") for i in range(threads)]

    def spill(self, host_slot: int, disk_slot: int) -> None:
        """Write what the host slot holds to the disk slot. The host slot may be used again at once."""
        data = self._host.held(host_slot) if self._room.acquire(blocking=False) else None
        self._submit(disk_slot, self._write, data)

    def fetch(self, disk_slot: int, host_slot: int) -> Future[np.ndarray]:
        """Read the disk slot to the host slot, which is ready once the future is done. Both may be reused at once."""
        future = self._submit(disk_slot, self._read)
        self._host.put(host_slot, future)
        return future

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

    def _write(self, slot: int, data: PageData | Future[np.ndarray] | None) -> None:
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
            raise PageLost("the page was not kept on disk")
        page = np.empty(self._shape, self._dtype)
        raw = page.reshape(-1).view(np.uint8)
        done = 0
        try:
            while done < self._page_bytes and (
                count := os.preadv(self._file, [raw[done:]], slot * self._page_bytes + done)
            ):
                done += count
        except OSError as error:
            raise PageLost(f"the page could not be read: {error}") from error
        if done < self._page_bytes or xxhash.xxh3_64_intdigest(raw) != self._sums[slot]:
            raise PageLost("the page is not as it was written")
        return page
