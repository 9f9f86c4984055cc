import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.config import RopeConfig, RopeScaling
from jaxctx.model.families.rope import BAND_FACTOR, ROPE_FACTOR, ROPE_THETA, YARN_THETA, YARN_TURNS
from jaxctx.model.layers import rope

HEAD_DIM = 16


def test_attention_depends_on_distance_only():
    x = np.random.default_rng(0).standard_normal((2, 3, HEAD_DIM)).astype(np.float32)

    def product(first, second):
        q, k = (
            rope.rotate(x[i : i + 1], *rope.cos_sin(RopeConfig(), HEAD_DIM, jnp.array([p])))
            for i, p in ((0, first), (1, second))
        )
        return np.einsum("rhd,rhd->h", q, k)

    np.testing.assert_allclose(product(7, 3), product(107, 103), atol=1e-4)
    assert np.abs(product(7, 3) - product(7, 4)).max() > 1e-2


def test_position_zero_turns_nothing():
    x = jnp.ones((1, 1, HEAD_DIM))
    assert (rope.rotate(x, *rope.cos_sin(RopeConfig(), HEAD_DIM, jnp.array([0]))) == x).all()


def test_only_the_first_elements_of_a_head_rotate():
    x = jnp.arange(HEAD_DIM, dtype=jnp.float32).reshape(1, 1, HEAD_DIM) + 1
    turned = rope.rotate(x, *rope.cos_sin(RopeConfig(rotated=6), HEAD_DIM, jnp.array([5])))
    assert (turned[..., 6:] == x[..., 6:]).all()
    whole = rope.rotate(x[..., :6], *rope.cos_sin(RopeConfig(), 6, jnp.array([5])))  # as a head of that size
    np.testing.assert_array_equal(turned[..., :6], whole)


@pytest.mark.parametrize("sizes", [(4, 4, 0), (4, 4, 3), (1, 1, 8)])
def test_parts_of_a_head_lie_side_by_side_on_a_cpu_as_elsewhere(sizes):
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(size=(5, 3, size)), jnp.float32) for size in sizes]
    on_cpu, elsewhere = rope.side_by_side_on_cpu(*parts), rope.side_by_side(*parts)
    assert on_cpu.shape == (5, 3, sum(sizes))
    np.testing.assert_array_equal(on_cpu, elsewhere)


def test_what_is_not_finite_stays_where_it_is():
    """A sum among zeros must not carry it over to other elements."""
    x = jnp.ones((1, 1, 8)).at[0, 0, 2].set(jnp.nan).at[0, 0, 7].set(jnp.inf)
    turned = rope.rotate(x, jnp.full((1, 3), 0.6), jnp.full((1, 3), 0.8))
    finite = np.isfinite(np.asarray(turned[0, 0]))
    assert finite.tolist() == [True, True, False, True, True, False, True, False]


def test_cosines_and_sines_have_the_factor_of_attention():
    positions = jnp.array([0, 3, 1000])
    for plain, scaled in zip(
        rope.cos_sin(RopeConfig(), HEAD_DIM, positions),
        rope.cos_sin(RopeConfig(attention_factor=1.25), HEAD_DIM, positions),
        strict=True,
    ):
        np.testing.assert_allclose(scaled, 1.25 * plain, rtol=1e-6)


def test_yarn_keeps_what_turns_often_and_divides_what_hardly_turns():
    plain = rope.inverse_frequencies(RopeConfig(), 128)
    scaling = RopeScaling("yarn", 8.0, original_max_positions=4096)
    scaled = rope.inverse_frequencies(RopeConfig(scaling=scaling), 128)
    turns = 4096 * plain / (2 * np.pi)
    often, hardly = turns > 40, turns < 0.8  # wider than the bounds, which are those of whole frequencies
    assert often.any()
    assert hardly.any()
    np.testing.assert_allclose(scaled[often], plain[often], rtol=1e-6)
    np.testing.assert_allclose(scaled[hardly], plain[hardly] / 8, rtol=1e-6)
    ratio = plain / scaled
    assert (np.diff(ratio) >= -1e-5).all()
    assert scaled.dtype == np.float32


def test_longrope_divides_each_frequency_by_its_factor():
    plain = rope.inverse_frequencies(RopeConfig(), 8)
    short, long = (1.0, 1.5, 2.0, 3.0), (2.0, 5.0, 9.0, 30.0)
    for takes_long_factors, factors in ((False, short), (True, long)):
        scaling = RopeScaling("longrope", short_factors=short, long_factors=long, takes_long_factors=takes_long_factors)
        found = rope.inverse_frequencies(RopeConfig(scaling=scaling), 8)
        np.testing.assert_allclose(found, plain / np.array(factors), rtol=1e-6)
        assert found.dtype == np.float32


@pytest.mark.parametrize("theta", [YARN_THETA, ROPE_THETA[1]])
@pytest.mark.parametrize("factor", ROPE_FACTOR)
@pytest.mark.parametrize("turns", [(YARN_TURNS[1], YARN_TURNS[0]), (YARN_TURNS[0], YARN_TURNS[0]), (32.0, 1.0)])
@pytest.mark.parametrize("truncate", [True, False])
def test_at_the_bounds_of_yarn_every_frequency_is_a_number(theta, factor, turns, truncate):
    for positions in (1, 2**24):
        scaling = RopeScaling(
            "yarn", factor, original_max_positions=positions, beta_fast=turns[0], beta_slow=turns[1], truncate=truncate
        )
        frequencies = rope.inverse_frequencies(RopeConfig(theta, scaling), 1024)
        assert np.isfinite(frequencies).all()
        assert (frequencies >= np.finfo(np.float32).tiny).all()


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths():
    plain = rope.inverse_frequencies(RopeConfig(500000.0), 128)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    scaled = rope.inverse_frequencies(RopeConfig(500000.0, scaling), 128)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 2048, wavelength > 8192
    assert (scaled[short] == plain[short]).all()
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert scaled.dtype == np.float32


@pytest.mark.parametrize("theta", ROPE_THETA)
@pytest.mark.parametrize("kind", ["linear", "llama3"])
@pytest.mark.parametrize("factor", ROPE_FACTOR)
def test_at_the_bounds_of_a_configuration_every_frequency_is_a_number(theta, kind, factor):
    scaling = RopeScaling(kind, factor, BAND_FACTOR[0], BAND_FACTOR[1], 2**24)
    frequencies = rope.inverse_frequencies(RopeConfig(theta, scaling), 1024)
    assert np.isfinite(frequencies).all()
    assert (frequencies >= np.finfo(np.float32).tiny).all()
