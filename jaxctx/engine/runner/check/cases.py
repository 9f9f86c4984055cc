"""Batches that show whether a kernel reads what it should: made on the host from a seed, with numpy alone.

Random numbers alone hide mistakes: over thousands of tokens attention averages them, so that a token too many, or a
wrong page, changes less than rounding does. So every query looks for three tokens: it is the sum of their keys, and
each weighs about as much as all others together.

    the last token that the row sees        a row that sees one too few loses half of its output
    the token behind it                     a row that sees one too many gains it: the next row's, or NaN
    any other token that the row sees       another one for each row and head: reading another page loses it

Of layers with a sliding window half of the query heads look for the first token of the window instead of any other, and
for the one before it, which the row does not see.

Sinks, of models that have them, weigh about as much as one of these tokens, and each query head has another one.

Slots that no row of a batch sees are poisoned. Pages lie in random order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxctx_kernels import QuantizedKV, Segment, kv_values
from jaxctx_kernels.kv_cache import DTYPE_OF_BITS, LARGEST_FLOAT8, LARGEST_INT8

Generator = np.random.Generator
Array = np.ndarray[Any, Any]
TOKENS = 8192  # of all contexts of a case together, so that the longest has items of every class
LEAST_PAGES = 160  # where pages are large
EXACT_ROWS = 8  # of a case that are computed in float64 as well
NEEDLE_SCORE = 11.0  # of the tokens that a query looks for; others' have a mean of 0


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step attends to; pages are of a pool of `pool_pages`."""

    name: str
    segments: tuple[Segment, ...]
    visible: Array  # bool [pool_pages, page_size]: slots that some row sees
    slots: Array  # int32 [rows]: where each row's own key and value go; 0, in the scratch page, for padding
    window: int | None = None  # tokens that a row sees at most; None: all up to itself


@dataclass(frozen=True, slots=True)
class Numbers:
    """Keys and values of a whole pool, float32 `[kv_heads, pages, page_size, head_dim]`: exactly what it stores."""

    k: Array
    v: Array


class Dealer:
    """Deals out the pages and rows of one batch. Pages are in random order; page 0 is scratch."""

    def __init__(self, rng: Generator, rows: int, page_size: int, pool_pages: int) -> None:
        self.rng, self.rows, self.page_size = rng, rows, page_size
        self._free = rng.permutation(np.arange(1, pool_pages, dtype=np.int32))
        self.pages = len(self._free)
        self.segments: list[Segment] = []
        self.next_row = 0

    def take(self, pages: int) -> Array:
        """So many pages, or as many as are left."""
        taken, self._free = self._free[:pages], self._free[pages:]
        return taken

    def add(self, prefix: Array, own_tokens: int, rows: int = 1) -> None:
        """A sequence of whole pages that others have too, and of its own tokens, of which the last `rows` are computed.

        Left out if there are no rows or pages for it.
        """
        own = self.take(-(-own_tokens // self.page_size))
        own_tokens = min(own_tokens, len(own) * self.page_size)
        rows = min(rows, own_tokens, self.rows - self.next_row)
        if rows < 1:
            return
        end = len(prefix) * self.page_size + own_tokens
        self.segments.append(Segment(self.next_row, rows, end - rows, np.concatenate([prefix, own])))
        self.next_row += rows

    def ragged(self, most_pages: int) -> int:
        """Any number of tokens that fit into so many pages."""
        return int(self.rng.integers(1, most_pages * self.page_size, endpoint=True))


def decoding(dealer: Dealer) -> None:
    """Decoding rows of contexts that share nothing; one is long, the others are of any length."""
    count = min(dealer.rows, max(1, dealer.pages // 4))
    dealer.add(dealer.take(0), max(1, dealer.pages // 4 * dealer.page_size - 1))
    for _ in range(count - 1):
        dealer.add(dealer.take(0), dealer.ragged(max(1, dealer.pages // 2 // count)))


def branches(dealer: Dealer) -> None:
    """Decoding rows of a tree: a long root, two branches of it, leaves of each, and a context beside the tree."""
    root = dealer.take(dealer.pages // 4)
    twigs = [np.concatenate([root, dealer.take(max(1, dealer.pages // 16))]) for _ in range(2)]
    dealer.add(dealer.take(0), dealer.ragged(max(1, dealer.pages // 16)))
    for number in range(min(dealer.rows - 1, max(1, dealer.pages // 8))):
        dealer.add((root, *twigs)[number % 3], dealer.ragged(2))


def prompts_and_decoding(dealer: Dealer) -> None:
    """Chunks of prompts: a whole one, one behind a prefix, one far into its context; and decoding rows behind each."""
    size = dealer.page_size
    prefix = dealer.take(max(1, dealer.pages // 8))
    chunk = max(1, dealer.rows // 4)
    dealer.add(dealer.take(0), min(chunk, dealer.pages // 8 * size), chunk)
    dealer.add(prefix, min(chunk + size // 2, dealer.pages // 8 * size), chunk)
    dealer.add(dealer.take(0), dealer.pages // 4 * size - size // 2, chunk)
    for number in range(min(dealer.rows // 8, dealer.pages // 16)):
        dealer.add(prefix if number % 2 else dealer.take(0), dealer.ragged(1))


def page_edges(dealer: Dealer) -> None:
    """Contexts of one token, of a page less one, of exactly a page, of one token more; the rest is padding."""
    size = dealer.page_size
    for tokens in (1, size - 1, size, size + 1, 2 * size):
        dealer.next_row += int(dealer.rng.integers(0, 2)) if dealer.rows - dealer.next_row > 5 else 0
        dealer.add(dealer.take(0), tokens)


KINDS: tuple[Callable[[Dealer], None], ...] = (decoding, branches, prompts_and_decoding, page_edges)


def make_batches(
    rng: Generator, rows: int, page_size: int, pool_pages: int, window: int | None = None
) -> Iterator[Batch]:
    """A batch of each kind for a step of `rows` rows; `window`: how many tokens a row sees at most."""
    of_window = "" if window is None else f", window of {window} tokens"
    for kind in KINDS:
        dealer = Dealer(rng, rows, page_size, pool_pages)
        kind(dealer)
        visible = np.zeros((pool_pages, page_size), np.bool_)
        slots = np.zeros(rows, np.int32)
        for s in dealer.segments:
            tokens = np.arange(s.position + s.rows)
            seen = tokens[first_visible(s.position, window) :]
            visible[s.pages[seen // page_size], seen % page_size] = True
            own = tokens[s.position :]
            slots[s.first_row : s.first_row + s.rows] = s.pages[own // page_size] * page_size + own % page_size
        name = kind.__name__.replace("_", " ") + of_window
        yield Batch(name, tuple(dealer.segments), visible, slots, window)


def first_visible(last: Any, window: int | None) -> Any:
    """The first token that rows see whose last one is `last`, a number or an array."""
    return last * 0 if window is None else np.maximum(last + 1 - window, 0)


def pages_for(page_size: int, pool_pages: int, max_context_tokens: int) -> int:
    """How many pages the pool of a case has: `pool_pages` at most, and so few that no context becomes too long."""
    context_pages = -(-max_context_tokens // page_size)
    enough = 2 * context_pages if context_pages > 5 else context_pages  # the longest takes 5/16 of them, and 2
    return min(max(TOKENS // page_size, LEAST_PAGES), pool_pages, 1 + enough)


def make_queries(rng: Generator, batch: Batch, k: Array, rows: int, heads: int) -> Array:
    """float32 `[rows, heads, head_dim]`, which bfloat16 holds exactly; NaN in rows of padding. `k`: as in `Numbers`."""
    kv_heads, _, page_size, dim = k.shape
    by_slot = k.reshape(kv_heads, -1, dim)
    by_slot = by_slot / np.square(by_slot).mean(2, keepdims=True)  # long keys do not weigh more than short ones
    queries = np.full((rows, heads, dim), np.nan, np.float32)
    head = np.arange(heads) // (heads // kv_heads)
    for s in batch.segments:
        tokens = np.arange(s.position + s.rows)
        slot_of = s.pages[tokens // page_size] * page_size + tokens % page_size
        last = tokens[s.position :, None]
        first = first_visible(last, batch.window)
        needle = rng.integers(first, np.maximum(last, first + 1), (s.rows, heads))
        looked_for = by_slot[head, slot_of[last]]
        if batch.window is not None:
            at_edge = (first > 0) & (first < last) & (np.arange(heads) % 2 == 0)
            needle = np.where(at_edge, first, needle)
            looked_for += np.where(at_edge[..., None], by_slot[head, slot_of[first - 1]], 0)
        looked_for += np.where(
            last[..., None] > first[..., None], by_slot[head, slot_of[needle]], 0
        )  # no other before the first
        looked_for[:-1] += by_slot[head, slot_of[last[1:]]]  # there is none behind the sequence's last
        queries[s.first_row : s.first_row + s.rows] = looked_for * (NEEDLE_SCORE / dim**0.5)
    rounded: Array = queries.astype(jnp.bfloat16).astype(np.float32)
    return rounded


def make_sinks(rng: Generator, heads: int, soft_cap: float | None) -> Array:
    """float32 `[heads]`: sinks among the scores of tokens that a query looks for, with a soft cap if there is one."""
    score = NEEDLE_SCORE if soft_cap is None else soft_cap * np.tanh(NEEDLE_SCORE / soft_cap)
    sinks: Array = (score + rng.standard_normal(heads)).astype(np.float32)
    return sinks


def exact_rows(rng: Generator, batch: Batch) -> Array:
    """Rows to compute in float64: the last ones of sequences, and others."""
    if not batch.segments:
        return np.zeros(0, np.int64)
    ends = [s.first_row + s.rows - 1 for s in batch.segments]
    others = np.concatenate([np.arange(s.first_row, s.first_row + s.rows) for s in batch.segments])
    chosen = [*rng.permutation(ends)[: EXACT_ROWS // 2], *rng.permutation(others)[: EXACT_ROWS // 2]]
    return np.unique(np.array(chosen, np.int64))


def exact_attention(
    queries: Array,
    numbers: Numbers,
    batch: Batch,
    rows: Array,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Attention in float64, row by row: `[len(rows), heads, head_dim]`.

    `soft_cap`: see `KVSpec`. `sinks`: of each query head, or None.
    """
    heads, dim = queries.shape[1:]
    kv_heads, _, page_size, _ = numbers.k.shape
    group = heads // kv_heads
    out = np.zeros((len(rows), heads, dim))
    for s in batch.segments:
        for number in np.flatnonzero((rows >= s.first_row) & (rows < s.first_row + s.rows)):
            last = s.position + rows[number] - s.first_row
            token = np.arange(first_visible(last, batch.window), last + 1)
            page, offset = s.pages[token // page_size], token % page_size
            for head in range(kv_heads):
                own = slice(head * group, (head + 1) * group)
                keys = numbers.k[head, page, offset].astype(np.float64)
                score = queries[rows[number], own].astype(np.float64) @ keys.T * dim**-0.5
                if soft_cap is not None:
                    score = soft_cap * np.tanh(score / soft_cap)
                if sinks is not None:  # a last column, without a value
                    score = np.concatenate([score, sinks[own, None]], 1)
                weight = np.exp(score - score.max(1, keepdims=True))
                weight /= weight.sum(1, keepdims=True)
                out[number, own] = weight[:, : len(token)] @ numbers.v[head, page, offset]
    return out


def stored_pages(numbers: Array, struct: Any) -> tuple[Any, Array]:
    """Pages that hold `numbers` as `struct` (of `kv_pages_struct`) says, in numpy; and the numbers that they stand for.

    `numbers`: float32 `[kv_heads, pages, page_size, head_dim]`. Written anew here, as what it is compared with is what
    wrote the pages on the device.
    """
    stored = kv_values(struct).dtype
    dtype = DTYPE_OF_BITS.get(stored, stored)
    stored_heads, _, _, lanes = kv_values(struct).shape
    if not isinstance(struct, QuantizedKV):
        values = numbers.astype(dtype)
        return _in_rows(values, stored_heads, lanes).view(stored), values.astype(np.float32)
    largest = LARGEST_INT8 if dtype == jnp.int8 else LARGEST_FLOAT8
    scales = np.abs(numbers).max(-1) / np.float32(largest)
    scaled = numbers / np.where(scales == 0, 1, scales)[..., None]
    values = (np.rint(scaled) if dtype == jnp.int8 else scaled).astype(dtype)
    beside = _side_by_side(scales, stored_heads).transpose(0, 2, 1, 3)
    spare = struct.scales.shape[3] - beside.shape[3]  # lanes that a TPU has and nobody reads
    beside = np.pad(beside, ((0, 0), (0, 0), (0, 0), (0, spare)))
    pages = QuantizedKV(_in_rows(values, stored_heads, lanes).view(stored), beside)  # type: ignore[arg-type]
    return pages, values.astype(np.float32) * scales[..., None]


def _in_rows(values: Array, stored_heads: int, lanes: int) -> Array:
    """`[kv_heads, pages, page_size, head_dim]` → `[stored_heads, pages, page_size, lanes]`, with zeros to spare."""
    heads = _side_by_side(values, stored_heads).transpose(0, 2, 3, 1, 4)
    rows = heads.reshape(*heads.shape[:3], -1)
    return np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, lanes - rows.shape[3])))


def _side_by_side(values: Array, stored_heads: int) -> Array:
    """`[kv_heads, …]` → `[stored_heads, heads of a row, …]`, with zeros for heads that there is only room for."""
    of_row = 1 << (-(-len(values) // stored_heads) - 1).bit_length()  # a power of two
    room = stored_heads * of_row
    padded = np.pad(values, ((0, room - len(values)), *((0, 0),) * (values.ndim - 1)))
    return padded.reshape(stored_heads, -1, *values.shape[1:])
