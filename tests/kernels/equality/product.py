"""The product: every combination that is checked, by name, in one order.

    attend KERNEL DTYPE page N dim N group N TREE    attention after a write, as in a layer of a step
    write  KERNEL DTYPE page N dim N SLOTS           keys and values into pages, for slots that a step may have
    move   KERNEL DTYPE page N dim N OPERATION       whole pages

A kernel that is not made for a layout of pages has one combination there, whose last word is "refused": that it says
so, and that what is chosen instead is equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, product
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from jaxctx_kernels import KernelName, kv_pages_struct, select_kernel

from .trees import TREES

Task: TypeAlias = Literal["attend", "write", "move"]


@dataclass(frozen=True)
class Kernel:
    """An implementation with the platform that it is for."""

    platform: str
    chosen: KernelName  # what `select_kernel` calls it
    device: Any  # as `select_kernel` wants it described
    narrow: bool = False  # of a CPU: whether it multiplies bfloat16 without widening it


CPU = SimpleNamespace(platform="cpu")
TPU = SimpleNamespace(platform="tpu")
HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=2)
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", core_count=2)
KERNELS: dict[str, Kernel] = {
    "reference_float32": Kernel("cpu", "reference", CPU),
    "reference_bfloat16": Kernel("cpu", "reference", CPU, narrow=True),
    "mosaic_hopper": Kernel("gpu", "gpu", HOPPER),
    "mosaic_mma": Kernel("gpu", "mma", AMPERE),
    "pallas_tpu": Kernel("tpu", "tpu", TPU),
}
"""Attention. GPUs have so few processors that units cross tiles and tiles have several units."""
MOVERS: dict[str, Kernel] = {
    "kv_cache_cpu": Kernel("cpu", "reference", CPU),
    "kv_cache_gpu": Kernel("gpu", "gpu", HOPPER),
    "pallas_tpu": Kernel("tpu", "tpu", TPU),
}
"""Writing rows and moving pages. All GPUs' pages lie alike, and plain JAX writes and moves them."""
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
GROUPS = (1, 2, 3, 4, 7, 8)
SLOTS = ("prompt", "decoding", "mixed", "padding")
OPERATIONS = ("copy", "read", "write")
REFUSED = "refused"


@dataclass(frozen=True)
class Layout:
    """Pages, and for attention how many query heads read a KV head: what a program is compiled for."""

    task: Task
    kernel: str
    dtype: str
    page_size: int
    head_dim: int
    group: int = 1

    def __str__(self) -> str:
        group = f" group {self.group}" if self.task == "attend" else ""
        return f"{self.task} {self.kernel} {self.dtype} page {self.page_size} dim {self.head_dim}{group}"

    @property
    def of(self) -> Kernel:
        """Its kernel."""
        return (KERNELS if self.task == "attend" else MOVERS)[self.kernel]

    def struct(self, kv_heads: int, pages: int) -> Any:
        """The page arrays, as the kernel's platform stores them."""
        return kv_pages_struct(kv_heads, pages, self.page_size, self.head_dim, self.dtype, self.of.platform)

    @property
    def is_refused(self) -> bool:
        """Whether its kernel is not made for it.

        Without a kernel plain JAX writes and moves pages on a GPU too, so that no layout is refused there.
        """
        if self.of.platform == "cpu" or self.kernel == "kv_cache_gpu":
            return False
        return select_kernel(self.of.device, self.struct(2, 4), self.group).name != self.of.chosen


@dataclass(frozen=True)
class Combination:
    """One thing to check."""

    layout: Layout
    case: str  # a tree, kind of slots or operation; or REFUSED

    def __str__(self) -> str:
        return f"{self.layout} {self.case}"


CASES: dict[Task, tuple[str, ...]] = {"attend": tuple(TREES), "write": SLOTS, "move": OPERATIONS}


def layouts() -> Iterator[Layout]:
    """All of them."""
    for kernel, dtype, size, dim, group in product(KERNELS, DTYPES, PAGE_SIZES, HEAD_DIMS, GROUPS):
        yield Layout("attend", kernel, dtype, size, dim, group)
    tasks: tuple[Task, ...] = ("write", "move")
    for task, kernel, dtype, size, dim in product(tasks, MOVERS, DTYPES, PAGE_SIZES, HEAD_DIMS):
        yield Layout(task, kernel, dtype, size, dim)


def combinations_of(layout: Layout) -> list[Combination]:
    """What is checked of a layout."""
    return [Combination(layout, case) for case in ((REFUSED,) if layout.is_refused else CASES[layout.task])]


def combinations() -> list[Combination]:
    """The whole product."""
    return [combination for layout in layouts() for combination in combinations_of(layout)]


def part_of(combination: Combination) -> str:
    """The row of a report that counts it."""
    refused = f" {REFUSED}" if combination.case == REFUSED else ""
    return f"{combination.layout.task} {combination.layout.kernel}{refused}"


def draw(all_of_them: Iterable[Combination], fraction: float, seed: int) -> list[Combination]:
    """A fraction of the layouts of each part, at least one, with all cases of each, as a layout is compiled once.

    They are in random order, and a run that is stopped has taken about as much of every part.
    """
    by_layout = [list(group) for _, group in groupby(all_of_them, key=lambda each: each.layout)]
    by_part: dict[str, list[list[Combination]]] = {}
    for of_layout in by_layout:
        by_part.setdefault(part_of(of_layout[0]), []).append(of_layout)
    placed = []
    for name, part in sorted(by_part.items()):
        random.Random(f"{seed} {name}").shuffle(part)
        taken = math.ceil(fraction * len(part))
        placed += [((number + 0.5) / taken, name, number) for number in range(taken)]
    return [combination for _, name, number in sorted(placed) for combination in by_part[name][number]]
