import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.dense import DenseCausal


def oracle(q, k, v, window=None, soft_cap=None, sinks=None):
    """One sequence, float64, loops."""
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    out = np.zeros(q.shape)
    for row in range(len(q)):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
            scores = k[seen, shared] @ q[row, head] / np.sqrt(head_dim)
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            of_sink = 0 if sinks is None else np.exp(sinks[head] - scores.max())
            out[row, head] = weights / (weights.sum() + of_sink) @ v[seen, shared]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("sequences", [1, 3])
def test_equals_float64_loops(kv_heads, sequences):
    keys = jax.random.split(jax.random.key(kv_heads), 3)
    q, k, v = (
        jax.random.normal(key, (5 * sequences, n, 16)) for key, n in zip(keys, (8, kv_heads, kv_heads), strict=True)
    )
    got = jax.jit(DenseCausal(sequences).attend, static_argnums=0)(0, q, k, v)
    for i in range(0, 5 * sequences, 5):
        rows = slice(i, i + 5)
        expected = oracle(*(np.asarray(x[rows], np.float64) for x in (q, k, v)))
        np.testing.assert_allclose(got[rows], expected, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_each_layer_has_its_window(soft_cap):
    """Of one token, of some, of more than there are, and none."""
    q, k, v = (
        jax.random.normal(key, (7, n, 16))
        for key, n in zip(jax.random.split(jax.random.key(1), 3), (4, 2, 2), strict=True)
    )
    windows = (1, 3, 9, None)
    backend = DenseCausal(windows=windows, soft_cap=soft_cap)
    for layer, window in enumerate(windows):
        expected = oracle(*(np.asarray(x, np.float64) for x in (q, k, v)), window, soft_cap)
        np.testing.assert_allclose(backend.attend(layer, q, k, v), expected, atol=1e-5)


def test_sinks():
    q, k, v = (
        jax.random.normal(key, (7, n, 16))
        for key, n in zip(jax.random.split(jax.random.key(1), 3), (4, 2, 2), strict=True)
    )
    sinks = jnp.asarray([-20.0, 0.0, 1.0, 20.0])
    expected = oracle(*(np.asarray(x, np.float64) for x in (q, k, v)), 3, sinks=np.asarray(sinks, np.float64))
    got = DenseCausal(windows=(3,)).attend(0, q, k, v, sinks)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_narrow_inputs_give_float32():
    q = jnp.ones((4, 2, 8), jnp.bfloat16)
    assert DenseCausal().attend(0, q, q, q).dtype == jnp.float32
