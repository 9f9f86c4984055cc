"""Adapters beside the weights, against weights that they are merged into."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.adapters import adapter_parameters, read_adapter
from jaxctx.model.config import AdapterSlots
from jaxctx.model.sharding import make_mesh
from scripts.checkpoints import ADAPTER_TARGETS, init_random, write_adapter
from scripts.dense import DenseCausal
from tests.engines import shard

SLOTS = AdapterSlots(3, 8)


def run(model, params, tokens, adapters, mesh=None):
    """Logits of sequences `[sequences, length]`, each with the adapter of its slot; None: without adapters."""
    sequences, length = np.shape(tokens)

    @jax.jit
    def forward(params, tokens, rows):
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), sequences)
        hidden = model.hidden(params, tokens, positions, DenseCausal(sequences, mesh=mesh), rows)
        return model.logits(params, hidden)

    rows = None if adapters is None else jnp.repeat(jnp.asarray(adapters, jnp.int32), length)
    flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
    return np.asarray(forward(params, flat, rows)).reshape(sequences, length, -1)


def merged(model, params, adapter):
    """The parameters with B A added to the weights, computed in float64."""
    values = list(params)
    for index, spec in enumerate(model.specs):
        change = adapter.changes.get(spec.name)
        if change is not None:
            wide = np.asarray(values[index], np.float64) + change.b.astype(np.float64) @ change.a.astype(np.float64)
            values[index] = jnp.asarray(wide, values[index].dtype)
    return tuple(values)


def with_adapters(model, params, slots, mesh=None):
    values = list(params)
    for index, array in adapter_parameters(model, slots, mesh):
        values[index] = array
    return tuple(values)


@pytest.fixture
def wide(tiny):
    return dataclasses.replace(tiny, adapters=SLOTS)


def adapter_of(tmp_path, model, config, seed, **settings):
    write_adapter(tmp_path / str(seed), config, seed=seed, **settings)
    return read_adapter(tmp_path / str(seed), model)


TOKENS = np.random.default_rng(0).integers(0, 96, (4, 12))


@pytest.mark.parametrize("target", [*ADAPTER_TARGETS, "all"])
def test_as_merged_weights(wide, tmp_path, target):
    model, params = init_random(wide, 0, "float32", scale=0.2)
    targets = ADAPTER_TARGETS if target == "all" else [target]
    adapter = adapter_of(tmp_path, model, wide, 1, targets=targets)
    there = run(model, with_adapters(model, params, [None, adapter, None]), TOKENS, [2] * 4)
    expected = run(model, merged(model, params, adapter), TOKENS, None)
    base = run(model, params, TOKENS, None)
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(there, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_several_adapters_and_of_none(wide, tmp_path):
    model, params = init_random(wide, 0, "float32", scale=0.2)
    first = adapter_of(tmp_path, model, wide, 1)
    second = adapter_of(tmp_path, model, wide, 2, rank=7, rank_pattern={"q_proj": 8, "up_proj": 1})
    filled = with_adapters(model, params, [first, None, second])
    together = run(model, filled, TOKENS, [1, 0, 3, 2])
    none = run(model, params, TOKENS, None)
    np.testing.assert_allclose(together[0], run(model, merged(model, params, first), TOKENS, None)[0], atol=1e-4)
    np.testing.assert_allclose(together[2], run(model, merged(model, params, second), TOKENS, None)[2], atol=1e-4)
    np.testing.assert_array_equal(together[1], run(model, filled, TOKENS, [0] * 4)[1])
    np.testing.assert_allclose(together[1], none[1], atol=1e-5)
    np.testing.assert_allclose(together[3], none[3], atol=1e-5)  # an empty slot


def test_a_row_of_numbers_that_are_not_finite_stays_alone(wide, tmp_path):
    """What an adapter makes of one row is in no other row, be it NaN."""
    model, params = init_random(wide, 0, "float32", scale=0.2)
    adapter = adapter_of(tmp_path, model, wide, 1)
    huge = dataclasses.replace(
        adapter, changes={name: change._replace(b=change.b * 1e30) for name, change in adapter.changes.items()}
    )
    filled = with_adapters(model, params, [huge, adapter, None])
    together = run(model, filled, TOKENS, [1, 0, 2, 1])
    assert not np.isfinite(together[0]).all()
    np.testing.assert_array_equal(together[1:3], run(model, filled, TOKENS, [0, 0, 2, 0])[1:3])


def test_without_slots_nothing_is_different(tiny, wide):
    plain, _ = init_random(tiny, 0, "float32")
    slotted, _ = init_random(wide, 0, "float32")
    assert not any(spec.is_of_adapters for spec in plain.specs)
    names = {spec.name for spec in slotted.specs} - {spec.name for spec in plain.specs}
    assert len(names) == 2 * 7 * tiny.layers
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("weights_dtype", ["int8", "float8_e4m3fn"])
def test_beside_weights_of_8_bits(wide, tmp_path, weights_dtype):
    model, params = init_random(wide, 0, "float32", scale=0.2, weights_dtype=weights_dtype)
    adapter = adapter_of(tmp_path, model, wide, 1)
    filled = with_adapters(model, params, [adapter, None, None])
    plain, wide_params = init_random(wide, 0, "float32", scale=0.2)
    there = run(model, filled, TOKENS, [1, 0, 1, 0])
    exact = run(plain, with_adapters(plain, wide_params, [adapter, None, None]), TOKENS, [1, 0, 1, 0])
    spread = exact.std()
    assert np.abs(there - exact).mean() < 0.2 * spread  # 8 bits are coarse; without the adapter it is more
    without = run(model, params, TOKENS, [1, 0, 1, 0])
    assert np.abs(without[0] - exact[0]).mean() > 3 * np.abs(there[0] - exact[0]).mean()
    np.testing.assert_allclose(there[1], without[1], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_one_row_as_many(wide, tmp_path, dtype):
    """A step of one row takes another path on a CPU."""
    model, params = init_random(wide, 0, dtype, scale=0.2)
    adapter = adapter_of(tmp_path, model, wide, 1)
    filled = with_adapters(model, params, [adapter, None, None])
    many = run(model, filled, TOKENS[:, :1], [1, 0, 1, 0])
    for row, slot in enumerate([1, 0, 1, 0]):
        np.testing.assert_allclose(run(model, filled, TOKENS[row : row + 1, :1], [slot])[0], many[row], atol=0.05)


@pytest.mark.parametrize("tensor", [2, 4])
def test_split_over_devices(wide, tmp_path, tensor):
    if jax.device_count() < tensor:
        pytest.skip("needs more devices")
    config = dataclasses.replace(wide, heads=8, kv_heads=2, tied=True)
    model, params = init_random(config, 0, "float32", scale=0.2)
    adapter, other = (adapter_of(tmp_path, model, config, seed) for seed in (1, 2))
    mesh = make_mesh(config, tensor=tensor)
    split = with_adapters(model, shard(mesh, model, params), [adapter, other, None], mesh)
    alone = with_adapters(model, params, [adapter, other, None])
    slots = [1, 0, 2, 3]
    np.testing.assert_allclose(
        run(model, split, TOKENS, slots, mesh), run(model, alone, TOKENS, slots), rtol=1e-4, atol=1e-4
    )
