"""Whole checkpoints in every format: what is loaded, what it computes, and that conversion is the same model."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.weights import convert, load_model, stored_matrix_types
from tests.jaxctx.model.quantization.encode import FORMATS, write_quantised

by_format = pytest.mark.parametrize("name", FORMATS)


def arrays(loaded):
    """Parameter name → its array."""
    return {spec.name: np.asarray(each) for spec, each in zip(loaded.model.specs, loaded.params, strict=True)}


@by_format
def test_every_matrix_is_what_its_format_says(tiny, tmp_path, name):
    form = FORMATS[name]
    found = write_quantised(tmp_path, tiny, form)
    assert len(found) == 7 * tiny.layers
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.model.weights_dtype == (form.kept or "float32")
    held = arrays(loaded)
    for parameter, numbers in found.items():
        if form.kept is None:
            np.testing.assert_array_equal(held[parameter], numbers.reference)
            continue
        stored = numbers.values.view(np.uint8) if form.kept == "float8_e4m3fn" else numbers.values
        assert held[parameter].dtype == EIGHT_BITS[form.kept]
        np.testing.assert_array_equal(held[parameter], stored)
        scales = np.broadcast_to(numbers.scales.astype(np.float32).reshape(-1), numbers.values.shape[:1])
        np.testing.assert_array_equal(held[f"{parameter}_scale"], scales)


@by_format
def test_logits_are_those_of_the_dequantised_model(tiny, tmp_path, dense_logits, name):
    write_quantised(tmp_path, tiny, FORMATS[name])
    loaded, wide = load_model(tmp_path, dtype="float32"), load_model(tmp_path / "wide")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 24))
    expected = dense_logits(wide.model, wide.params, tokens)
    found = dense_logits(loaded.model, loaded.params, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())
    if FORMATS[name].kept is None:
        assert loaded.revision == wide.revision  # it is the same model


@by_format
def test_plan_and_conversion_see_the_same_model(tiny, tmp_path, name):
    form = FORMATS[name]
    write_quantised(tmp_path / "src", tiny, form)
    assert stored_matrix_types(tmp_path / "src").dtype == form.kept
    loaded = load_model(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst")
    converted = load_model(tmp_path / "dst")
    assert converted.revision == loaded.revision
    assert converted.model == loaded.model
    assert converted.widened == ""
    assert "quantization_config" not in json.loads((tmp_path / "dst/config.json").read_text())
    (tmp_path / "src/model.safetensors").unlink()
    assert stored_matrix_types(tmp_path / "src").dtype == form.kept  # of config.json alone


def test_what_becomes_wide_is_said(tiny, tmp_path):
    write_quantised(tmp_path, tiny, FORMATS["awq"])
    stored = "14 matrices of 4-bit integers with a scale for each 16 inputs"
    assert load_model(tmp_path).widened == f"{stored} were made float32, which takes 8 times their memory"
    found = load_model(tmp_path, dtype="bfloat16").widened
    assert found == f"{stored} were made bfloat16, which takes 4 times their memory"
    loaded = load_model(tmp_path, dtype="bfloat16", weights_dtype="int8")
    assert loaded.model.weights_dtype == "int8"
    assert loaded.widened == f"{stored} were made int8, which takes 2 times their memory"
    write_quantised(tmp_path / "8", tiny, FORMATS["W8A8"])
    assert load_model(tmp_path / "8").widened == ""


def test_matrices_that_are_left_out_stay_wide(tiny, tmp_path, dense_logits):
    """One of the first layer too, and one type of all layers."""
    left = ("layers.0.self_attn.q_proj", "down_proj")
    found = write_quantised(tmp_path / "src", tiny, FORMATS["W8A8"], leave_out=left)
    assert len(found) == 14 - 3
    wide_names = {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    }
    assert stored_matrix_types(tmp_path / "src").wide == wide_names
    loaded = load_model(tmp_path / "src", dtype="bfloat16")
    assert loaded.model.weights_dtype == "int8"
    types = {spec.name: spec.dtype for spec in loaded.model.specs}
    assert {types[name] for name in wide_names} == {"bfloat16"}
    assert {types[name] for name in found} == {"int8"}
    convert(tmp_path / "src", tmp_path / "dst", dtype="bfloat16")
    assert load_model(tmp_path / "dst").revision == loaded.revision
    exact, expected = load_model(tmp_path / "src"), load_model(tmp_path / "src/wide")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 24))
    logits = dense_logits(expected.model, expected.params, tokens)
    np.testing.assert_allclose(dense_logits(exact.model, exact.params, tokens), logits, atol=1e-4 * logits.std())


def test_each_precision_is_another_revision(tiny, tmp_path):
    write_quantised(tmp_path / "int8", tiny, FORMATS["W8A8"])
    write_quantised(tmp_path / "left", tiny, FORMATS["W8A8"], leave_out=("down_proj",))
    found = {
        load_model(tmp_path / "int8").revision,
        load_model(tmp_path / "int8/wide").revision,
        load_model(tmp_path / "int8", dtype="bfloat16").revision,
        load_model(tmp_path / "left").revision,
    }
    assert len(found) == 4


def test_two_schemes_in_one_checkpoint(tiny, tmp_path):
    """Float8 of attention stays, packed 4 bits of the feed-forward become wide."""
    float8, four = FORMATS["FP8"], FORMATS["W4A16"]
    groups = {
        "a": float8.config["config_groups"]["group_0"] | {"format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "b": four.config["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": ["re:.*mlp.*"]},
    }
    both = dataclasses.replace(
        four,
        config=four.config | {"format": "mixed-precision", "config_groups": groups},
        make=lambda seed, shape: (four if 48 in shape else float8).make(seed, shape),
        encode=lambda n: (four if n.values.dtype == np.int64 else float8).encode(n),
    )
    found = write_quantised(tmp_path, tiny, both)
    loaded = load_model(tmp_path)
    held = arrays(loaded)
    assert loaded.model.weights_dtype == "float8_e4m3fn"
    for name, numbers in found.items():
        if "mlp" in name:
            np.testing.assert_array_equal(held[name], numbers.reference)
        else:
            np.testing.assert_array_equal(held[name], numbers.values.view(np.uint8))


def test_values_of_8_bits_are_loaded_as_nothing_else(tiny, tmp_path):
    write_quantised(tmp_path, tiny, FORMATS["FP8"])
    with pytest.raises(
        Exception, match=r"^weights_dtype: the weights in model\.safetensors are stored as float8_e4m3fn"
    ):
        load_model(tmp_path, weights_dtype="int8")


def test_progress_counts_what_is_read(tiny, tmp_path):
    write_quantised(tmp_path, tiny, FORMATS["awq"])
    calls = []
    load_model(tmp_path, progress=lambda done, total: calls.append((done, total)))
    matrices = sum(each.values.size for each in write_quantised(tmp_path, tiny, FORMATS["awq"]).values())
    wide = sum(a.size for name, a in arrays(load_model(tmp_path)).items()) - matrices
    assert calls[0] == (0, matrices // 2 + 4 * wide)
    assert calls[-1][0] == calls[-1][1]


def test_scales_of_activations_and_of_kv_are_passed_over(tiny, tmp_path):
    form = FORMATS["FP8, a scale for each matrix"]
    config = form.config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    write_quantised(tmp_path, tiny, dataclasses.replace(form, config=config))
    revision = load_model(tmp_path).revision
    from tests.jaxctx.model.quantization.encode import load_tensors, save_tensors

    tensors = load_tensors(tmp_path / "model.safetensors")
    for kind in "kv":
        tensors[f"model.layers.0.self_attn.{kind}_scale"] = np.ones(1, ml_dtypes.bfloat16)
    save_tensors(tmp_path / "model.safetensors", tensors)
    assert load_model(tmp_path).revision == revision
