"""How often a draft model is right: as the formula of `jaxctx.engine.drafting` says, and no less than its bound."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxctx.model.sampling import sample, slot_state
from jaxctx.model.sampling_options import SamplingBatch, row_words

DRAWS, VOCABULARY = 4096, 16


def draws(logits: np.ndarray, **options: Any) -> np.ndarray:
    """Tokens that are drawn from these logits, with one seed at as many positions."""
    words = np.stack([row_words(seed=11, position=position, **options) for position in range(DRAWS)])
    rows = np.broadcast_to(logits, (DRAWS, VOCABULARY)).astype(np.float32)
    slots = np.full(DRAWS, 1, np.int32)
    sampled, _ = jax.jit(sample)(rows, SamplingBatch(words), slots, slot_state(1, VOCABULARY))
    return np.asarray(sampled.tokens)


def distribution(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k:
        weights[np.argsort(-logits)[top_k:]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("difference", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 5)])
def test_guesses_are_right_as_often_as_the_formula_says(difference: float, temperature: float, top_k: int) -> None:
    rng = np.random.default_rng(3)
    served = rng.normal(size=VOCABULARY)
    draft = served + difference * rng.normal(size=VOCABULARY)
    p, q = (distribution(each, temperature, top_k) for each in (served, draft))
    drawn, guessed = (draws(each, temperature=temperature, top_k=top_k) for each in (served, draft))
    both = np.flatnonzero((p > 0) & (q > 0))
    expected = sum(1 / np.maximum(p / p[token], q / q[token]).sum() for token in both)
    far = abs(p - q).sum() / 2
    assert expected >= (1 - far) / (1 + far) - 1e-9
    deviation = (expected * (1 - expected) / DRAWS) ** 0.5
    assert abs((drawn == guessed).mean() - expected) <= 4 * deviation + 1e-9
    # Guesses or not: what is drawn has the served model's distribution, and that of right guesses is no other.
    counts = np.bincount(drawn, minlength=VOCABULARY) / DRAWS
    assert abs(counts - p).max() < 4 * (0.25 / DRAWS) ** 0.5
