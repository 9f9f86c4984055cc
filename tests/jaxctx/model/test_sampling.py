"""Sampling against a plain reference: every option, and how rows and slots stay apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxctx
from jaxctx.model.sampling import MAX_GATHERED_ROWS, sample, slot_state, slot_words
from jaxctx.model.sampling_options import SamplingBatch, row_words
from tests.jaxctx.model.sampling_reference import (
    OPTIONS,
    ROWS,
    SLOTS,
    VOCAB,
    Row,
    expected,
    load_row,
    padded,
    random_logits,
    random_row,
    run,
    step,
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_equals_the_reference(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for _ in range(3):
        rows = [random_row(rng, **options) for _ in range(ROWS)]
        assert run(rows)[0].tokens.tolist() == [expected(row) for row in rows]


def test_random_combinations_equal_the_reference() -> None:
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_only_allowed_tokens_are_sampled_and_as_by_the_reference(options: dict[str, Any]) -> None:
    """One, a few, or nearly all tokens; also the last one of the vocabulary, and with everything else that adjusts."""
    rng = np.random.default_rng(8)
    rows = []
    for allowed in ([VOCAB - 1], [0, 31, 32], rng.permutation(VOCAB)[:100].tolist(), list(range(1, VOCAB))):
        row = random_row(rng, repetition_penalty=1.5, frequency_penalty=0.5, **options)
        row.prompt, row.output = [0, 31], [VOCAB - 1, 32]
        row.bias = {int(np.argmax(row.logits)): 100.0}
        row.allowed = allowed
        rows.append(row)
    tokens = run(rows)[0].tokens[: len(rows)].tolist()
    assert tokens == [expected(row) for row in rows]
    assert all(token in (row.allowed or ()) for token, row in zip(tokens, rows, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_mask_that_allows_everything_changes_nothing(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(9)
    rows = [random_row(rng, logprobs=True, **options) for _ in range(ROWS)]
    free, _ = run(rows)
    for row in rows:
        row.allowed = list(range(VOCAB))
    masked, _ = run(rows)
    for before, now in zip(free, masked, strict=True):
        np.testing.assert_array_equal(before, now)


def test_masks_change_no_neighbour_and_no_log_probability() -> None:
    rng = np.random.default_rng(10)
    rows = [random_row(rng, temperature=1.0, logprobs=True) for _ in range(ROWS)]
    free, _ = run(rows)
    rows[2].allowed = [int(np.argmin(rows[2].logits))]
    masked, _ = run(rows)
    others = [place for place in range(ROWS) if place != 2]
    np.testing.assert_array_equal(free.tokens[np.array(others)], masked.tokens[np.array(others)])
    assert masked.tokens[2] == rows[2].allowed[0]
    logits = rows[2].logits.astype(np.float64)
    of_model = logits[rows[2].allowed[0]] - np.logaddexp.reduce(logits)
    assert float(masked.logprobs[2]) == pytest.approx(of_model, abs=1e-4)
    np.testing.assert_array_equal(free.top_ids, masked.top_ids)


def test_a_mask_that_a_slot_has_from_before_is_not_read() -> None:
    row = Row(np.eye(1, VOCAB, 5, dtype=np.float32)[0])
    state = load_row(slot_state(SLOTS, VOCAB), 0, Row(row.logits, allowed=[9]))
    words = np.stack([row_words()] * ROWS)
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0] = row.logits
    sampled, _ = step(logits, words, padded([0], ROWS) % (SLOTS + 1), state)
    assert int(sampled.tokens[0]) == 5


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
        place_of = {int(source): place for place, source in enumerate(places)}
        assert [int(tokens[place_of[5 + i]]) for i in range(3)] == alone, order
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


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


def test_many_rows_have_each_the_state_of_its_slot() -> None:
    """More than are gathered at once, in slots of another order."""
    rows = 2 * MAX_GATHERED_ROWS + 1
    state = slot_state(rows, rows)
    mine = jnp.arange(rows)  # slot s prefers token s
    state = state._replace(bias=state.bias.at[mine, mine].set(9.0), seen=state.seen.at[mine, mine].set(True))
    words = np.stack([row_words(biased=True, logprobs=True)] * rows)
    slots = np.random.default_rng(8).permutation(rows).astype(np.int32)
    logits = np.zeros((rows, rows), np.float32)
    sampled, after = sample(jnp.asarray(logits), SamplingBatch(words), jnp.asarray(slots), state)
    assert sampled.tokens.tolist() == slots.tolist()
    assert after.counts[mine, mine].tolist() == [1] * rows


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
    sampled, _ = sample(logits, SamplingBatch(jnp.asarray(words)), jnp.array([0, 1]), slot_state(2, 3))
    assert sampled.tokens[0] == 1
    assert 0 <= sampled.tokens[1] < 3
    assert sampled.top_ids[0, :3].tolist() == [1, 2, 0]
    assert (sampled.top_logprobs[0, 3:] == -np.inf).all()


def test_stop_ids_and_biases_that_are_no_tokens_are_left_out() -> None:
    prompt, output = np.array([3, 5], np.int32), np.array([5, 5], np.int32)
    want = slot_words(1, VOCAB, prompt, output, {2: 0.5}, (4,))
    got = slot_words(1, VOCAB, prompt, output, {2: 0.5, -1: 9.0, VOCAB: 9.0}, (4, -1, VOCAB))
    np.testing.assert_array_equal(got, want)
    assert (want[1 + 5], want[1 + 4], want[1 + 3]) == (2 << 2 | 2, 1, 2)
