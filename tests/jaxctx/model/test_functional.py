"""A decoder split into a static part and a flat tuple of arrays, and merged again while a step is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.decoder import Decoder
from jaxctx.model.functional import EIGHT_BITS, abstract, as_model
from jaxctx.model.interface import KVSpec
from scripts.checkpoints import init_random
from scripts.dense import DenseCausal


def test_names_shapes_and_axes_of_parameters(tiny):
    model, params = init_random(tiny, 0)
    specs = {spec.name: spec for spec in model.specs}
    assert all(spec.shape == array.shape for spec, array in zip(model.specs, params, strict=True))
    assert all(len(spec.axes) == len(spec.shape) for spec in model.specs)
    assert specs["lm_head.weight"].shape == (96, 32)
    assert specs["model.layers.1.self_attn.q_proj.weight"].axes == ("heads", "embed")
    assert specs["model.layers.0.self_attn.o_proj.weight"].axes == ("embed", "heads")
    assert specs["model.layers.1.self_attn.k_norm.weight"].axes == ("head_dim",)


@pytest.mark.parametrize("weights_dtype", EIGHT_BITS)
def test_matrices_of_layers_may_have_8_bits_with_a_scale_for_each_output_channel(tiny, weights_dtype):
    model, params = init_random(tiny, 0, "bfloat16", weights_dtype=weights_dtype)
    types = {spec.name: (spec.dtype, spec.shape, spec.axes) for spec in model.specs}
    assert (model.dtype, model.weights_dtype, model.kv.dtype) == ("bfloat16", weights_dtype, "bfloat16")
    assert types["model.layers.1.mlp.down_proj.weight"] == (weights_dtype, (32, 48), ("embed", "ffn"))
    assert types["model.layers.1.mlp.down_proj.weight_scale"] == ("float32", (32,), ("embed",))
    assert types["model.layers.0.self_attn.q_proj.weight_scale"] == ("float32", (64,), ("heads",))
    wide = {name for name, (dtype, *_) in types.items() if dtype == "bfloat16"}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= wide
    scales = {spec.name for spec in model.specs if spec.is_scale}
    assert scales == {spec.scale_name for spec in model.specs if spec.dtype == weights_dtype}
    assert len(scales) == 7 * tiny.layers
    described, shapes = abstract(tiny, "bfloat16", weights_dtype=weights_dtype)
    assert described.specs == model.specs
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in params]
    assert described == model != abstract(tiny, "bfloat16")[0]


def test_the_static_part_compares_by_what_it_computes(tiny):
    model, params = init_random(tiny, 0)
    same, _ = abstract(tiny, "float32")
    assert model == same
    assert hash(model) == hash(same)
    assert model != abstract(tiny, "bfloat16")[0]
    assert model != abstract(tiny, "float32", kv_dtype="bfloat16")[0]
    step = jax.jit(lambda model, params, x: model.logits(params, x), static_argnums=0)
    hidden = jnp.ones((4, tiny.width))
    assert (step(model, params, hidden) == step(same, params, hidden)).all()
    assert step._cache_size() == 1


def test_abstract_lowers_without_weights(tiny):
    model, params = abstract(tiny, "bfloat16")
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    step = jax.jit(lambda p, t, at: model.logits(p, model.hidden(p, t, at, DenseCausal())))
    assert step.lower(params, rows, rows).out_info.shape == (8, tiny.vocab_size)


def test_an_abstract_model_has_the_parameters_of_a_concrete_one(tiny):
    concrete, params = init_random(tiny, 0, "bfloat16")
    model, shapes = abstract(tiny, "bfloat16")
    assert model.specs == concrete.specs
    assert [(each.shape, each.dtype) for each in shapes] == [(each.shape, each.dtype) for each in params]
    assert all(isinstance(each, jax.ShapeDtypeStruct) for each in shapes)


def test_names_are_those_of_a_checkpoint(tiny):
    names = [spec.name for spec in abstract(tiny, "float32")[0].specs]
    assert len(set(names)) == len(names)
    assert [name for name in names if not name.startswith("model.")] == ["lm_head.weight"]
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"} <= set(names)


def test_the_model_states_its_vocabulary_and_its_positions(tiny):
    model, _ = abstract(tiny, "float32")
    assert (model.vocab_size, model.max_positions, model.context_reason(256)) == (96, 256, "")


@pytest.mark.parametrize(("kv_dtype", "expected"), [(None, "bfloat16"), ("float32", "float32"), ("int8", "int8")])
def test_keys_and_values_have_the_type_of_the_parameters_or_their_own(tiny, kv_dtype, expected):
    model, _ = abstract(tiny, "bfloat16", kv_dtype=kv_dtype)
    assert model.dtype == "bfloat16"
    assert model.kv == KVSpec(tiny.layers, tiny.kv_heads, tiny.head_dim, expected, tiny.heads // tiny.kv_heads)


class AttentionTypes:
    """An attention backend that returns its queries and keeps the types that reached it."""

    looped, pools, mesh, padding, kernel = False, None, None, None, "reference"

    def __init__(self):
        self.dtypes = set()

    def attend(self, layer, q, k, v, sinks=None):
        self.dtypes |= {str(q.dtype), str(k.dtype), str(v.dtype)}
        return q.astype(jnp.float32)


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    [(None, "bfloat16"), ("float32", "float32"), ("int8", "float32"), ("float8_e4m3fn", "float32")],
)
def test_keys_and_values_that_are_quantised_later_reach_attention_wide(tiny, kv_dtype, expected):
    """Values of one byte have a scale, which is computed from the unscaled values."""
    model, params = abstract(tiny, "bfloat16", kv_dtype=kv_dtype)
    rows, kv = jax.ShapeDtypeStruct((3,), jnp.int32), AttentionTypes()
    jax.eval_shape(lambda params, tokens, positions: model.hidden(params, tokens, positions, kv), params, rows, rows)
    assert kv.dtypes == {expected}


def test_the_merged_model_computes_what_the_decoder_does(tiny):
    weights = iter(np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32))
    decoder = Decoder(tiny, lambda shape, _: jnp.full(shape, next(weights)[0], jnp.float32))
    model, params = as_model(decoder)
    hidden = jnp.linspace(-1.0, 1.0, 2 * tiny.width).reshape(2, tiny.width)
    np.testing.assert_array_equal(model.logits(params, hidden), decoder.logits(hidden))


def test_every_parameter_is_merged_into_its_place(tiny):
    """The logits follow the head alone, and of the head the one row that changes."""
    model, params = init_random(tiny, 0)
    hidden = jnp.ones((1, tiny.width))
    before = np.asarray(model.logits(params, hidden))
    place = [spec.name for spec in model.specs].index("lm_head.weight")
    changed = list(params)
    changed[place] = changed[place].at[7].add(1.0)
    after = np.asarray(model.logits(tuple(changed), hidden))
    assert np.flatnonzero(after[0] != before[0]).tolist() == [7]
    others = tuple(array if at == place else jnp.zeros_like(array) for at, array in enumerate(params))
    np.testing.assert_array_equal(model.logits(others, hidden), before)
