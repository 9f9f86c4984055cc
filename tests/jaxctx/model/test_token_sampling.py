"""The draw of a token: exact truncation, the right distribution, and the same token by candidates and by bisection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxctx.model.sampling import sample, slot_state
from jaxctx.model.sampling_options import SamplingBatch, row_words
from jaxctx.model.token_sampling import draw_tokens
from tests.jaxctx.model.sampling_reference import (
    OPTIONS,
    ROWS,
    SLOTS,
    VOCAB,
    Row,
    gumbel_noise,
    kept_tokens,
    random_logits,
    random_row,
    run,
    step,
    tokens_drawn,
)


def test_candidates_and_bisection_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows with so few candidates that hardly any row is settled by them."""
    rng = np.random.default_rng(6)
    batches = []
    for options in OPTIONS:
        rows = [random_row(rng, **options) for _ in range(ROWS)]
        batches.append((np.stack([r.logits for r in rows]), np.stack([row_words(**r.options) for r in rows])))
    slots, state = np.arange(ROWS), slot_state(SLOTS, VOCAB)
    usual = [step(*batch, slots, state)[0].tokens.tolist() for batch in batches]
    monkeypatch.setattr("jaxctx.model.token_sampling.CANDIDATES", 1)
    slow = jax.jit(lambda logits, words: sample(logits, SamplingBatch(words), slots, state)[0].tokens)
    assert [slow(*batch).tolist() for batch in batches] == usual


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


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[17, 100, 250]] = [1.0, 2.0, 1.5]
    for options in ({}, {"top_k": 10}, {"top_k": 100}, {"top_p": 0.9999}, {"min_p": 1e-9}):
        drawn = tokens_drawn(logits, 200, temperature=3.0, **options)
        assert set(drawn.tolist()) == {17, 100, 250}, options


# --- The draw itself, without the steps before it


@jax.jit
def draw(distance: jax.Array, batch: SamplingBatch) -> jax.Array:
    return draw_tokens(distance, batch)


def batch_of(rows: list[dict[str, Any]]) -> SamplingBatch:
    """The options of these rows."""
    return SamplingBatch(jnp.asarray(np.stack([row_words(**options) for options in rows])))


def distance_of(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """How far each logit is below its row's best, in units of temperature."""
    return ((logits.max(-1, keepdims=True) - logits) / temperature).astype(np.float32)


def test_a_draw_is_the_best_of_the_kept_tokens_with_their_noise() -> None:
    rng = np.random.default_rng(12)
    logits = np.stack([random_logits(rng) for _ in range(ROWS)])
    truncations: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_k": 200},
        {"top_p": 0.5},
        {"top_p": 0.99},
        {"min_p": 0.1},
        {"top_k": 100, "top_p": 0.9},
        {"top_k": 10, "min_p": 0.3},
    ]
    places = [{"seed": 2**40 + row, "position": 7 * row} for row in range(ROWS)]
    rows = [{"temperature": 1.0, **place, **kept} for place, kept in zip(places, truncations, strict=True)]
    expected = []
    for row in range(ROWS):
        kept = kept_tokens(logits[row].astype(np.float64), temperature=1.0, **truncations[row])
        score = logits[row][kept] + gumbel_noise(**places[row])[kept]
        expected.append(int(kept[score.argmax()]))
    assert draw(distance_of(logits), batch_of(rows)).tolist() == expected


def test_a_draw_needs_no_more_than_the_distance() -> None:
    """Which temperature there was is in the distance: any that is not 0 draws the same."""
    logits = np.stack([random_logits(np.random.default_rng(row)) for row in range(ROWS)])
    draws = [
        draw(distance_of(logits), batch_of([{"temperature": temperature, "seed": 3}] * ROWS)).tolist()
        for temperature in (0.1, 1.0, 50.0)
    ]
    assert draws[0] == draws[1] == draws[2]


def test_rows_without_a_temperature_do_not_change_the_others() -> None:
    logits = np.stack([random_logits(np.random.default_rng(row)) for row in range(ROWS)])
    sampled = [{"temperature": 1.0, "seed": row, "top_p": 0.9} for row in range(ROWS)]
    mixed = [{} if row % 2 else options for row, options in enumerate(sampled)]
    alone, together = (draw(distance_of(logits), batch_of(rows)).tolist() for rows in (sampled, mixed))
    assert together[::2] == alone[::2]


def test_a_row_with_one_token_at_a_finite_distance_draws_it() -> None:
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    tokens = [0, 1, 63, 64, 65, 150, VOCAB - 2, VOCAB - 1]
    logits[range(ROWS), tokens] = 0.0
    for options in ({}, {"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.5}):
        assert draw(distance_of(logits), batch_of([{"temperature": 1.0, **options}] * ROWS)).tolist() == tokens


def test_top_p_keeps_no_token_beyond_the_one_that_reaches_it() -> None:
    """Of four equally likely tokens the first two are exactly half."""
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    logits[:, [5, 90, 200, 299]] = 0.0
    drawn: set[int] = set()
    for position in range(12):
        rows = [{"temperature": 1.0, "top_p": 0.5, "seed": row, "position": position} for row in range(ROWS)]
        drawn |= set(draw(distance_of(logits), batch_of(rows)).tolist())
    assert drawn == {5, 90}
