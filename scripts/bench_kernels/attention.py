"""Batches for `jaxctx_kernels.attend`, and three ways through them.

shared      as the engine does it: pages that rows share are read once for all of them
unshared    the same kernel and pages, by metadata with which they are read for each row
plain       what one writes without metadata: gather each sequence's pages, attend to them, sequence by sequence

A call goes through several layers, each with its own pages, so that no cache holds what a layer reads, and so that what
is computed once a step is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.runner.check.device_timing import Work
from jaxctx_kernels import (
    MetadataShape,
    Segment,
    attend,
    build_attention_metadata,
    kv_pages_struct,
    metadata_shape,
    select_kernel,
    unpack_metadata,
    write_kv,
)
from jaxctx_kernels.metadata import Item

UNSHARED, PLAIN = "unshared", "plain"
WRITTEN_AT_ONCE = 1 << 14  # rows
NEVER = 1 << 30  # tokens that sharing would have to save
Pools = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values of each layer
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's attention: its heads and pages, in bfloat16; and over how many such layers a call goes."""

    kv_heads: int
    group: int  # query heads a KV head
    dim: int = 128
    page_size: int = 16
    layers: int = 2

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values."""
        return 2 * self.kv_heads * self.dim * 2

    @property
    def pair_flops(self) -> int:
        """Of a row that sees a token: its part of two products."""
        return 4 * self.kv_heads * self.group * self.dim


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step attends to: segments whose pages are of one pool."""

    name: str
    segments: Sequence[Segment]

    @property
    def rows(self) -> int:
        """Rows of the step, padded as the engine pads them."""
        return max(4, 1 << (max(s.first_row + s.rows for s in self.segments) - 1).bit_length())

    @property
    def longest(self) -> int:
        """Tokens of its longest context."""
        return max(s.position + s.rows for s in self.segments)

    @property
    def pairs(self) -> int:
        """Tokens seen, of all rows together."""
        return sum(s.rows * (2 * s.position + s.rows + 1) // 2 for s in self.segments)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the attention metadata of a batch came to."""

    kernel: str
    items: int
    pages_read: int
    pages_seen: int  # of all segments together
    metadata_us: float  # that the host took to build it, the quickest of several


class Dealer:
    """Pages of a pool, dealt out in order; page 0 is scratch."""

    def __init__(self, page_size: int) -> None:
        self._page_size, self._next = page_size, 1

    def pages(self, tokens: int) -> np.ndarray:
        """For so many tokens."""
        first = self._next
        self._next += -(-tokens // self._page_size)
        return np.arange(first, self._next, dtype=np.int32)

    def streams(self, count: int, tokens: int, first_row: int = 0) -> list[Segment]:
        """A decoding row each, and nothing in common."""
        return [Segment(first_row + i, 1, tokens - 1, self.pages(tokens)) for i in range(count)]

    def branches(self, count: int, prefix: int, own: int, first_row: int = 0) -> list[Segment]:
        """A decoding row each, after a prefix of whole pages that is everybody's."""
        shared = self.pages(prefix)
        tables = [np.concatenate([shared, self.pages(own)]) for _ in range(count)]
        return [Segment(first_row + i, 1, prefix + own - 1, table) for i, table in enumerate(tables)]

    def chunk(self, rows: int, position: int) -> list[Segment]:
        """Of a prompt."""
        return [Segment(0, rows, position, self.pages(position + rows))]


def batches(page_size: int, scale: int = 1) -> Iterator[Batch]:
    """All of them, each with the pool to itself; `scale` divides their lengths, which are multiples of 16 then."""

    def length(tokens: int) -> int:
        return max(page_size, tokens // scale)

    yield Batch("1 stream, 2k", Dealer(page_size).streams(1, length(2112)))
    yield Batch("16 streams, 192", Dealer(page_size).streams(16, length(192)))
    yield Batch("16 streams, 2k", Dealer(page_size).streams(16, length(2112)))
    yield Batch("32 streams, 4k", Dealer(page_size).streams(32, length(4096)))
    yield Batch("16 branches off 2k", Dealer(page_size).branches(16, length(2048), length(64)))
    yield Batch("64 branches off 8k", Dealer(page_size).branches(64, length(8192), length(64)))
    yield Batch("512 rows of a prompt at 0", Dealer(page_size).chunk(length(512), 0))
    yield Batch("512 rows of a prompt at 4k", Dealer(page_size).chunk(length(512), length(4096)))
    yield Batch("128 rows of a prompt at 2k", Dealer(page_size).chunk(length(128), length(2048)))
    dealer, rows = Dealer(page_size), length(448)
    mixed = dealer.chunk(rows, length(1024)) + dealer.streams(32, length(2048), rows)
    mixed += dealer.branches(32, length(8192), length(64), rows + 32)
    yield Batch("mixed: 448 rows, 32 of 2k, 32 off 8k", mixed)


def scattered(batch: Batch, pool_pages: int) -> Batch:
    """The same with its pages in random order."""
    order = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(pool_pages - 1)]).astype(np.int32)
    return replace(batch, segments=[replace(s, pages=order[s.pages]) for s in batch.segments])


def random_pools(layer: Layer, pages: int) -> Pools:
    """Full of random numbers, a piece at a time: they pass through other types and layouts on their way."""
    write = jax.jit(write_kv, donate_argnums=0)
    arrays = []
    for number in range(2 * layer.layers):
        sizes = layer.kv_heads, pages, layer.page_size, layer.dim
        pool = jax.tree.map(jnp.zeros_like, kv_pages_struct(*sizes, "bfloat16", jax.default_backend()))
        shape = (min(WRITTEN_AT_ONCE, pages * layer.page_size), layer.kv_heads, layer.dim)
        values = jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)
        for start in range(0, pages * layer.page_size, len(values)):
            slots = np.arange(start, start + len(values)) % (pages * layer.page_size)
            pool = write(pool, values, jnp.asarray(slots, jnp.int32))
        arrays.append(pool)
    return tuple(zip(arrays[::2], arrays[1::2], strict=True))


@partial(jax.jit, static_argnames="shape")
def attend_layers(q: jax.Array, pools: Pools, packed: jax.Array, *, shape: MetadataShape) -> jax.Array:
    """Layer after layer, as in a step: what one returns is the next one's query."""
    metadata = unpack_metadata(shape, packed)
    for k, v in pools:
        q = attend(q, k, v, metadata, shape=shape).astype(q.dtype)
    return q


@partial(jax.jit, static_argnames="kv_heads")
def plain(q: jax.Array, pools: Pools, tables: jax.Array, positions: jax.Array, *, kv_heads: int) -> jax.Array:
    """q `[sequences, rows, heads, dim]`, tables `[sequences, pages]`, positions `[sequences, rows]`."""
    *_, heads, dim = q.shape

    def gathered(pool: jax.Array, table: jax.Array) -> jax.Array:
        pages = jax.lax.bitcast_convert_type(pool[:, table], jnp.bfloat16)  # a CPU keeps bits
        return pages.reshape(kv_heads, -1, dim)

    for keys, values in pools:

        def sequence(
            a: tuple[jax.Array, jax.Array, jax.Array], keys: jax.Array = keys, values: jax.Array = values
        ) -> jax.Array:
            q, table, position = a
            k, v = gathered(keys, table), gathered(values, table)
            q = q.reshape(len(q), kv_heads, -1, dim).transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)
            score = jnp.einsum("hmd,hsd->hms", q, k, preferred_element_type=jnp.float32) * dim**-0.5
            sees = jnp.arange(k.shape[1]) <= jnp.repeat(position, heads // kv_heads)[:, None]
            weight = jax.nn.softmax(jnp.where(sees, score, -jnp.inf)).astype(jnp.bfloat16)
            out = jnp.einsum("hms,hsd->hmd", weight, v, preferred_element_type=jnp.float32)
            return out.reshape(kv_heads, len(position), -1, dim).transpose(1, 0, 2, 3).reshape(-1, heads, dim)

        q = jax.lax.map(sequence, (q, tables, positions)).astype(q.dtype)
    return q


def plain_arguments(q: np.ndarray, segments: Sequence[Segment], page_size: int) -> list[np.ndarray]:
    """Of `plain`: sequences padded to the longest page table and the most rows."""
    rows = max(s.rows for s in segments)
    length = max(-(-(s.position + s.rows) // page_size) for s in segments)
    queries = np.zeros((len(segments), rows, *q.shape[1:]), q.dtype)
    tables = np.zeros((len(segments), length), np.int32)
    positions = np.zeros((len(segments), rows), np.int32)
    for i, s in enumerate(segments):
        queries[i, : s.rows] = q[s.first_row : s.first_row + s.rows]
        tables[i, : min(length, len(s.pages))] = s.pages[:length]
        positions[i, : s.rows] = s.position + np.arange(s.rows)
    return [queries, tables, positions]


def sees(segments: Sequence[Segment], page_size: int) -> list[np.ndarray]:
    """The pages of each segment that its rows read."""
    return [s.pages[: -(-(s.position + s.rows) // page_size)] for s in segments]


class Attention:
    """A batch on its way through a layer's pools."""

    def __init__(self, batch: Batch, layer: Layer, pools: Pools, longest: int) -> None:
        """`longest`: tokens of the longest context that metadata has capacity for; equal ones are compiled once."""
        self.batch, self._layer, self._pools = batch, layer, pools
        pages = pools[0][0].shape[1]
        choice = select_kernel(jax.devices()[0], pools[0][0], layer.group)
        kernel, processors = choice.name, choice.processors
        self._shape = metadata_shape(batch.rows, layer.page_size, longest, pages, kernel, processors)
        listed = sum(len(table) for table in sees(batch.segments, layer.page_size))  # without sharing
        most = metadata_shape(batch.rows, layer.page_size, longest, listed, kernel, processors)
        self._unshared = replace(most, pool_pages=pages, share_tokens=NEVER)
        heads = layer.kv_heads * layer.group
        q = jax.random.normal(jax.random.key(1), (batch.rows, heads, layer.dim), jnp.bfloat16)
        self._q = np.asarray(q)

    def works(self, with_plain: bool = True) -> Iterator[tuple[Work, Reading | None]]:
        """What is to be timed, with what its metadata came to. Raises AssertionError if two ways disagree."""
        segments, layer = self.batch.segments, self._layer
        tokens = len(np.unique(np.concatenate(sees(segments, layer.page_size)))) * layer.page_size
        each = partial(
            Work, read_bytes=tokens * layer.token_bytes, flops=self.batch.pairs * layer.pair_flops, parts=layer.layers
        )
        name = self.batch.name
        ours, reading, got = self._by_metadata(self._shape)
        yield each(name, ours), reading
        if reading.pages_seen > reading.pages_read:
            ours, reading, other = self._by_metadata(self._unshared)
            np.testing.assert_allclose(got, other, atol=0.03)
            yield each(f"{name}, {UNSHARED}", ours), reading
        if with_plain:
            yield each(f"{name}, {PLAIN}", self._plain(got)), None

    def _by_metadata(self, shape: MetadataShape) -> tuple[Call, Reading, np.ndarray]:
        packed = np.empty(shape.size(), np.int32)
        spent = []
        for _ in range(5):
            begin = time.perf_counter()
            build_attention_metadata(self.batch.segments, shape, packed)
            spent.append(time.perf_counter() - begin)
        metadata = unpack_metadata(shape, packed)
        items = Item(*metadata.items[:, : metadata.class_ends[-1]])
        pages = int((items.first_entry + -(-items.tokens // self._layer.page_size)).max())  # entries of the page list
        seen = sum(len(table) for table in sees(self.batch.segments, self._layer.page_size))
        q, on_device = jnp.asarray(self._q), jnp.asarray(packed)
        call = partial(attend_layers, q, self._pools, on_device, shape=shape)
        reading = Reading(shape.kernel, len(items.rows), pages, seen, min(spent) * 1e6)
        return call, reading, np.asarray(call(), np.float32)

    def _plain(self, got: np.ndarray) -> Call:
        """Prompt chunks and decoding rows apart, so that one is not padded to the other."""
        kv_heads, calls = self._layer.kv_heads, []
        by_rows: dict[int, list[Segment]] = {}
        for s in self.batch.segments:
            by_rows.setdefault(s.rows, []).append(s)
        for part in by_rows.values():
            q, *rest = (jnp.asarray(a) for a in plain_arguments(self._q, part, self._layer.page_size))
            call = partial(plain, q, self._pools, *rest, kv_heads=kv_heads)
            for s, rows in zip(part, np.asarray(call(), np.float32), strict=True):
                np.testing.assert_allclose(got[s.first_row : s.first_row + s.rows], rows[: s.rows], atol=0.03)
            calls.append(call)
        return lambda: [call() for call in calls]
