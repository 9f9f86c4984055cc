"""The soft cap of the kernels for GPUs, against tanh in float64. Approximate instructions are not here."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels.gpu_scores import capped

LOG2_E = math.log2(math.e)


@pytest.mark.parametrize("soft_cap", [0.001, 2.0, 50.0, 1e4])
@pytest.mark.parametrize("unit", [0.09 * LOG2_E, 64 * 0.125 * LOG2_E])
def test_capped_scores_are_those_of_tanh_and_a_constant(soft_cap: float, unit: float) -> None:
    in_base_e = np.concatenate([np.linspace(-4, 4, 4000) * soft_cap, np.linspace(-30, 30, 96), [1e5, -1e5]])
    score = np.resize(in_base_e * LOG2_E / unit, (64, 64)).astype(np.float32)
    got, unit_after = capped(jnp.asarray(score), unit, soft_cap)
    want = soft_cap * np.tanh(score.astype(np.float64) * unit / LOG2_E / soft_cap) + soft_cap
    np.testing.assert_allclose(np.asarray(got, np.float64) * unit_after / LOG2_E, want, atol=1e-6 * soft_cap)


def test_without_a_cap_scores_stay() -> None:
    score = jnp.ones((64, 64))
    got, unit = capped(score, 0.25, None)
    assert got is score
    assert unit == 0.25


def test_what_is_no_number_stays_none() -> None:
    """A NaN that a row sees is not hidden, and infinite scores become the cap's ends."""
    got, _ = capped(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf]), 1.0, 30.0)
    np.testing.assert_array_equal(got, [np.nan, 1.0, 0.0])
