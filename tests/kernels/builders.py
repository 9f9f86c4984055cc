"""Builders of kernel tests: random batches over random page trees, page arrays, and dense float64 attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx_kernels import (
    KVPages,
    MetadataShape,
    QuantizedKV,
    Segment,
    build_attention_metadata,
    kv_pages_struct,
    write_kv,
)
from jaxctx_kernels.kv_cache import decode

Generator = np.random.Generator


@dataclass
class Forest:
    """Deals out rows and pages of one batch; pages may run out only if a test asks for more than it made.

    `page_units`: a page is as large as so many of those that a batch asks for.
    """

    rng: Generator
    rows: int
    page_size: int
    pool_pages: int
    page_units: int = 1

    def __post_init__(self) -> None:
        self.free = list(self.rng.permutation(np.arange(1, self.pool_pages)).astype(np.int32))
        self.next_row = 0
        self.segments: list[Segment] = []

    def pages(self, count: int) -> np.ndarray:
        count = -(-count // self.page_units)
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return np.array(taken, np.int32)

    def add(self, prefix: np.ndarray, own_pages: int, rows: int, slack: int = 0) -> None:
        """A sequence of `prefix` and own pages, ending in the last of them; `slack` more are reserved past it."""
        pages = np.concatenate([prefix, self.pages(own_pages)])
        end = len(pages) * self.page_size - int(self.rng.integers(0, self.page_size))
        pages = np.concatenate([pages, self.pages(slack)])
        rows = min(rows, end)
        self.segments.append(Segment(self.next_row, rows, end - rows, pages))
        self.next_row += rows

    def spread(self) -> None:
        """Rows of padding before, between and behind the sequences, as many as there are."""
        spare = self.rows - self.next_row
        assert spare >= 0
        gaps = np.sort(self.rng.integers(0, spare + 1, len(self.segments)))
        self.segments = [
            replace(s, first_row=s.first_row + int(gap)) for s, gap in zip(self.segments, gaps, strict=True)
        ]


def no_sharing(f: Forest) -> None:
    for _ in range(5):
        f.add(f.pages(0), int(f.rng.integers(1, 6)), 1, slack=int(f.rng.integers(0, 3)))


def one_prefix(f: Forest) -> None:
    prefix = f.pages(11)
    for _ in range(6):
        f.add(prefix, int(f.rng.integers(1, 4)), 1)


def many_prefixes(f: Forest) -> None:
    for _ in range(3):
        prefix = f.pages(int(f.rng.integers(1, 12)))
        for _ in range(3):
            f.add(prefix, int(f.rng.integers(1, 3)), 1)


def three_levels(f: Forest) -> None:
    root = f.pages(9)
    for _ in range(2):
        branch = np.concatenate([root, f.pages(int(f.rng.integers(1, 9)))])
        f.add(branch, 1, 1)
        for _ in range(2):
            twig = np.concatenate([branch, f.pages(int(f.rng.integers(1, 4)))])
            f.add(twig, 1, 1)
            f.add(twig, 2, 1)


def chunks_and_decode(f: Forest) -> None:
    prefix = f.pages(6)
    f.add(prefix, 4, 20)
    f.add(f.pages(0), 3, 17)
    f.add(prefix, 1, 1)
    f.add(prefix, 1, 5)
    f.add(f.pages(0), 9, 1)


def nothing(f: Forest) -> None:
    """Only padding."""


BATCHES: dict[str, Callable[[Forest], None]] = {
    f.__name__: f for f in (no_sharing, one_prefix, many_prefixes, three_levels, chunks_and_decode, nothing)
}


def visible_slots(
    segments: list[Segment],
    page_size: int,
    pool_pages: int,
    window: int | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """bool `[pages, page_size]`: the slots that some row sees. `mask`: as that of `dense_attention`."""
    seen = np.zeros((pool_pages, page_size), np.bool_)
    for s in segments:
        token = np.arange(0 if window is None else max(0, s.position + 1 - window), s.position + s.rows)
        if mask is not None:
            own = s.position + np.arange(s.rows)[:, None]
            sees = mask[s.first_row : s.first_row + s.rows][:, token] & (token <= own)
            if window is not None:
                sees &= token > own - window
            token = token[sees.any(0)]
        seen[s.pages[token // page_size], token % page_size] = True
    return seen


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    segments: list[Segment],
    page_size: int,
    mask: np.ndarray | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64 `[rows, heads, head_dim]` from pages `[kv_heads, pages, page_size, head_dim]`, row by row."""
    rows, heads, dim = q.shape
    group = heads // k.shape[0]
    out = np.zeros((rows, heads, dim))
    for s in segments:
        for r in range(s.first_row, s.first_row + s.rows):
            token = np.arange(s.position + r - s.first_row + 1)
            if mask is not None:
                token = token[mask[r, : len(token)]]
            if window is not None:
                token = token[token > s.position + r - s.first_row - window]
            page, offset = s.pages[token // page_size], token % page_size
            for h in range(heads) if len(token) else ():
                score = k[h // group, page, offset] @ q[r, h] * dim**-0.5
                score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
                highest = score.max() if sinks is None else max(score.max(), sinks[h])
                weight = np.exp(score - highest)
                of_sink = 0 if sinks is None else np.exp(sinks[h] - highest)
                out[r, h] = weight @ v[h // group, page, offset] / (weight.sum() + of_sink)
    return out


def random_sinks(rng: Generator, heads: int) -> np.ndarray:
    """float32 `[heads]`: one far below all scores, one among them and one far above, in any order; others anywhere."""
    sinks = np.concatenate([[-20.0, 0.0, 20.0], rng.normal(size=heads) * 4])[:heads]
    return rng.permutation(sinks).astype(np.float32)


def packed_metadata(segments: list[Segment], shape: MetadataShape, unused: int = 2**31 - 1) -> np.ndarray:
    """The packed metadata of a batch. Whatever is not filled is `unused`, and must not be used."""
    packed = np.full(shape.size(), unused, np.int32)
    build_attention_metadata(segments, shape, packed)
    return packed


def zero_pages(kv_heads: int, pages: int, page_size: int, head_dim: int, dtype: str) -> KVPages:
    """Pages of zeros as the default platform stores them."""
    struct = kv_pages_struct(kv_heads, pages, page_size, head_dim, dtype, jax.default_backend())
    zeros: KVPages = jax.tree.map(jnp.zeros_like, struct)
    return zeros


def filled_pages(values: np.ndarray, dtype: str) -> KVPages:
    """Pages that hold `values` `[kv_heads, pages, page_size, head_dim]`."""
    heads, pages, size, dim = values.shape
    rows = values.transpose(1, 2, 0, 3).reshape(pages * size, heads, dim)
    rows = jnp.asarray(rows, "float32" if jnp.dtype(dtype).itemsize == 1 else dtype)
    filled: KVPages = write_kv(zero_pages(heads, pages, size, dim, dtype), rows, jnp.arange(pages * size))
    return filled


def dequantized(pages: KVPages, kv_heads: int | None = None, head_dim: int | None = None) -> np.ndarray:
    """float64 `[kv_heads, pages, page_size, head_dim]`: the numbers that pages stand for, exactly.

    `kv_heads`, `head_dim`: of pages with room for more, as a TPU's may be.
    """
    if not isinstance(pages, QuantizedKV):
        return np.asarray(decode(pages), np.float64)
    heads, count, side_by_side, _ = pages.scales.shape
    size = pages.values.shape[2]
    values = np.asarray(decode(pages.values), np.float64)
    if head_dim is not None:
        values = values[..., : side_by_side * head_dim]
    values = values.reshape(heads, count, size, side_by_side, -1)
    with np.errstate(invalid="ignore"):
        scaled = values * np.asarray(pages.scales, np.float64)[..., :size].swapaxes(2, 3)[..., None]
    return scaled.transpose(0, 3, 1, 2, 4).reshape(heads * side_by_side, count, size, -1)[:kv_heads]
