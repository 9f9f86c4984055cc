import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.config import Experts, LayerAttention
from jaxctx.model.functional import EIGHT_BITS, abstract
from scripts.checkpoints import init_random
from scripts.dense import DenseCausal


def test_switches_add_and_remove_parameters(tiny):
    def names(**change):
        return {spec.name for spec in abstract(dataclasses.replace(tiny, **change), "float32")[0].specs}

    assert names() - names(tied=True) == {"lm_head.weight"}
    assert len(names(qkv_bias=True) - names()) == 3 * tiny.layers
    assert len(names(out_bias=True) - names()) == tiny.layers
    assert len(names(ffn_bias=True) - names()) == 3 * tiny.layers
    assert len(names() - names(query_key_norm="none")) == 2 * tiny.layers


def test_norms_of_all_heads_and_around_blocks(tiny):
    """Their shapes; what they compute is compared with transformers."""

    def shapes(**change):
        return {spec.name: spec.shape for spec in abstract(dataclasses.replace(tiny, **change), "float32")[0].specs}

    names = shapes(query_key_norm="all_heads")
    assert names["model.layers.1.self_attn.q_norm.weight"] == (tiny.heads * tiny.head_dim,)
    assert names["model.layers.1.self_attn.k_norm.weight"] == (tiny.kv_heads * tiny.head_dim,)
    before, after, around = (set(shapes(norms=norms)) for norms in ("before", "after", "around"))
    assert len(before) == len(after) == len(around) - 2 * tiny.layers


def test_layers_that_do_not_rotate_do_not_see_positions(tiny):
    tokens, positions = jnp.arange(8), jnp.arange(8)[::-1] * 9
    config = dataclasses.replace(tiny, layer_attention=(LayerAttention(rope=None),))
    model, params = init_random(config, 0, scale=0.2)

    def hidden(positions):
        return model.hidden(params, tokens, positions, DenseCausal())

    np.testing.assert_array_equal(hidden(jnp.arange(8)), hidden(positions))
    one = dataclasses.replace(tiny, layer_attention=(LayerAttention(rope=None), LayerAttention()))
    model, params = init_random(one, 0, scale=0.2)
    assert np.abs(hidden(jnp.arange(8)) - hidden(positions)).max() > 1e-3


def test_windows_and_soft_caps_reach_attention(tiny):
    windows = (LayerAttention(window=7), LayerAttention())
    config = dataclasses.replace(tiny, layers=3, layer_attention=windows, scores_soft_cap=30.0)
    kv = abstract(config, "float32")[0].kv
    assert (kv.windows, kv.soft_cap) == ((7, None, 7), 30.0)
    plain = abstract(tiny, "float32")[0].kv
    assert (plain.windows, plain.soft_cap) == ((), None)


def test_the_soft_cap_of_logits(tiny):
    plain, params = init_random(tiny, 0, scale=0.5)
    hidden = jax.random.normal(jax.random.key(1), (5, tiny.width))
    logits = plain.logits(params, hidden)
    capped = init_random(dataclasses.replace(tiny, logits_soft_cap=2.0, logits_scale=0.5), 0, scale=0.5)[0]
    found = capped.logits(params, hidden)
    assert np.abs(found).max() < 2.0 < np.abs(logits / 2).max()
    np.testing.assert_allclose(found, 2 * np.tanh(np.asarray(logits) / 2 / 2), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 55.42562584220407), ("bfloat16", 55.5)])
def test_embeddings_are_scaled_as_narrow_as_they_are(tiny, dtype, scale):
    """Of a width of 3072, as the model was trained."""
    config = dataclasses.replace(tiny, embedding_scale=3072**0.5, residual_scale=1e-30, norm_eps=1.0)
    model, params = init_random(config, 0, dtype)
    hidden = jax.jit(lambda tokens: model.hidden(params, tokens, tokens, Recording()))(jnp.arange(5))
    embedding = np.asarray(params[0], np.float32)[:5] * scale
    expected = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True) + 1.0)
    np.testing.assert_allclose(hidden, expected, rtol=1e-5)


def test_the_same_seed_gives_the_same_parameters(tiny):
    (_, first), (_, again), (_, other) = (init_random(tiny, seed, "bfloat16") for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))


class Recording:
    """Passes queries through and keeps what arrived."""

    looped, pools, mesh, padding, kernel = False, None, None, None, "reference"

    def __init__(self):
        self.calls = []

    def attend(self, layer, q, k, v, sinks=None):
        self.calls.append((layer, q, k, v))
        return q.astype(jnp.float32)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "float32")])
def test_what_reaches_attention(tiny, dtype, kv_dtype):
    model, params = init_random(tiny, 0, dtype, kv_dtype=kv_dtype)
    assert model.kv.dtype == (kv_dtype or dtype)
    kv = Recording()
    hidden = model.hidden(params, jnp.arange(3), jnp.arange(3), kv)
    assert hidden.dtype == jnp.float32
    assert model.logits(params, hidden).dtype == jnp.float32
    assert [layer for layer, *_ in kv.calls] == [0, 1]
    for _, q, k, v in kv.calls:
        assert (q.shape, k.shape, v.shape) == ((3, 4, 16), (3, 2, 16), (3, 2, 16))
        assert {q.dtype, k.dtype, v.dtype} == {jnp.dtype(model.kv.dtype)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_see_how_many_others_there_are(tiny, dtype):
    """Up to rounding: padding a row count, and batching, change nothing but the order of sums."""
    model, params = init_random(tiny, 0, dtype, scale=0.2)
    forward = jax.jit(lambda tokens, at: model.logits(params, model.hidden(params, tokens, at, Recording())))
    tokens, positions = jnp.arange(9) * 7, jnp.arange(9) + 50
    together = forward(tokens, positions)
    for row in range(9):
        one = slice(row, row + 1)
        alone = forward(tokens[one], positions[one])
        np.testing.assert_allclose(alone[0], together[row], atol=2e-2 if dtype == "bfloat16" else 1e-5)


def meant(model, params):
    """The same model with float32 weights, which are what those of 8 bits stand for."""
    arrays = {spec.name: array for spec, array in zip(model.specs, params, strict=True)}
    wide, _ = abstract(model.config, "float32")

    def value(name):
        (spec,) = (spec for spec in model.specs if spec.name == name)
        if spec.dtype not in EIGHT_BITS:
            return arrays[name].astype(jnp.float32)
        values = np.asarray(arrays[name]).view(jnp.dtype(spec.dtype)).astype(np.float32)
        return jnp.asarray(values * np.asarray(arrays[spec.scale_name])[..., None])

    return wide, tuple(value(spec.name) for spec in wide.specs)


EXPERTS = Experts(count=5, per_token=2, ffn=24, normalised=True, shared_ffn=16, dense_layers=(0,))
FAMILIES = [{}, {"qkv_bias": True, "ffn_bias": True, "query_key_norm": "none", "tied": True}, {"experts": EXPERTS}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights_dtype", EIGHT_BITS)
def test_weights_of_8_bits_give_the_logits_of_what_they_stand_for(tiny, dense_logits, weights_dtype, family):
    config = dataclasses.replace(tiny, **family)
    model, params = init_random(config, 0, "float32", scale=0.2, weights_dtype=weights_dtype)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 20))
    want = dense_logits(*meant(model, params), tokens)
    np.testing.assert_allclose(dense_logits(model, params, tokens), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    unquantized = dense_logits(*init_random(config, 0, "float32", scale=0.2), tokens)
    assert np.abs(unquantized - want).max() > 1e-3 * np.abs(want).max()  # the oracle is not what was before


def within(jaxpr):
    """All equations, those of functions and branches too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from within(getattr(inner, "jaxpr", inner))


def test_weights_are_not_widened_in_the_step(tiny):
    """A bfloat16 weight must reach its product as it is stored; only embedding rows, norms and biases may widen."""
    config = dataclasses.replace(tiny, qkv_bias=True)
    model, params = abstract(config, "bfloat16")
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda p, t, at: model.logits(p, model.hidden(p, t, at, Recording())))(params, rows, rows)
    steps = list(within(jaxpr.jaxpr))
    matrices = {spec.shape for spec in model.specs if len(spec.shape) == 2}
    widened = [e for e in steps if e.primitive.name == "convert_element_type" and e.invars[0].aval.shape in matrices]
    assert not [e for e in widened if e.invars[0].aval.dtype == jnp.bfloat16 and e.outvars[0].aval.dtype == jnp.float32]
    products = [e for e in steps if e.primitive.name == "dot_general"]
    assert len(products) == 2 * (7 * config.layers + 1)  # of few rows: one for CPUs, one for other devices
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype("float32")}


def test_training_lowers_the_loss(tiny):
    """The decoder is differentiable through dense attention: what training the bundled model stands on."""
    model, params = init_random(tiny, 0)
    tokens = jnp.tile(jnp.arange(16, dtype=jnp.int32), 2)
    positions = jnp.tile(jnp.arange(16, dtype=jnp.int32), 2)

    def loss(params):
        logits = model.logits(params, model.hidden(params, tokens, positions, DenseCausal(2)))
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(31), tokens[1:]])

    @jax.jit
    def step(params):
        value, gradient = jax.value_and_grad(loss)(params)
        return value, gradient, tuple(p - 0.5 * g for p, g in zip(params, gradient, strict=True))

    before, gradient, _ = step(params)
    assert all(np.abs(g).max() > 0 for g in gradient)
    for _ in range(20):
        after, _, params = step(params)
    assert after < 0.5 * before
