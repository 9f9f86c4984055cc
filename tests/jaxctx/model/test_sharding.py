import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxctx.errors import InvalidArgument
from jaxctx.model.sharding import KV_POOL_AXES, logical_sharding, make_mesh
from jaxctx.model.weights import load_model
from scripts.checkpoints import init_random, write_random
from tests.engines import shard


def test_two_devices_compute_what_one_does(tiny, dense_logits):
    model, params = init_random(tiny, 0, scale=0.2)
    split = shard(make_mesh(tensor=2), model, params)
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_allclose(
        dense_logits(model, split, tokens), dense_logits(model, params, tokens), rtol=1e-4, atol=1e-5
    )


def test_each_device_holds_its_part(tiny):
    model, params = init_random(tiny, 0)
    split = shard(make_mesh(tensor=2), model, params)
    parts = {spec.name: array.addressable_shards[0].data.shape for spec, array in zip(model.specs, split, strict=True)}
    assert parts["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert parts["model.layers.0.self_attn.o_proj.weight"] == (32, 32)
    assert parts["model.layers.0.mlp.down_proj.weight"] == (32, 24)
    assert parts["model.embed_tokens.weight"] == (48, 32)
    assert parts["model.norm.weight"] == (32,)


def test_loading_onto_a_mesh(tiny, tmp_path, dense_logits):
    write_random(tmp_path, tiny, seed=0)
    whole, split = load_model(tmp_path), load_model(tmp_path, mesh=make_mesh(tensor=2))
    assert whole.revision == split.revision
    assert all(len(array.sharding.device_set) == 2 for array in split.params)
    tokens = np.arange(20)[None]
    np.testing.assert_allclose(
        dense_logits(split.model, split.params, tokens), dense_logits(whole.model, whole.params, tokens), atol=1e-4
    )


def test_scales_are_split_with_their_output_channels(tiny, dense_logits):
    model, params = init_random(tiny, 0, scale=0.2, weights_dtype="int8")
    split = shard(make_mesh(tensor=2), model, params)
    parts = {spec.name: array.addressable_shards[0].data.shape for spec, array in zip(model.specs, split, strict=True)}
    assert parts["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert parts["model.layers.0.self_attn.q_proj.weight_scale"] == (32,)
    assert parts["model.layers.0.mlp.down_proj.weight_scale"] == (32,)  # of outputs that every device has
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_allclose(
        dense_logits(model, split, tokens), dense_logits(model, params, tokens), rtol=1e-4, atol=1e-5
    )


def test_a_mesh_of_one_changes_nothing(tiny, dense_logits):
    model, params = init_random(tiny, 0)
    same = shard(make_mesh(tensor=1), model, params)
    tokens = np.arange(8)[None]
    assert (dense_logits(model, same, tokens) == dense_logits(model, params, tokens)).all()


def test_the_pool_is_split_by_kv_heads():
    mesh = make_mesh(tensor=2)
    assert logical_sharding(mesh, KV_POOL_AXES).spec == PartitionSpec("tensor", None, None, None)
    with pytest.raises(KeyError):
        logical_sharding(mesh, ("colour",))
    pool = jax.device_put(jnp.zeros((2, 4, 16, 8)), logical_sharding(mesh, KV_POOL_AXES))
    assert pool.addressable_shards[0].data.shape == (1, 4, 16, 8)


def test_what_does_not_divide_is_refused(tiny):
    model, params = init_random(dataclasses.replace(tiny, kv_heads=1, vocab_size=97), 0)
    with pytest.raises(InvalidArgument, match="kv_heads = 1 and vocab = 97"):
        shard(make_mesh(tensor=2), model, params)
    for tensor in (0, 1000):
        with pytest.raises(InvalidArgument, match="number of devices"):
            make_mesh(tensor=tensor)
