"""Checkpoints of 4 bits that stay so, multiplied by the kernels' plain equivalent; what becomes wide, and why."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxctx.model.config import AdapterSlots, ModelConfig
from jaxctx.model.sharding import make_mesh, query_head_order
from jaxctx.model.weights import load_model, stored_matrix_types
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_kernels.int4_weights import unpack
from tests.jaxctx.model.quantization.encode import (
    AWQ_CONFIG,
    FORMATS,
    GPTQ_CONFIG,
    Format,
    awq,
    compressed,
    edit_quantized,
    gptq,
    numbers,
    packed,
    write_quantized,
)

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=96,
    width=128,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=128,
    ffn=256,
    max_positions=256,
    query_key_norm="head",
)
DEVICE = Int4Device("reference")
NAMES = 7  # matrices of a layer


def of_groups(size, low=0, **options):
    return lambda seed, shape: numbers(seed, shape, (1, size), 4, low=low, **options)


SYMMETRIC = compressed("int", 4, "pack-quantized", strategy="group", group_size=128)
KEPT = {  # the format, and the inputs of a kernel's group
    "awq": (Format(AWQ_CONFIG | {"group_size": 128}, of_groups(128, scale_type=np.float16), awq), 128),
    "awq in groups of 32": (Format(AWQ_CONFIG | {"group_size": 32}, of_groups(32), awq), 32),
    "awq, a scale for each channel": (Format(AWQ_CONFIG | {"group_size": -1}, of_groups(0), awq), 128),
    "gptq": (Format(GPTQ_CONFIG | {"group_size": 64}, of_groups(64), lambda n: gptq(n, 4)), 64),
    "W4A16": (Format(SYMMETRIC, of_groups(128, -8, zeros=False), lambda n: packed(n, 4, symmetric=True)), 128),
    "W4A16 with zeros": (
        Format(
            compressed("int", 4, "pack-quantized", strategy="group", group_size=32, symmetric=False),
            of_groups(32, -8),
            lambda n: packed(n, 4, symmetric=False),
        ),
        32,
    ),
}
AWQ = KEPT["awq"][0]


def arrays(loaded):
    return {spec.name: np.asarray(each) for spec, each in zip(loaded.model.specs, loaded.params, strict=True)}


@pytest.mark.parametrize("name", KEPT)
def test_every_matrix_stays_what_its_format_says(tmp_path, name):
    form, group = KEPT[name]
    found = write_quantized(tmp_path, MODEL, form)
    loaded = load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
    assert (loaded.model.weights_dtype, loaded.model.product_kernel, loaded.widened) == ("int4", "reference", "")
    held = arrays(loaded)
    for parameter, stored in found.items():
        words, scales = held[parameter], held[f"{parameter}_scale"]
        assert words.dtype == np.int32
        assert words.size * 8 == stored.values.size
        zeros = scales[1] if len(scales) == 2 else np.full_like(scales[0], 8)
        assert len(zeros) == stored.values.shape[1] // group
        codes = np.asarray(unpack(jnp.asarray(words))).reshape(len(zeros), group, -1)
        wide = ((codes - zeros[:, None]) * scales[0][:, None]).reshape(-1, words.shape[1])
        np.testing.assert_allclose(wide.T, stored.reference, rtol=1e-6, atol=1e-9)
    assert loaded.parameters == load_model(tmp_path).parameters
    types = stored_matrix_types(tmp_path, DEVICE)
    assert (types.dtype, types.wide, types.int4.group) == ("int4", frozenset(), group)
    (tmp_path / "model.safetensors").unlink()
    assert stored_matrix_types(tmp_path, DEVICE) == types  # of config.json alone


def logits_of(loaded, dense_logits, mesh=None):
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, 24))
    return dense_logits(loaded.model, loaded.params, tokens, mesh=mesh)


@pytest.mark.slow
def test_logits_are_those_of_the_wide_model_but_for_rounding(tmp_path, dense_logits):
    write_quantized(tmp_path, MODEL, AWQ)
    exact = logits_of(load_model(tmp_path, dtype="float32"), dense_logits)
    kept = load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
    wide = load_model(tmp_path, dtype="bfloat16")
    off, of_wide = (np.abs(logits_of(each, dense_logits) - exact).max() for each in (kept, wide))
    assert off < 0.1 * exact.std()
    assert off < 1.5 * of_wide
    assert kept.revision != wide.revision  # their numbers differ


@pytest.mark.slow
def test_devices_that_split_it_compute_what_one_does(tmp_path, dense_logits):
    write_quantized(tmp_path, MODEL, AWQ)
    mesh = make_mesh(MODEL, tensor=2)
    split = load_model(tmp_path, dtype="bfloat16", int4=dataclasses.replace(DEVICE, kv=2), mesh=mesh)
    whole = load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
    assert split.revision == whole.revision
    parts = {
        spec.name.removeprefix("model.layers.0."): array.addressable_shards[0].data.shape
        for spec, array in zip(split.model.specs, split.params, strict=True)
    }
    assert parts["self_attn.q_proj.weight"] == (128 // 8, 256)
    assert parts["self_attn.o_proj.weight"] == (256 // 8, 128)
    assert parts["self_attn.o_proj.weight_scale"] == (2, 2, 128)
    expected = logits_of(whole, dense_logits)
    np.testing.assert_allclose(logits_of(split, dense_logits, mesh), expected, atol=0.03 * expected.std())


def test_query_heads_that_change_places_take_their_inputs_along(tmp_path):
    """Two KV heads on a device, of each of which it has one of two query heads."""
    model = dataclasses.replace(MODEL, heads=8, kv_heads=4, ffn=512)
    write_quantized(tmp_path, model, AWQ)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("kv", "group"), axis_types=(AxisType.Auto,) * 2)
    split = load_model(tmp_path, dtype="bfloat16", int4=dataclasses.replace(DEVICE, kv=2, group=2), mesh=mesh)
    assert split.widened == ""
    whole = arrays(load_model(tmp_path, dtype="bfloat16", int4=DEVICE))
    order = query_head_order(4, 2, mesh).reshape(4, 2)
    assert order.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    of_inputs, of_outputs = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    for spec, array in zip(split.model.specs, split.params, strict=True):
        if spec.name.removesuffix("_scale") not in (of_inputs, of_outputs):
            continue
        axis = spec.axes.index("heads")
        by_head = np.split(whole[spec.name], 8, axis)
        parts = {part.device: np.asarray(part.data) for part in array.addressable_shards}
        for device, heads in zip(devices.flat, order, strict=True):
            np.testing.assert_array_equal(parts[device], np.concatenate([by_head[head] for head in heads], axis))


@pytest.mark.parametrize(
    ("form", "device", "why"),
    [
        (AWQ, Int4Device(None, "there is no product of 4 bits for a cpu"), "there is no product of 4 bits for a cpu"),
        (FORMATS["awq"], DEVICE, "no kernel takes such groups"),
        (
            Format(
                GPTQ_CONFIG | {"group_size": 64, "desc_act": True},
                of_groups(64, shuffled=True),
                lambda n: gptq(n, 4),
            ),
            DEVICE,
            "their inputs are in the order of activations",
        ),
    ],
)
def test_what_no_kernel_takes_becomes_wide_and_that_is_said(tmp_path, form, device, why):
    write_quantized(tmp_path, MODEL, form)
    loaded = load_model(tmp_path, dtype="bfloat16", int4=device)
    assert loaded.widened.endswith(f"were made bfloat16, which takes 4 times their memory: {why}")
    assert loaded.revision == load_model(tmp_path, dtype="bfloat16").revision


def test_matrices_whose_parts_do_not_fit_become_wide_and_others_stay(tmp_path):
    write_quantized(tmp_path, MODEL, AWQ)
    loaded = load_model(tmp_path, dtype="bfloat16", int4=dataclasses.replace(DEVICE, kv=2, group=2))
    assert loaded.model.weights_dtype == "int4"
    why = "; ".join(
        ["64 inputs are not a multiple of 128", "64 outputs are not a multiple of 128"],
    )
    assert loaded.widened == (
        "3 matrices of 4-bit integers with a scale for each 128 inputs were made bfloat16, "
        f"which takes 4 times their memory: {why}"
    )
    wide = {
        spec.name.split(".")[4]
        for spec in loaded.model.specs
        if "proj.weight" in spec.name and spec.axes[0] != "parts" and spec.dtype != "int4"
    }
    assert wide == {"gate_proj", "up_proj", "down_proj"}


def test_heads_that_are_no_whole_chunks_are_not_moved(tmp_path):
    model = dataclasses.replace(MODEL, head_dim=64, heads=8, kv_heads=4, ffn=512)
    write_quantized(tmp_path, model, AWQ)
    loaded = load_model(tmp_path, dtype="bfloat16", int4=dataclasses.replace(DEVICE, kv=2, group=2))
    assert loaded.widened.endswith("heads of 64 are no whole chunks of 128 that devices could have")


def test_a_model_of_float32_and_one_in_other_bits_become_wide(tmp_path):
    write_quantized(tmp_path, MODEL, AWQ)
    for dtype in (None, "float32"):  # as which its embedding is stored
        loaded = load_model(tmp_path, dtype=dtype, int4=DEVICE)
        assert loaded.model.weights_dtype == "float32"
        assert loaded.widened.endswith(": products of 4 bits are of bfloat16, and not of float32")
    assert load_model(tmp_path, weights_dtype="int8", dtype="bfloat16", int4=DEVICE).model.weights_dtype == "int8"
    assert load_model(tmp_path, weights_dtype="bfloat16", int4=DEVICE).model.weights_dtype == "bfloat16"


def test_a_matrix_that_is_left_out_stays_wide(tmp_path):
    found = write_quantized(tmp_path, MODEL, AWQ, leave_out=("down_proj",))
    loaded = load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
    types = {spec.name: spec.dtype for spec in loaded.model.specs}
    assert len(found) == NAMES - 1
    assert {types[name] for name in found} == {"int4"}
    assert types["model.layers.0.mlp.down_proj.weight"] == "bfloat16"


def test_adapters_add_to_products_of_4_bits(tmp_path):
    write_quantized(tmp_path, MODEL, AWQ)
    loaded = load_model(tmp_path, dtype="bfloat16", int4=DEVICE, adapters=AdapterSlots(1, 4))
    kept = load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
    assert loaded.revision == kept.revision
    model, slotted = loaded.model, dict(zip((spec.name for spec in loaded.model.specs), loaded.params, strict=True))
    random, changed = np.random.default_rng(0), "model.layers.0.mlp.down_proj"
    for name in (f"{changed}.lora_a", f"{changed}.lora_b"):
        slotted[name] = jnp.asarray(random.normal(size=slotted[name].shape), slotted[name].dtype)
    linear = model._merge(tuple(slotted.values())).layers[0].mlp.down_proj
    x = jnp.asarray(random.normal(size=(3, MODEL.ffn)), jnp.float32)
    columns = np.zeros((3, 4), bool)
    columns[1] = True
    added = linear(x, jnp.asarray(columns)) - linear(x)
    a, b = (np.asarray(slotted[f"{changed}.lora_{side}"], np.float64) for side in "ab")
    expected = np.asarray(x, np.float64)[1] @ a.T @ b.T
    np.testing.assert_allclose(added[1], expected, atol=0.02 * np.abs(expected).max())
    assert not np.asarray(added[::2]).any()


def test_scales_that_are_not_finite_are_refused(tmp_path):
    write_quantized(tmp_path, MODEL, AWQ)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.scales"][0, 3] = np.nan

    edit_quantized(tmp_path, spoil)
    with pytest.raises(Exception, match=r"up_proj\.scales: holds values that are not finite"):
        load_model(tmp_path, dtype="bfloat16", int4=DEVICE)
