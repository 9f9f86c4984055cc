#!/usr/bin/env python3
"""Measures how fast durable snapshots are saved and opened, and plain files of the same bytes in the same run.

    scripts/bench_store.py [--pages 512] [--page-kib 256] [--rounds 5] [--folder FOLDER]

Each round saves one snapshot and opens it again, in turn with the plain measure: files of 32 MiB, written page by page
and synced, the folder synced; read page by page. Prints medians, the smallest and the largest round, and the median of
the ratios by round. "cold" drops the files from the page cache before reading.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxctx.store import ContextRecord, SnapshotStore, SnapshotVersion

FILE_BYTES = 32 << 20


def plain_write(folder: Path, pages: list[bytes]) -> None:
    """Write all pages into a few files, and make them durable."""
    per_file = max(1, FILE_BYTES // len(pages[0]))
    for start in range(0, len(pages), per_file):
        with open(folder / f"{start}", "wb", buffering=0) as file:
            for page in pages[start : start + per_file]:
                file.write(page)
            os.fsync(file.fileno())
    sync_folder(folder)


def plain_read(folder: Path, page_bytes: int) -> None:
    """Read every page of all files."""
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(page_bytes):
                pass


def save(store: SnapshotStore, lineage: ContextRecord, pages: list[bytes]) -> None:
    """Save one durable snapshot of which nothing is stored yet."""
    writer = store.begin(lineage)
    for number in writer.missing:
        writer.add(number, pages[number])
    version = SnapshotVersion(
        tenant="", name="bench", context_id="", tokens=0, seq_len=0, pages=0, size_bytes=0, model_revision="", salt="",
        manual_commit=False,
    )  # fmt: skip
    writer.finish(version)


def load(store: SnapshotStore) -> None:
    """Open the snapshot and read every page with its checksum."""
    reader = store.open(store.get("", "bench"))
    for number, data in reader.read(range(reader.lineage.pages)):
        if data is None:
            raise SystemExit(f"page {number} is lost")
        del data  # as plain_read does, so that both read into memory that was used before
    reader.close()


def forget_cached(folder: Path) -> None:
    """Drop the folder's files from the page cache of the operating system."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Make the entries of the folder durable."""
    directory = os.open(folder, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


@contextmanager
def measured(times: dict[str, list[float]], name: str) -> Iterator[None]:
    """Append the seconds that the block takes to `times[name]`."""
    start = time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - start)


def one_round(root: Path, number: int, pages: list[bytes], times: dict[str, list[float]]) -> None:
    """Measure plain files and the store once; the order alternates, so that neither profits from the other."""
    plain, kept = root / f"plain{number}", root / f"store{number}"
    plain.mkdir()
    store = SnapshotStore(str(kept), clock=time.time, new_id=lambda: secrets.token_hex(16))
    page_bytes, tokens = len(pages[0]), np.arange(len(pages) * 16, dtype=np.int32)
    lineage = ContextRecord(
        identity=b"bench", model_revision="", salt="", kv_dtype="", page_size=16, page_bytes=page_bytes, tokens=tokens,
        attention_overrides={}, seq_len=len(tokens), committed_pages=len(pages), working_tokens=0, manual_commit=False,
    )  # fmt: skip
    store.begin(lineage).abort()

    ways: dict[str, tuple[Callable[[], None], Callable[[], None], Path]] = {
        "plain": (lambda: plain_write(plain, pages), lambda: plain_read(plain, page_bytes), plain),
        "store": (lambda: save(store, lineage, pages), lambda: load(store), kept),
    }
    order = sorted(ways, reverse=number % 2 == 1)
    for way in order:
        with measured(times, f"{way} write"):
            ways[way][0]()
    for way in order:
        with measured(times, f"{way} read"):
            ways[way][1]()
    for way in order:
        _, read, folder = ways[way]
        forget_cached(folder)
        with measured(times, f"{way} cold"):
            read()
    store.remove("", "bench")
    store.collect()
    store.close()
    for path in plain.iterdir():
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--page-kib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    pages = [os.urandom(options.page_kib << 10) for _ in range(options.pages)]
    mib = options.pages * options.page_kib / 1024
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for number in range(options.rounds + 1):
            one_round(Path(root), number, pages, times if number else {})  # the first round warms up
    print(f"{options.pages} pages of {options.page_kib} KiB, n = {options.rounds}, MiB/s: median (slowest to fastest)")
    for what in ("write", "read", "cold"):
        rates = {way: sorted(mib / seconds for seconds in times[f"{way} {what}"]) for way in ("plain", "store")}
        ratios = sorted(a / b for a, b in zip(times[f"plain {what}"], times[f"store {what}"], strict=True))
        texts = [f"{way} {statistics.median(r):7.0f} ({r[0]:.0f} to {r[-1]:.0f})" for way, r in rates.items()]
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{what:5}  {texts[0]:32} {texts[1]:32} ratio {ratio}")


if __name__ == "__main__":
    main()
