"""A TPU's instruction words, by count: bundles of whole programs, of their loops with how often they run, and spills.

A bundle is what a core issues in one cycle if nothing stalls. So counts say what a chip has to do at least, not how
long it takes. How often a loop runs is known where the compiler compares with a number at its end: XLA's own loops over
a known number of tiles. A loop whose end is known only when it runs counts once.

    lowered ──libtpu──▶ a file of final bundles for each fusion and kernel ──▶ Program ──▶ Loop
            └─────────▶ HLO ──▶ copies of arguments of four axes, which are the pools

libtpu reads where to write from the environment when it is loaded, so `dump_bundles` comes first in a process.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxctx.engine.plan.memory_planner import compile_described
from jaxctx.engine.runner.compiler_options import CompilerOptions

FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
FILE = re.compile(r"^\d+-(?P<program>.+)-\d+-final_bundles\.txt$")
BUNDLE = re.compile(
    r"^\s*(?:0x)?(?P<address>[0-9a-f]+)\s+(?P<labels>(?:[A-Z]{2} ?)*):\s*(?P<depth>>*)\s*\{(?P<empty>\})?"
)
LOOP_END = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (?P<trips>\d+) /\* loop exit test")
SPILL = re.compile(r"\b(?:sst|vst) \[[sv]mem:\[#allocation\d+_spill\]")
ENTRY = re.compile(r"entry_computation_layout=\{\((?P<arguments>.*?)\)->")
SHAPE = re.compile(r"\w+\[(?P<sizes>[\d,]*)\]")
COPY = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?:copy|copy-start|transpose)\(", re.MULTILINE)
POOL_AXES = 4


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop of a program."""

    address: int  # of its first bundle
    depth: int  # 1: in no other loop
    bundles: int  # with those of the loops inside
    trips: int | None  # how often it runs each time it is come to; None: known only when it runs


@dataclass(frozen=True, slots=True)
class Program:
    """A fusion, a kernel, or what calls them."""

    name: str
    bundles: int
    least_run: int  # bundles times trips, of loops with an unknown number of trips once
    spills: int  # stores of registers for want of registers
    loops: tuple[Loop, ...]  # by address

    @property
    def is_top_level(self) -> bool:
        """Whether it is what calls the others. Its loops copy arguments that are not donated, where there are such."""
        return self.name == "TLP"


def dump_bundles() -> tempfile.TemporaryDirectory[str]:
    """Have libtpu, which must not be loaded yet, write what `read_programs` reads; returns where.

    Nothing is written for what comes from JAX's compilation cache, so the cache is turned off.
    """
    folder = tempfile.TemporaryDirectory(prefix="bundles-")
    before = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{before} --xla_jf_dump_to={folder.name} {FLAGS}".strip()
    jax.config.update("jax_enable_compilation_cache", False)
    return folder


def compile_and_count(
    lowered: jax.stages.Lowered, options: CompilerOptions, folder: Path
) -> tuple[jax.stages.Compiled, tuple[Program, ...]]:
    """Compile for a TPU that need not be there, in a process in which `dump_bundles` returned `folder`.

    Raises RuntimeError if nothing was written: libtpu was there before `dump_bundles`.
    """
    for left in folder.iterdir():
        left.unlink()
    compiled = compile_described(lowered, options)
    programs = tuple(read_programs(folder))
    if not programs:
        raise RuntimeError("libtpu wrote no bundles: it was loaded before it was told to")
    return compiled, programs


def read_programs(folder: Path) -> Iterable[Program]:
    """The programs that libtpu wrote there, by name."""
    found = [(match["program"], path) for path in folder.iterdir() if (match := FILE.match(path.name))]
    for name, path in sorted(found):
        if not name.endswith("schedule-analysis_final_bundles"):
            yield parse_program(name, path.read_text().splitlines())


def parse_program(name: str, lines: Sequence[str]) -> Program:
    """A program, from the text of its final bundles."""
    bundles = spills = least_run = 0
    open_loops: list[_OpenLoop] = []
    done: list[Loop] = []

    def close(depth: int) -> int:
        """Close loops of this depth and deeper. Returns the bundles to add to what the program runs at least."""
        to_add = 0
        while open_loops and open_loops[-1].depth >= depth:
            closed = open_loops.pop()
            done.append(Loop(closed.address, closed.depth, closed.bundles, closed.trips))
            run = closed.least_run * (closed.trips or 1)
            if open_loops:
                open_loops[-1].least_run += run
            else:
                to_add += run
        return to_add

    for line in lines:
        spills += len(SPILL.findall(line))
        bundle = BUNDLE.match(line)
        if bundle is not None:
            depth, is_begin = len(bundle["depth"]), "LB" in bundle["labels"].split()
            if not bundle["empty"]:  # an empty one has no depth, wherever it is
                least_run += close(depth if is_begin else depth + 1)
            if is_begin:
                open_loops.append(_OpenLoop(int(bundle["address"], 16), depth))
            bundles += 1
            for each in open_loops:
                each.bundles += 1
            if open_loops:
                open_loops[-1].least_run += 1
            else:
                least_run += 1
        end = LOOP_END.search(line)
        if end is not None and open_loops:
            open_loops[-1].trips = int(end["trips"])
    least_run += close(0)
    return Program(name, bundles, least_run, spills, tuple(sorted(done, key=lambda loop: loop.address)))


@dataclass(slots=True)
class _OpenLoop:
    """A loop whose end has not been read yet."""

    address: int
    depth: int
    bundles: int = 0
    least_run: int = 0
    trips: int | None = None


def pool_copies(hlo: str) -> list[str]:
    """Types of what compiled HLO copies, or transposes, and that is as large as an argument of four axes: a pool."""
    entry = ENTRY.search(hlo)
    if entry is None:
        raise ValueError("HLO without entry_computation_layout")
    pools = {shape for shape in SHAPE.findall(entry["arguments"]) if len(shape.split(",")) == POOL_AXES}
    return [copy["type"] for copy in COPY.finditer(hlo) if pools.intersection(SHAPE.findall(copy["type"]))]
