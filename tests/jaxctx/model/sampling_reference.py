"""A plain reference of sampling: numpy that sorts, in float64, one row at a time; and rows to compare with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.model.sampling import (
    Sampled,
    SlotState,
    allowed_words,
    load_allowed,
    load_slot,
    sample,
    slot_state,
    slot_words,
)
from jaxctx.model.sampling_options import SamplingBatch, row_words
from jaxctx.model.token_sampling import CANDIDATES

VOCAB, ROWS, SLOTS = 300, 8, 8  # one shape for nearly all tests: one compilation


@jax.jit
def step(logits: jax.Array, words: jax.Array, slots: jax.Array, state: SlotState) -> tuple[Sampled, SlotState]:
    """`sample` of rows that were packed by `row_words`."""
    return sample(logits, SamplingBatch(words), slots, state)


load = jax.jit(load_slot)
load_masks = jax.jit(load_allowed)


@dataclass
class Row:
    """One row, and everything that its token depends on."""

    logits: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)
    allowed: list[int] | None = None  # None: all


def padded(ids: list[int], size: int) -> np.ndarray:
    """The ids and -1 up to this size."""
    return np.array(ids + [-1] * (size - len(ids)), np.int32)


def load_row(state: SlotState, slot: int, row: Row) -> SlotState:
    """The state with what the row's token depends on in this slot."""
    prompt, output = np.array(row.prompt, np.int32), np.array(row.output, np.int32)
    state = load(state, slot_words(slot, VOCAB, prompt, output, row.bias, row.stops))
    if row.allowed is None:
        return state
    return load_masks(state, np.concatenate([[slot], allowed_bits(row.allowed)]).astype(np.int32)[None])


def allowed_bits(tokens: list[int]) -> np.ndarray:
    """The mask of these tokens, int32 `[words]`."""
    bits = np.zeros(32 * allowed_words(VOCAB), np.bool_)
    bits[tokens] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def run(rows: list[Row], slots: list[int] | None = None) -> tuple[Sampled, SlotState]:
    """Rows in the given slots, the rest of the batch padding."""
    slots = list(range(len(rows))) if slots is None else slots
    state = slot_state(SLOTS, VOCAB)
    logits, words = np.full((ROWS, VOCAB), np.nan, np.float32), np.stack([row_words()] * ROWS)
    for i, row in enumerate(rows):
        state = load_row(state, slots[i], row)
        constrained = row.allowed is not None
        logits[i], words[i] = row.logits, row_words(biased=bool(row.bias), constrained=constrained, **row.options)
    return step(logits, words, padded(slots, ROWS) % (SLOTS + 1), state)


def gumbel_noise(seed: int, position: int, vocab: int = VOCAB) -> np.ndarray:
    """Float64 Gumbel noise from the documented bits."""
    words = jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    low, high = np.asarray(jax.random.key_data(key), np.uint32)

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> 16)) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> 15)) * np.uint32(0x846CA68B)
        return h ^ (h >> 16)

    bits = mix(mix(np.arange(vocab, dtype=np.uint32) ^ low) + high)
    return -np.log(-np.log1p(-np.minimum((bits + 0.5) / 2**32, 1 - 2**-24)))


def kept_tokens(x: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> np.ndarray:
    """Ids that truncation keeps, best first."""
    order = np.lexsort((np.arange(len(x)), -x))
    if top_k:
        order = order[:top_k]
    weight = np.exp((x[order] - x[order[0]]) / temperature)
    before = np.cumsum(weight) - weight
    keep = ((before < top_p * weight.sum()) | (top_p >= 1)) & (weight >= min_p)
    keep[0] = True
    return order[keep]


def adjusted(row: Row) -> np.ndarray:
    """The row's logits after its mask, bias, min_tokens and penalties."""
    options, x = row.options, row.logits.astype(np.float64).copy()
    if row.allowed is not None:
        x[np.setdiff1d(np.arange(VOCAB), row.allowed)] = -np.inf
    for token, value in row.bias.items():
        x[token] += value
    if options.get("suppress"):
        x[row.stops] = -np.inf
    counts = np.bincount(row.output, minlength=VOCAB)
    for token in set(row.prompt) | set(row.output):
        r = options.get("repetition_penalty", 1)
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    return x - options.get("frequency_penalty", 0) * counts - options.get("presence_penalty", 0) * (counts > 0)


def expected(row: Row) -> int:
    """The token that the row must get."""
    options, x = row.options, adjusted(row)
    temperature = options.get("temperature", 0)
    if temperature == 0:
        return int(x.argmax())
    truncation = {name: options[name] for name in ("top_k", "top_p", "min_p") if name in options}
    kept = kept_tokens(x, temperature=temperature, **truncation)
    score = x[kept] / temperature + gumbel_noise(options["seed"], options["position"])[kept]
    return int(kept[score.argmax()])


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """Logits of one row, flat or steep, `[VOCAB]`."""
    return (rng.normal(size=VOCAB) * rng.choice([0.1, 1, 4])).astype(np.float32)


def random_row(rng: np.random.Generator, **options: Any) -> Row:
    """A row with random logits, seed and position, and these options."""
    base = {"seed": int(rng.integers(2**63)), "position": int(rng.integers(100_000))}
    return Row(random_logits(rng), base | options)


def tokens_drawn(logits: np.ndarray, count: int, **options: Any) -> np.ndarray:
    """So many tokens of one seed and successive positions, all with these logits and options."""
    draws = []
    for start in range(0, count, ROWS):
        words = np.stack([row_words(seed=99, position=start + i, **options) for i in range(ROWS)])
        draws.append(step(np.tile(logits, (ROWS, 1)), words, np.full(ROWS, SLOTS), slot_state(SLOTS, VOCAB))[0].tokens)
    return np.concatenate(draws)


# Each option alone, and some together: what is decided by the candidates, and what is not.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 50.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": CANDIDATES},
    {"temperature": 1.0, "top_k": CANDIDATES + 1},
    {"temperature": 1.0, "top_k": 2**31 + 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 200, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 200, "min_p": 0.01},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]
