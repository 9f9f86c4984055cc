"""Sampling against a straightforward numpy oracle that sorts, in float64, one row at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxctx
from jaxctx.model.sampling import (
    ROW_WORDS,
    Sampled,
    SlotState,
    load_slot,
    row_words,
    sample,
    slot_state,
    slot_words,
    unpack_rows,
)
from jaxctx.model.token_sampling import CANDIDATES

VOCAB, ROWS, SLOTS = 300, 8, 8  # one shape for nearly all tests: one compilation


@jax.jit
def step(logits: jax.Array, words: jax.Array, slots: jax.Array, state: SlotState) -> tuple[Sampled, SlotState]:
    return sample(logits, unpack_rows(words), slots, state)


load = jax.jit(load_slot)


@dataclass
class Row:
    """One row and all the oracle must know of it."""

    logits: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    stops: list[int] = field(default_factory=list)


def padded(ids: list[int], size: int) -> np.ndarray:
    return np.array(ids + [-1] * (size - len(ids)), np.int32)


def load_row(state: SlotState, slot: int, row: Row) -> SlotState:
    prompt, output = np.array(row.prompt, np.int32), np.array(row.output, np.int32)
    return load(state, slot_words(slot, VOCAB, prompt, output, row.bias, row.stops))


def run(rows: list[Row], slots: list[int] | None = None) -> tuple[Sampled, SlotState]:
    """Rows in the given slots, the rest of the batch padding."""
    places = list(range(len(rows))) if slots is None else slots
    state = slot_state(SLOTS, VOCAB)
    logits, words = np.full((ROWS, VOCAB), np.nan, np.float32), np.stack([row_words()] * ROWS)
    for i, row in enumerate(rows):
        state = load_row(state, places[i], row)
        logits[i], words[i] = row.logits, row_words(biased=bool(row.bias), **row.options)
    return step(logits, words, padded(places, ROWS) % (SLOTS + 1), state)


def noise(seed: int, position: int, vocab: int = VOCAB) -> np.ndarray:
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
    options, x = row.options, row.logits.astype(np.float64).copy()
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
    options, x = row.options, adjusted(row)
    temperature = options.get("temperature", 0)
    if temperature == 0:
        return int(x.argmax())
    truncation = {name: options[name] for name in ("top_k", "top_p", "min_p") if name in options}
    kept = kept_tokens(x, temperature=temperature, **truncation)
    score = x[kept] / temperature + noise(options["seed"], options["position"])[kept]
    return int(kept[score.argmax()])


def random_logits(rng: np.random.Generator) -> np.ndarray:
    return (rng.normal(size=VOCAB) * rng.choice([0.1, 1, 4])).astype(np.float32)


def random_row(rng: np.random.Generator, **options: Any) -> Row:
    base = {"seed": int(rng.integers(2**63)), "position": int(rng.integers(100_000))}
    return Row(random_logits(rng), base | options)


SINGLE: list[dict[str, Any]] = [
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


@pytest.mark.parametrize("options", SINGLE, ids=str)
def test_each_option_equals_the_oracle(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(3):
        rows = [random_row(rng, **options) for _ in range(ROWS)]
        assert run(rows)[0].tokens.tolist() == [expected(row) for row in rows]


def test_random_combinations_equal_the_oracle() -> None:
    rng = np.random.default_rng(11)
    for _ in range(40):
        rows = []
        for _ in range(ROWS):
            row = random_row(
                rng,
                temperature=float(rng.choice([0, 0.3, 1.0, 2.5])),
                top_k=int(rng.choice([0, 0, 1, 7, 63, 65, 250, 1000])),
                top_p=float(rng.choice([1, 1, 0.99, 0.7, 0.1])),
                min_p=float(rng.choice([0, 0, 0.03, 0.5])),
                repetition_penalty=float(rng.choice([1, 0.7, 1.3])),
                presence_penalty=float(rng.choice([0, -1.5, 1.5])),
                frequency_penalty=float(rng.choice([0, -0.5, 0.5])),
                suppress=bool(rng.random() < 0.3),
            )
            best = np.argsort(-row.logits)[:20]
            row.prompt = rng.choice(best, 10).tolist()
            row.output = rng.choice(best, 10).tolist()
            row.stops = rng.choice(best, 3).tolist()
            row.bias = {int(t): float(rng.choice([-100, -2, 2, 5])) for t in rng.choice(VOCAB, 5, replace=False)}
            rows.append(row)
        assert run(rows)[0].tokens.tolist() == [expected(row) for row in rows]


def test_a_row_depends_on_nothing_but_itself() -> None:
    """Alone, in any place and slot, and among neighbours that force every slow path or are broken."""
    rng = np.random.default_rng(5)
    mine = [random_row(rng, temperature=1.0, top_p=p) for p in (1.0, 0.9, 0.5)]
    alone = [int(run([row])[0].tokens[0]) for row in mine]
    flat = Row(np.zeros(VOCAB, np.float32), {"temperature": 1.0, "top_p": 0.99, "logprobs": True})
    broken = [
        Row(np.full(VOCAB, bad, np.float32), {"temperature": 1.0, "top_p": 0.9}) for bad in (np.nan, np.inf, -np.inf)
    ]
    busy = random_row(rng, repetition_penalty=2.0, presence_penalty=2.0)
    for order in range(6):
        batch = [flat, *broken, busy, *mine]
        places = rng.permutation(len(batch))
        tokens = np.asarray(run([batch[i] for i in places], rng.permutation(SLOTS).tolist())[0].tokens)
        where = {int(source): place for place, source in enumerate(places)}
        assert [int(tokens[where[5 + i]]) for i in range(3)] == alone, order
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_candidates_and_bisection_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows with so few candidates that hardly any row is settled by them."""
    rng = np.random.default_rng(6)
    batches = []
    for options in SINGLE:
        rows = [random_row(rng, **options) for _ in range(ROWS)]
        batches.append((np.stack([r.logits for r in rows]), np.stack([row_words(**r.options) for r in rows])))
    slots, state = np.arange(ROWS), slot_state(SLOTS, VOCAB)
    usual = [step(*batch, slots, state)[0].tokens.tolist() for batch in batches]
    monkeypatch.setattr("jaxctx.model.token_sampling.CANDIDATES", 1)
    slow = jax.jit(lambda logits, words: sample(logits, unpack_rows(words), slots, state)[0].tokens)
    assert [slow(*batch).tolist() for batch in batches] == usual


def tokens_drawn(logits: np.ndarray, count: int, **options: Any) -> np.ndarray:
    draws = []
    for start in range(0, count, ROWS):
        words = np.stack([row_words(seed=99, position=start + i, **options) for i in range(ROWS)])
        draws.append(step(np.tile(logits, (ROWS, 1)), words, np.full(ROWS, SLOTS), slot_state(SLOTS, VOCAB))[0].tokens)
    return np.concatenate(draws)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 10}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 100, "top_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    x = random_logits(np.random.default_rng(1)).astype(np.float64) * 0.4
    kept = kept_tokens(x, temperature=0.8, **options)
    drawn = tokens_drawn(x.astype(np.float32), 4000, temperature=0.8, **options)
    assert set(drawn.tolist()) <= set(kept.tolist())
    p = np.exp(x[kept] / 0.8)
    p /= p.sum()
    groups = np.array_split(np.arange(len(kept)), min(len(kept), 20))  # enough expected in each
    observed = np.bincount(drawn, minlength=VOCAB)[kept]
    test = stats.chisquare([observed[g].sum() for g in groups], [p[g].sum() * len(drawn) for g in groups])
    assert test.pvalue > 1e-3


def test_seed_and_position_change_the_draw_and_repeat_it() -> None:
    logits = np.zeros(VOCAB, np.float32)
    variants = [(1, 0), (2, 0), (1 << 40, 0), (1, 1), (1, 2), (1, 0)]
    rows = [Row(logits, {"temperature": 1.0, "seed": s, "position": p}) for s, p in variants]
    tokens = run(rows)[0].tokens.tolist()[: len(rows)]
    assert tokens[0] == tokens[5]
    assert len(set(tokens)) == 5


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-6])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 5.0])
def test_tiny_top_p_keeps_exactly_the_best(top_p: float, scale: float) -> None:
    logits = (np.random.default_rng(0).normal(size=VOCAB) * scale).astype(np.float32)
    rows = [Row(logits, {"temperature": 1.0, "top_p": top_p, "seed": i}) for i in range(ROWS)]
    assert set(run(rows)[0].tokens.tolist()) == {int(logits.argmax())}


def test_ties_are_cut_by_lowest_id() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[::2] = 3.0  # 150 tied for best
    assert run([Row(logits)])[0].tokens[0] == 0
    for options, reach in (({"top_k": 5}, 10), ({"top_k": 100}, 200), ({"top_p": 0.5}, 160)):
        drawn = tokens_drawn(logits, 400, temperature=1.0, **options)
        assert (drawn % 2 == 0).all()
        # 150 tied tokens weigh 150, the other 150 weigh 7.5: half of that is the first 79.
        assert drawn.max() < reach
        assert drawn.max() > reach * 0.9 - 3


def test_padding_rows_leave_the_state_alone() -> None:
    state = load_row(slot_state(SLOTS, VOCAB), 3, Row(np.zeros(VOCAB), {}, [1, 2], [3, 3], {4: 1.5}, [5]))
    words = np.stack([row_words(temperature=1.0)] * ROWS)
    _, after = step(np.zeros((ROWS, VOCAB), np.float32), words, np.full(ROWS, SLOTS), state)
    for before, now in zip(state, after, strict=True):
        np.testing.assert_array_equal(before, now)


def test_sampled_tokens_are_counted_in_their_slot() -> None:
    logits = np.eye(ROWS, VOCAB, dtype=np.float32)
    sampled, state = run([Row(logits[i]) for i in range(ROWS)], list(reversed(range(SLOTS))))
    assert sampled.tokens.tolist() == list(range(ROWS))
    for slot in range(SLOTS):
        assert np.flatnonzero(state.counts[slot]).tolist() == [SLOTS - 1 - slot]


def test_logit_bias_comes_before_penalties_and_the_contract_says_so() -> None:
    """A repetition penalty divides what a bias has made of a logit, as in vLLM: 1 + 4 halved is below 3, half of 1 and
    4 is not.
    """
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 5]] = 1, 3
    row = Row(logits, {"repetition_penalty": 2.0}, prompt=[3], bias={3: 4.0})
    assert run([row])[0].tokens[0] == 5
    contract = (Path(jaxctx.__file__).parents[1] / "protos/jaxctx/v1/generation.proto").read_text()
    order = re.search(r"Order: (.*?)\.\s", re.sub(r"\n// ", " ", contract))
    assert order is not None
    assert re.sub(r" \(.*?\)", "", order[1]).split(", ") == [
        "logit_bias", "min_tokens", "penalties", "temperature", "top_k", "top_p", "min_p",
    ]  # fmt: skip


def test_greedy_penalties_use_what_was_just_sampled() -> None:
    logits = np.linspace(0, 3, VOCAB, dtype=np.float32)
    words, slots = (
        np.stack([row_words(frequency_penalty=1.0)] + [row_words()] * (ROWS - 1)),
        padded([0], ROWS) % (SLOTS + 1),
    )
    state, tokens = slot_state(SLOTS, VOCAB), []
    for _ in range(4):
        sampled, state = step(np.tile(logits, (ROWS, 1)), words, slots, state)
        tokens.append(int(sampled.tokens[0]))
    assert tokens == [VOCAB - 1, VOCAB - 2, VOCAB - 3, VOCAB - 4]


def test_load_slot_fills_and_resets_only_its_slot() -> None:
    row = Row(np.zeros(VOCAB), {}, [1, 2, 2], [7, 7, 9], {4: 1.5, 0: -2.0}, [5, 299, VOCAB])
    state = load_row(load_row(slot_state(SLOTS, VOCAB), 1, row), 2, row)
    fresh = load_row(state, 1, Row(np.zeros(VOCAB), {}, [8]))
    assert np.flatnonzero(fresh.seen[1]).tolist() == [8]
    assert not np.any(fresh.counts[1])
    assert not np.any(fresh.bias[1])
    assert not np.any(fresh.stop_mask[1])
    assert np.flatnonzero(fresh.seen[2]).tolist() == [1, 2]
    assert {int(t): int(fresh.counts[2, t]) for t in np.flatnonzero(fresh.counts[2])} == {7: 2, 9: 1}
    assert {int(t): float(fresh.bias[2, t]) for t in np.flatnonzero(fresh.bias[2])} == {0: -2.0, 4: 1.5}
    assert np.flatnonzero(fresh.stop_mask[2]).tolist() == [5, 299]


def test_stale_slots_do_not_reach_rows_without_options() -> None:
    stale = Row(np.zeros(VOCAB), {}, [1, 2, 3], [4, 4], {5: 50.0}, [6])
    logits = random_logits(np.random.default_rng(8))
    state = load_row(slot_state(SLOTS, VOCAB), 0, stale)
    busy = row_words(presence_penalty=1.0, suppress=True, biased=True)  # in slot 1; takes the batch down the slow path
    words = np.stack([row_words(), busy] + [row_words()] * (ROWS - 2))
    slots = padded([0, 1], ROWS) % (SLOTS + 1)
    assert step(np.tile(logits, (ROWS, 1)), words, slots, state)[0].tokens[0] == logits.argmax()


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    rng = np.random.default_rng(4)
    row = random_row(rng, temperature=0.5, top_k=3, logprobs=True, repetition_penalty=1.5)
    row.prompt, row.bias = [1, 2, 3], {7: 30.0}
    sampled, _ = run([row])
    x = row.logits.astype(np.float64)
    logprobs = x - np.log(np.exp(x).sum())
    assert sampled.tokens[0] == 7
    np.testing.assert_allclose(sampled.logprobs[0], logprobs[7], rtol=1e-5)
    order = np.lexsort((np.arange(VOCAB), -x))[:20]
    assert sampled.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(sampled.top_logprobs[0], logprobs[order], rtol=1e-5)


def test_no_logprobs_asked_means_zeros() -> None:
    sampled, _ = run([random_row(np.random.default_rng(0))])
    assert not np.any(sampled.logprobs)
    assert not np.any(sampled.top_logprobs)


def test_vocabulary_smaller_than_the_candidates() -> None:
    logits = jnp.array([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    words = np.stack([row_words(temperature=1.0, top_p=0.5, logprobs=True), row_words(temperature=1.0, top_k=100)])
    sampled, _ = sample(logits, unpack_rows(jnp.asarray(words)), jnp.array([0, 1]), slot_state(2, 3))
    assert sampled.tokens[0] == 1
    assert 0 <= sampled.tokens[1] < 3
    assert sampled.top_ids[0, :3].tolist() == [1, 2, 0]
    assert (sampled.top_logprobs[0, 3:] == -np.inf).all()


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[17, 100, 250]] = [1.0, 2.0, 1.5]
    for options in ({}, {"top_k": 10}, {"top_k": 100}, {"top_p": 0.9999}, {"min_p": 1e-9}):
        drawn = tokens_drawn(logits, 200, temperature=3.0, **options)
        assert set(drawn.tolist()) == {17, 100, 250}, options


def test_packed_rows_unpack_to_what_was_packed() -> None:
    options = {
        "temperature": 0.7,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "position": 77,
        "suppress": True,
        "biased": False,
        "logprobs": True,
    }
    words = row_words(seed=0xDEADBEEF_00C0FFEE, **options)
    assert words.shape == (ROW_WORDS,)
    assert words.dtype == np.int32
    batch = unpack_rows(jnp.asarray(words[None]))
    for name, value in options.items():
        np.testing.assert_allclose(getattr(batch, name)[0], value, rtol=1e-6)
    assert batch.seed[0].tolist() == [0x00C0FFEE, 0xDEADBEEF]


def test_stop_ids_and_biases_that_are_no_tokens_are_left_out() -> None:
    prompt, output = np.array([3, 5], np.int32), np.array([5, 5], np.int32)
    want = slot_words(1, VOCAB, prompt, output, {2: 0.5}, (4,))
    got = slot_words(1, VOCAB, prompt, output, {2: 0.5, -1: 9.0, VOCAB: 9.0}, (4, -1, VOCAB))
    np.testing.assert_array_equal(got, want)
    assert (want[1 + 5], want[1 + 4], want[1 + 3]) == (2 << 2 | 2, 1, 2)
