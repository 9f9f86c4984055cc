#!/usr/bin/env python3
"""Count loops of GPU kernels in their machine code, without a GPU: the tables of docs/kernels, printed as Markdown.

    scripts/count_loops.py [TABLE …] [--only PATTERN]

    loops      "Loops, counted" of docs/kernels/hopper.md
    windows    "Windows and caps" there
    mma        the table of docs/kernels/mma.md, for an A100

No baseline holds these: `compile_checks.py` compares some of the kernels only, since all of them take minutes. Needs
what it needs for `--target h200`, with nvidia-cuda-nvcc and nvidia-cuda-nvdisasm. Exit status 3 where that is missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import jax
from compiled_functions import Chips, kernel
from compiler_output.sass import HOPPER, Loop, MachineCode, MissingTools, Tools, dumped_kernels, find_tools, read_kernel

from jaxctx.engine.plan.memory_planner import compile_described, compiling_for
from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.errors import FailedPrecondition

WINDOW, SOFT_CAP = 1024, 50.0
VARIANTS = ((None, None), (WINDOW, None), (None, SOFT_CAP), (WINDOW, SOFT_CAP))
"""Neither, a window, a soft cap, both."""


class Layout(NamedTuple):
    """A kernel's layout."""

    dtype: str
    head_dim: int
    rows: int
    page_size: int = 64
    group: int = 4

    def __str__(self) -> str:
        """The layout as the tables name it: only what is not usual."""
        pages = "" if self.page_size == 64 else f", pages of {self.page_size}"
        groups = "" if self.group == 4 else f", groups of {self.group}"
        return f"{self.dtype}, head dim {self.head_dim}, {self.rows} rows{pages}{groups}"


class Counts(NamedTuple):
    """What is told of a kernel. An iteration of a loop is 64 tokens of a consumer, or of a warp."""

    full: Loop  # of steps that need no mask; of a kernel with one loop that one
    masked: Loop
    spills: int  # bytes, stored and loaded, wherever in the code


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the documents: its kernels, and how a line is made of the counts of a layout's variants."""

    target: str
    architecture: str
    layouts: Sequence[Layout]
    variants: Sequence[tuple[int | None, float | None]]  # windows and soft caps
    columns: Sequence[str]
    line: Callable[[Sequence[Counts]], Sequence[str]]


def loops_line(counts: Sequence[Counts]) -> Sequence[str]:
    """Of a kernel without windows and caps."""
    (found,) = counts
    full = found.full
    beside = f"{full.shortest:,}", f"{full.beside_products:,}", f"{found.masked.shortest:,}"
    return *beside, f"{full.barriers}", f"{found.spills:,}"


def windows_line(counts: Sequence[Counts]) -> Sequence[str]:
    """Of the variants of a kernel with two loops."""
    steps = [f"{found.full.shortest:,}, {found.masked.shortest:,}" for found in counts]
    return *steps, "; ".join(f"{found.spills:,}" for found in counts)


def mma_line(counts: Sequence[Counts]) -> Sequence[str]:
    """Of the variants of a kernel with one loop."""
    steps = [f"{found.full.shortest:,}, {found.full.counts.get('MUFU', 0)}" for found in counts]
    return *steps, "; ".join(f"{found.spills:,}" for found in counts)


OF_VARIANTS = ("neither", "window", "soft cap", "both", "spilled bytes of each")
TABLES = {
    "loops": Table(
        "h200",
        HOPPER,
        (
            Layout("bfloat16", 64, 64),
            Layout("bfloat16", 64, 256),
            Layout("bfloat16", 128, 64),
            Layout("bfloat16", 128, 256),
            Layout("bfloat16", 256, 64),
            Layout("bfloat16", 256, 256),
            Layout("int8", 128, 64, 16),
            Layout("int8", 128, 256),
            Layout("int8", 256, 64, 16),
            Layout("int8", 256, 256, 16),
            Layout("float8_e4m3fn", 128, 64, 16),
            Layout("float8_e4m3fn", 128, 256),
        ),
        VARIANTS[:1],
        ("full steps", "of these beside a product", "other steps", "barriers of a full step", "spilled bytes"),
        loops_line,
    ),
    "windows": Table(
        "h200",
        HOPPER,
        (
            Layout("bfloat16", 64, 64),
            Layout("bfloat16", 128, 64),
            Layout("bfloat16", 128, 256),
            Layout("bfloat16", 256, 64, group=2),
            Layout("int8", 128, 64, 16),
            Layout("int8", 128, 256),
        ),
        VARIANTS,
        OF_VARIANTS,
        windows_line,
    ),
    "mma": Table("a100-80gb", "sm_80", (Layout("bfloat16", 128, 64),), VARIANTS, OF_VARIANTS, mma_line),
}


def count(code: MachineCode) -> Counts:
    """Of a kernel's loops that multiply, the shortest and the longest."""
    loops = sorted((loop for loop in code.loops if loop.products), key=lambda loop: loop.shortest)
    return Counts(loops[0], loops[-1], code.spill_bytes)


def lines(name: str, only: str) -> Iterator[str]:
    """The lines of a table, of those layouts whose names match `only`. Compiles in this process."""
    table, tools = TABLES[name], find_tools()
    yield "| " + " | ".join(["kernel", *table.columns]) + " |"
    yield "|" + "---|" * (len(table.columns) + 1)
    jax.config.update("jax_enable_compilation_cache", False)  # of what is found there compilers write nothing
    with compiling_for(table.target) as (devices, _):
        chips = Chips(devices[0], devices)
        for layout in table.layouts:
            if fnmatch.fnmatch(str(layout), only):
                found = [compile_and_count(layout, *variant, table, chips, tools) for variant in table.variants]
                yield "| " + " | ".join([str(layout), *table.line(found)]) + " |"


def compile_and_count(
    layout: Layout, window: int | None, soft_cap: float | None, table: Table, chips: Chips, tools: Tools
) -> Counts:
    """Compile a kernel and count its loops."""
    lower = kernel(
        layout.rows, layout.head_dim, layout.page_size, layout.group, layout.dtype, window=window, soft_cap=soft_cap
    )
    with dumped_kernels(tools) as folder:
        compile_described(lower(chips), compiler_options("gpu"))
        return count(read_kernel(folder, "attend_unit", tools, table.architecture))


def print_table(name: str, only: str) -> None:
    """Print a table, each line as soon as it is counted."""
    print(f"\n{name}:\n", flush=True)
    for line in lines(name, only):
        print(line, flush=True)


def main() -> int:
    """Exit status: 3 if a compiler or a tool is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all if none is named")
    parser.add_argument("--only", default="*", help="names of kernels, with * and ?")
    options = parser.parse_args()
    if unknown := [name for name in options.tables if name not in TABLES]:
        parser.error(f"no table {', '.join(unknown)}: there are {', '.join(TABLES)}")
    spawn = multiprocessing.get_context("spawn")
    # A process each: the compiler takes a second compute capability of a process for the first.
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for name in options.tables or TABLES:
            try:
                pool.submit(print_table, name, options.only).result()
            except (MissingTools, FailedPrecondition) as error:
                print(error, file=sys.stderr)
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
