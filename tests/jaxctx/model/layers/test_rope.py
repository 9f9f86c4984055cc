import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.config import RopeConfig, RopeScaling
from jaxctx.model.families.rope import BAND_FACTOR, ROPE_FACTOR, ROPE_THETA
from jaxctx.model.layers import rope

HEAD_DIM = 16


def test_attention_depends_on_distance_only():
    frequencies = rope.inverse_frequencies(RopeConfig(), HEAD_DIM)
    x = np.random.default_rng(0).standard_normal((2, 3, HEAD_DIM)).astype(np.float32)

    def product(first, second):
        q, k = (
            rope.rotate(x[i : i + 1], *rope.cos_sin(frequencies, jnp.array([p]))) for i, p in ((0, first), (1, second))
        )
        return np.einsum("rhd,rhd->h", q, k)

    np.testing.assert_allclose(product(7, 3), product(107, 103), atol=1e-4)
    assert np.abs(product(7, 3) - product(7, 4)).max() > 1e-2


def test_position_zero_turns_nothing():
    x = jnp.ones((1, 1, HEAD_DIM))
    assert (rope.rotate(x, *rope.cos_sin(rope.inverse_frequencies(RopeConfig(), HEAD_DIM), jnp.array([0]))) == x).all()


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
