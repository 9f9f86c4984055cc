#!/usr/bin/env python3
"""Whole steps of a model on the device found here, alone: milliseconds by what is in the batch.

    scripts/bench_steps.py MODEL_DIR [BATCH …] [--rounds N] [--matmul-dtype TYPE]

Each step is planned, dispatched and waited for, without a server around it; "nothing" attends to nothing, so it is the
matrix products and what goes with them. Medians of the rounds, with the fastest; the batches take turns, so that
whatever else the machine does meets all of them. BATCH picks those whose name contains it. As in a server, memory that
was freed is kept (`jaxctx_server.cli.MALLOC`), unless GLIBC_TUNABLES says otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepShape, write_metadata
from jaxctx.model.weights import load_model
from jaxctx_kernels import Segment
from jaxctx_server.cli import MALLOC

PAGE = 16
Batch = tuple[int, list[Segment]]  # rows to pad to, and what is in them


class Pages:
    """Hands out page ids, in order."""

    def __init__(self) -> None:
        self.next = 1

    def take(self, tokens: int) -> list[int]:
        """Enough for so many tokens."""
        first, self.next = self.next, self.next - (-tokens // PAGE)
        return list(range(first, self.next))


def nothing(rows: int) -> Batch:
    """Rows that see nothing."""
    return rows, []


def unshared(streams: int, rows: int, position: int) -> Batch:
    """Streams of so many rows each behind so many tokens of their own."""
    pages = Pages()
    parts = [Segment(i * rows, rows, position, array(pages.take(position + rows))) for i in range(streams)]
    return streams * rows, parts


def branches(groups: int, each: int, prefix: int, tail: int, rows: int = 1) -> Batch:
    """Groups of streams behind a prefix each, and `tail` tokens of their own."""
    pages = Pages()
    parts: list[Segment] = []
    for _ in range(groups):
        shared = pages.take(prefix)
        for _ in range(each):
            table = array(shared + pages.take(tail + rows))
            parts.append(Segment(len(parts) * rows, rows, prefix + tail, table))
    return len(parts) * rows, parts


def array(pages: Sequence[int]) -> np.ndarray:
    """As plans want them."""
    return np.asarray(pages, np.int32)


BATCHES = {
    **{f"nothing, {rows} rows": nothing(rows) for rows in (1, 16, 32, 64, 512)},
    **{f"1 stream at {position}": unshared(1, 1, position) for position in (160, 552, 2112, 8000)},
    "16 rows of 1 stream at 160": unshared(1, 16, 144),
    **{f"16 streams at {position}": unshared(16, 1, position) for position in (192, 552, 2112)},
    "16 branches off 2048": branches(1, 16, 2048, 64),
    "32 branches off 8192": branches(1, 32, 8192, 32),
    "8 pairs off 512": branches(8, 2, 512, 40),
    "16 rows of a prompt at 2048": unshared(1, 16, 2048),
    "16 x 16 rows off 2048": branches(1, 16, 2048, 0, rows=16),
    "4 prompts of 128": unshared(4, 128, 0),
    **{f"512 rows of a prompt at {position}": unshared(1, 512, position) for position in (0, 512, 7168)},
}


def packed(device: ModelRunner, shape: StepShape, parts: Sequence[Segment], rng: np.random.Generator) -> np.ndarray:
    """The step's inputs, with tokens that are random."""
    vector, views = device.make_step_inputs(shape)
    views.tokens[:] = rng.integers(0, 1000, shape.rows)
    for part in parts:
        rows = slice(part.first_row, part.first_row + part.rows)
        positions = np.arange(part.position, part.position + part.rows)
        views.positions[rows] = positions
        views.kv_slots[rows] = part.pages[positions // PAGE] * PAGE + positions % PAGE
    write_metadata(parts, shape, views)
    return vector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("batches", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--matmul-dtype", help="of weights of 8 bits (default: bfloat16)")
    options = parser.parse_args()
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": MALLOC})
    loaded = load_model(options.model, dtype="bfloat16", matmul_dtype=options.matmul_dtype)
    config = EngineConfig(pages=4096, page_size=PAGE, max_context_tokens=16384)
    device = ModelRunner(loaded.model, loaded.params, config)
    device.compile()
    rng = np.random.default_rng(0)
    chosen = {n: b for n, b in BATCHES.items() if not options.batches or any(part in n for part in options.batches)}
    times: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, (rows, parts) in chosen.items():
            shape = device.select_bucket(rows)
            vector = packed(device, shape, parts, rng)
            start = time.perf_counter()
            jax.block_until_ready(device.run(shape, vector))
            times[name].append((time.perf_counter() - start) * 1e3)
    print(f"JAX {jax.__version__} on {jax.devices()[0].platform}, {options.rounds} rounds: median, fastest (ms)")
    for name, each in times.items():
        print(f"{name:30s} {statistics.median(each):8.1f} {min(each):8.1f}")


if __name__ == "__main__":
    main()
