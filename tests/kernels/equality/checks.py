"""One combination of the product, against dense float64 and against what numpy says that pages hold.

What is random is drawn from the seed and the combination's name, so that a failure can be had again by these two. What
no row sees is poisoned: NaN, or integers with scales of NaN. Rows of padding are NaN, and write to the scratch page.

    of a layout         rows of the step, KV heads, the type of queries, when the interpreter copies
    of a combination    the tree, all numbers and their size, pages
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner.check.cases import stored_pages
from jaxctx.engine.runner.check.comparison import POISON
from jaxctx_kernels import (
    KernelName,
    KVPages,
    MetadataShape,
    QuantizedKV,
    attend,
    copy_pages,
    kv_cache,
    metadata_shape,
    read_pages,
    select_kernel,
    unpack_metadata,
    write_pages,
    write_rows,
)
from tests.kernels.builders import dense_attention, dequantized, packed_metadata, random_sinks
from tests.kernels.interpreters import Dma, gpu_interpreter, tpu_interpreter

from .product import CASES, REFUSED, SLOTS, Combination, Layout
from .trees import POOL_PAGES, Tree, grow_tree

Generator = np.random.Generator
ROWS = (48, 136)  # of a step; from 128 on consumers of the Hopper kernel share steps
EXACT_PRODUCTS, NARROW_WEIGHTS = 1e-4, 5e-3
"""How far a row's output of a head may be off, of its norm: in float32, and where weights are rounded to bfloat16.

A token more or less among n changes it by about n**-0.5, 0.03 for the longest context; weights of bfloat16 by 0.002.
"""
MODULES = {"gpu": "jaxctx_kernels.mosaic_hopper", "mma": "jaxctx_kernels.mosaic_mma"}
"""Kernels that refuse a layout themselves."""


def generator(seed: int, name: str) -> Generator:
    """What draws for this name."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


@dataclass(frozen=True)
class Drawn:
    """What was drawn for a layout."""

    rows: int
    kv_heads: int
    row_dtype: str  # of queries, and of the keys and values that rows write
    dma: Dma
    in_registers: bool

    @classmethod
    def make(cls, layout: Layout, seed: int) -> Drawn:
        rng = generator(seed, str(layout))
        shares_lanes = layout.of.platform == "tpu" and layout.head_dim <= kv_cache.LANES // 2
        rows, kv_heads = int(rng.choice(ROWS)), int(rng.integers(1, 4 if shares_lanes else 3))
        eight_bits = jnp.dtype(layout.dtype).itemsize == 1
        row_dtype = str(rng.choice(["float32", "bfloat16"])) if eight_bits else layout.dtype
        dma: Dma = "eager" if rng.random() < 0.5 else "on_wait"
        return cls(rows, kv_heads, row_dtype, dma, bool(rng.random() < 0.5))

    def __str__(self) -> str:
        registers = ", in registers" if self.in_registers else ""
        return f"{self.rows} rows, {self.kv_heads} KV heads, rows of {self.row_dtype}, DMA {self.dma}{registers}"


@dataclass
class Subject:
    """A layout, and what is compiled for it."""

    layout: Layout
    seed: int

    def __post_init__(self) -> None:
        jax.clear_caches()  # traces depend on what is patched; and programs are many
        self.drawn = Drawn.make(self.layout, self.seed)
        self.choice = select_kernel(self.layout.of.device, self.struct(4), self.layout.group)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def struct(self, pages: int) -> Any:
        return self.layout.struct(self.drawn.kv_heads, pages)

    def check(self, case: str) -> bool:
        """Raises AssertionError, or whatever a kernel or interpreter raises, if it is wrong.

        Returns whether it is announced that another implementation serves this, which then was checked.
        """
        name = str(Combination(self.layout, case))
        rng = generator(self.seed, name)
        if case == REFUSED:
            check_refusal(self)
            case = str(rng.choice(CASES[self.layout.task]))
            print(f"{name}: {self.choice.name} is checked with {case}")
        with interpreted(self):
            name_of_kernel = CHECKS[self.layout.task](self, rng, case)
        return name_of_kernel != self.layout.of.chosen and self.layout.kernel != "kv_cache_gpu"

    def run(self, function: Callable[..., Any], static: Any, *arguments: Any) -> Any:
        """What `function` returns for `static` and arguments of numpy; compiled once for each of their shapes."""
        if (function, static) not in self._compiled:
            self._compiled[function, static] = jax.jit(partial(function, static))
        return jax.block_until_ready(self._compiled[function, static](*jax.tree.map(jnp.asarray, arguments)))


@contextmanager
def interpreted(subject: Subject) -> Iterator[None]:
    """Where kernels of this layout run."""
    drawn, of = subject.drawn, subject.layout.of
    runs_in: AbstractContextManager[None]
    if of.platform == "tpu":
        runs_in = tpu_interpreter(drawn.dma)
    elif subject.choice.name in MODULES:
        runs_in = gpu_interpreter(in_registers=drawn.in_registers and subject.choice.name == "gpu")
    else:
        runs_in = mock.patch.object(kv_cache, "CPU_MULTIPLIES_BFLOAT16", of.narrow)
    with runs_in:
        yield


def check_refusal(subject: Subject) -> None:
    """That another implementation is chosen; it is said why if that is plain JAX; and the kernel itself refuses."""
    layout, choice = subject.layout, subject.choice
    assert choice.name != layout.of.chosen
    assert bool(choice.why_no_kernel) == (choice.name == "reference"), choice
    module = MODULES.get(layout.of.chosen)
    if layout.task != "attend" or module is None:
        return
    shape = metadata_shape(1, layout.page_size, layout.page_size, 4, layout.of.chosen)
    q = jax.ShapeDtypeStruct((1, subject.drawn.kv_heads * layout.group, layout.head_dim), jnp.bfloat16)
    packed = jax.ShapeDtypeStruct((shape.size(),), jnp.int32)

    def run(q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array) -> Any:
        return import_module(module).attend(q, k, v, unpack_metadata(shape, packed), shape=shape)

    with pytest.raises(ValueError, match="no kernel for"):
        jax.eval_shape(run, q, subject.struct(4), subject.struct(4), packed)


def random_numbers(rng: Generator, layout: Layout, scale: float, *shape: int) -> np.ndarray:
    """float32, and exact in bfloat16 where pages are not of float32."""
    numbers = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return numbers if layout.dtype == "float32" else numbers.astype(jnp.bfloat16).astype(np.float32)


# Attention


def check_attention(subject: Subject, rng: Generator, case: str) -> KernelName:
    """Rows are written, then attended to; every slot is compared, too."""
    layout, drawn = subject.layout, subject.drawn
    tree, pages = grow_tree(rng, case, drawn.rows, layout.page_size), POOL_PAGES[layout.page_size]
    choice = subject.choice
    shape = metadata_shape(
        drawn.rows, layout.page_size, pages * layout.page_size, pages, choice.name, choice.processors, tree.window
    )
    struct = subject.struct(pages)
    numbers = random_numbers(
        rng,
        layout,
        rng.choice([1, 4]),
        2,
        drawn.kv_heads,
        pages,
        layout.page_size,
        layout.head_dim,
    )
    (k, exact_k), (v, exact_v) = (stored_pages(each, struct) for each in numbers)
    rows = numbers.reshape(2, drawn.kv_heads, -1, layout.head_dim)[:, :, tree.slots].swapaxes(1, 2)
    rows[:, tree.slots == 0] = np.nan
    q = random_numbers(rng, layout, 1, drawn.rows, drawn.kv_heads * layout.group, layout.head_dim)
    is_padding = padding_of(tree, drawn.rows)
    q[is_padding] = np.nan
    sinks = random_sinks(rng, drawn.kv_heads * layout.group) if tree.has_sinks else None
    own = np.zeros(tree.visible.size, np.bool_)
    own[tree.slots] = True
    before, after = (tree.visible.reshape(-1) & ~own, tree.visible.reshape(-1) | own)
    output, k_after, v_after = subject.run(
        write_and_attend,
        Step(shape, tree.soft_cap),
        poisoned(k, before),
        poisoned(v, before),
        *(each.astype(drawn.row_dtype) for each in (q, *rows)),
        tree.slots,
        packed_metadata(tree.segments, shape),
        tree.mask,
        sinks,
    )
    check_same_pages(k_after, poisoned(k, after), "keys", tree.slots)
    check_same_pages(v_after, poisoned(v, after), "values", tree.slots)
    if isinstance(k_after, QuantizedKV):  # what was written may be rounded otherwise than here
        exact_k, exact_v = (dequantized(each, drawn.kv_heads, layout.head_dim) for each in (k_after, v_after))
    got = np.asarray(output, np.float64)
    seen = tree.segments, layout.page_size, tree.mask, tree.window, tree.soft_cap, sinks
    want = dense_attention(q.astype(np.float64), exact_k, exact_v, *seen)
    assert not got[is_padding].any(), "rows of padding are not 0"
    of_float32 = "float32" in (layout.dtype, layout.kernel.rpartition("_")[2])
    check_close(got, want, EXACT_PRODUCTS if of_float32 else NARROW_WEIGHTS)
    return choice.name


class Step(NamedTuple):
    """What a layer is compiled for."""

    shape: MetadataShape
    soft_cap: float | None


def write_and_attend(
    step: Step,
    k_pages: KVPages,
    v_pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    packed: jax.Array,
    mask: jax.Array | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, KVPages, KVPages]:
    """A layer's part of a step."""
    k_pages, v_pages = write_rows(k_pages, v_pages, k, v, slots, kernel=step.shape.kernel)
    metadata = unpack_metadata(step.shape, packed)
    kept = {"kv_heads": k.shape[1], "soft_cap": step.soft_cap, "sinks": sinks}
    output = attend(q, k_pages, v_pages, metadata, mask, shape=step.shape, **kept)
    return output, k_pages, v_pages


def padding_of(tree: Tree, rows: int) -> np.ndarray:
    """bool `[rows]`: rows of no segment."""
    padding = np.ones(rows, np.bool_)
    for s in tree.segments:
        padding[s.first_row : s.first_row + s.rows] = False
    return padding


def check_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Every row's output of every head, by norms. Rows that see nothing are 0."""
    norm = np.linalg.norm(want, axis=-1)
    wrong = np.linalg.norm(got - want, axis=-1)
    excess = np.nan_to_num(wrong - tolerance * norm, nan=np.inf)
    row, head = np.unravel_index(int(excess.argmax()), excess.shape)
    rows = int((excess > 0).any(1).sum())
    assert (excess <= 0).all(), (
        f"{rows} rows differ, most row {row}, query head {head}: by {wrong[row, head]:.3g} of {norm[row, head]:.3g}"
    )


def poisoned(pages: Any, keep: np.ndarray) -> Any:
    """Pages of numpy with something telling in all slots but those of `keep`, bool `[slots]`."""
    values = pages.values if isinstance(pages, QuantizedKV) else pages
    keep = keep.reshape(values.shape[1:3])
    poison = np.asarray(POISON.get(values.dtype.name, np.nan)).astype(values.dtype)
    values = np.where(keep[None, :, :, None], values, poison)
    if not isinstance(pages, QuantizedKV):
        return values
    lanes = np.pad(keep, ((0, 0), (0, pages.scales.shape[3] - keep.shape[1])), constant_values=True)
    scales = np.where(lanes[None, :, None], pages.scales, np.float32(np.nan))
    return QuantizedKV(values, scales)


def check_same_pages(got: Any, want: Any, what: str, written: np.ndarray | None = None) -> None:
    """To the bit, but for the scratch page.

    In slots of `written`, numbers of 8 bits may be a step apart, and scales by their last bits: XLA may multiply by the
    reciprocal of what numpy divides by.
    """
    for part, (a, b) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        differ = (bits(a) != bits(b)).reshape(*a.shape, -1).any(-1)
        if isinstance(want, QuantizedKV) and written is not None:
            is_scale, page_size = part == 1, want.values.shape[2]
            near = np.abs(a - b) <= 1e-6 * np.abs(b) if is_scale else np.abs(codes(a) - codes(b)) <= 1
            pages, offsets = written // page_size, written % page_size
            place = (slice(None), pages, slice(None), offsets) if is_scale else (slice(None), pages, offsets)
            differ[place] &= ~near[place]
        of_page = differ[:, 1:].any((0, 2, 3))
        of = ("", "'s scales")[part]
        assert not of_page.any(), f"{of_page.sum()} pages of {what}{of} differ, the first is {of_page.argmax() + 1}"


def codes(values: np.ndarray) -> np.ndarray:
    """Numbers of 8 bits as consecutive integers."""
    if values.dtype == np.int8:
        return values.astype(np.int32)
    number = bits(values).astype(np.int32)  # of float8, a sign and what grows with the absolute value
    return np.where(number < 128, number, 128 - number)


def bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


# Writing and moving pages


def check_write(subject: Subject, rng: Generator, case: str) -> KernelName:
    """Every slot of the pages, those that are not written too."""
    layout, drawn = subject.layout, subject.drawn
    count = 1 + max(4, 160 // layout.page_size)
    slots = np.zeros(WRITTEN_ROWS, np.int32)
    chosen = SLOTS_OF[case](rng, layout.page_size, count)
    slots[: len(chosen)] = chosen
    struct = subject.struct(count)
    before, rows = random_numbers(
        rng, layout, rng.choice([0.1, 1, 30]), 2, 2, drawn.kv_heads, count, layout.page_size, layout.head_dim
    )
    after = before.copy().reshape(2, drawn.kv_heads, -1, layout.head_dim)
    rows = rows.reshape(after.shape)[:, :, :WRITTEN_ROWS]
    after[:, :, slots] = rows
    pages = [stored_pages(each, struct)[0] for each in before]
    want = [stored_pages(each, struct)[0] for each in after.reshape(before.shape)]
    written = subject.run(write, subject.choice.name, *pages, *rows.swapaxes(1, 2).astype(drawn.row_dtype), slots)
    for got, expected, what in zip(written, want, ("keys", "values"), strict=True):
        check_same_pages(got, expected, what, slots)
    return subject.choice.name


def write(
    kernel: KernelName, k_pages: KVPages, v_pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[KVPages, KVPages]:
    """A layer's write."""
    return write_rows(k_pages, v_pages, k, v, slots, kernel=kernel)


WRITTEN_ROWS = 80
"""Of a step, padding included; as many as the kinds of slots take at most."""


def prompt_slots(rng: Generator, page_size: int, pages: int) -> list[int]:
    """A prompt's chunk over pages in random order, from the middle of one to the middle of another."""
    table = rng.permutation(np.arange(1, pages))
    begin = page_size - int(rng.integers(1, 16))
    token = np.arange(begin, begin + int(rng.integers(16, 48)))
    return list(table[token // page_size] * page_size + token % page_size)


def decoding_slots(rng: Generator, page_size: int, pages: int) -> list[int]:
    """Some slots anywhere."""
    return list(rng.choice(np.arange(page_size, pages * page_size), int(rng.integers(1, 24)), replace=False))


def mixed_slots(rng: Generator, page_size: int, pages: int) -> list[int]:
    """A chunk, rows alone, and padding between and behind them."""
    chunk = prompt_slots(rng, page_size, pages)
    alone = [slot for slot in decoding_slots(rng, page_size, pages) if slot not in chunk]
    padding = [0] * int(rng.integers(1, 5))
    return [*alone[:3], *padding, *chunk, *padding, *alone[3:]]


def padding_slots(rng: Generator, page_size: int, pages: int) -> list[int]:
    """Only slots of the scratch page."""
    return list(rng.integers(0, page_size, WRITTEN_ROWS))


SLOTS_OF = dict(zip(SLOTS, (prompt_slots, decoding_slots, mixed_slots, padding_slots), strict=True))


def check_move(subject: Subject, rng: Generator, case: str) -> KernelName:
    """Copies in chains, pages that are read twice, and padding; to the bit."""
    layout, count, kernel = subject.layout, 10, subject.choice.name
    shape = (subject.drawn.kv_heads, count, layout.page_size, layout.head_dim)
    held, others = (stored_pages(random_numbers(rng, layout, 40, *shape), subject.struct(count))[0] for _ in "ab")
    moved = int(rng.integers(1, 7))
    targets = rng.permutation(np.arange(1, count))[:moved].astype(np.int32)
    sources = rng.integers(1, count, moved).astype(np.int32)
    is_padding = rng.random(moved) < 0.3
    targets[is_padding] = sources[is_padding] = 0
    if case == "read":
        differ = bits(subject.run(read, kernel, held, sources)) != bits(joined(held, sources))
        assert not differ.any(), f"{differ.any((1, 2, 3)).sum()} pages that were read differ"
        return kernel
    copied = case == "copy"
    read_from = held if copied else others
    got = (
        subject.run(copy, kernel, held, sources, targets)
        if copied
        else subject.run(load, kernel, held, targets, list(joined(others, sources)))
    )
    want = jax.tree.map(np.copy, held)
    for array, source in zip(jax.tree.leaves(want), jax.tree.leaves(read_from), strict=True):
        array[:, targets] = source[:, sources]
    check_same_pages(got, want, "what was moved")
    return kernel


def copy(kernel: KernelName, pages: KVPages, sources: jax.Array, targets: jax.Array) -> Any:
    """Pages copied within their arrays."""
    return copy_pages(pages, sources, targets, kernel=kernel)


def read(kernel: KernelName, pages: KVPages, ids: jax.Array) -> Any:
    """Pages as they are outside of their arrays."""
    return read_pages(pages, ids, kernel=kernel)


def load(kernel: KernelName, pages: KVPages, ids: jax.Array, data: list[jax.Array]) -> Any:
    """Pages written as `read` returned them."""
    return write_pages(pages, ids, data, kernel=kernel)


def joined(pages: Any, ids: np.ndarray) -> np.ndarray:
    """`kv_cache.read_pages` in numpy."""
    if not isinstance(pages, QuantizedKV):
        return np.ascontiguousarray(pages[:, ids].swapaxes(0, 1))
    values, scales = (array[:, ids].swapaxes(0, 1) for array in pages)
    of_tokens = np.ascontiguousarray(scales[..., : values.shape[2]].swapaxes(2, 3)).view(np.uint8)
    return np.concatenate([np.ascontiguousarray(values).view(np.uint8), of_tokens.reshape(*values.shape[:3], -1)], 3)


CHECKS: dict[str, Callable[[Subject, Generator, str], KernelName]] = {
    "attend": check_attention,
    "write": check_write,
    "move": check_move,
}
