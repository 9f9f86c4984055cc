"""Stored matrices: what other programs packed is what they make of it, and tensors that contradict are refused."""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxctx.model.config_reader import CheckpointError, Reader
from jaxctx.model.quantization.config import read_quantization
from jaxctx.model.quantization.grouped import dequantise
from jaxctx.model.quantization.matrix import find_matrix, quantized_modules, read_matrix
from jaxctx.model.stored_tensor import StoredTensor
from tests.jaxctx.model.quantization.encode import (
    AWQ_CONFIG,
    F8,
    FORMATS,
    FP8_CONFIG,
    GPTQ_CONFIG,
    TYPES,
    compressed,
)

MAIN = {"m.weight", "m.weight_packed", "m.qweight"}
WIDE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def headers(tensors):
    """As a file of these tensors has them."""
    kinds = {name: TYPES[array.dtype] for name, array in tensors.items()}
    return {
        name: StoredTensor(array.shape, WIDE_TYPES.get(kinds[name], kinds[name]), "file")
        for name, array in tensors.items()
    }


def find(tensors, config):
    """The matrix of module `m`."""
    quantization = read_quantization(Reader({"quantization_config": config}, "config.json"))
    found = headers(tensors)
    assert list(quantized_modules(found)) in (["m"], [])
    return find_matrix("m", found, quantization, tensors.__getitem__)


def load(tensors, config):
    """What is loaded of module `m`, in float32."""
    return dequantise(read_matrix(find(tensors, config), tensors.__getitem__))


INT4, INT8 = ("int", 4, "pack-quantized"), ("int", 8, "int-quantized")
FLOAT8 = ("float", 8, "float-quantized")
CONFIGS = {
    "awq": AWQ_CONFIG,
    "gptq": GPTQ_CONFIG,
    "gptq 8 bits": GPTQ_CONFIG | {"bits": 8},
    "gptq act order": GPTQ_CONFIG | {"desc_act": True},
    "gptq v2": GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"},
    "pack-quantized 4 group": compressed(*INT4, strategy="group", group_size=16),
    "pack-quantized 4 group zeros": compressed(*INT4, strategy="group", group_size=16, symmetric=False),
    "pack-quantized 4 channel zeros": compressed(*INT4, strategy="channel", symmetric=False),
    "pack-quantized 8 channel": compressed("int", 8, "pack-quantized", strategy="channel"),
    "int-quantized channel": compressed(*INT8, strategy="channel"),
    "int-quantized channel zeros": compressed(*INT8, strategy="channel", symmetric=False),
    "float-quantized tensor": compressed(*FLOAT8, strategy="tensor"),
    "float-quantized channel": compressed(*FLOAT8, strategy="channel"),
    "float-quantized block": compressed(*FLOAT8, strategy="block", block_structure=[8, 16]),
}


def golden_names():
    with np.load(Path(__file__).parents[3] / "goldens/quantised/matrices.npz") as stored:
        return {name.partition("/")[0] for name in stored.files}


def test_there_is_a_configuration_for_each_golden():
    assert golden_names() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_what_other_programs_make_of_them(name):
    with np.load(Path(__file__).parents[3] / "goldens/quantised/matrices.npz") as stored:
        arrays = {key.partition("/")[2]: stored[key] for key in stored.files if key.startswith(f"{name}/")}
    wide = arrays.pop("wide")
    tensors = {
        f"m.{leaf.removesuffix('.float8')}": array.view(F8) if leaf.endswith(".float8") else array
        for leaf, array in arrays.items()
    }
    np.testing.assert_array_equal(load(tensors, CONFIGS[name]), wide)


def stored(name, shape=(24, 64)):
    """Tensors of module `m` in this format, and their configuration."""
    form = FORMATS[name]
    tensors = {f"m.{leaf}": array for leaf, array in form.encode(form.make(0, shape)).items()}
    return tensors, form.config


def test_inputs_that_do_not_fill_the_last_word(monkeypatch):
    """And rows in several parts, of which blocks are no multiple."""
    from jaxctx.model.quantization import grouped

    monkeypatch.setattr(grouped, "AT_ONCE", 7 * 37)
    form = FORMATS["W4A16, a scale for each channel, with zeros"]
    numbers = form.make(0, (21, 37))
    tensors = {f"m.{leaf}": array for leaf, array in form.encode(numbers).items()}
    assert tensors["m.weight_packed"].shape == (21, 5)
    assert tensors["m.weight_zero_point"].shape == (3, 1)
    np.testing.assert_array_equal(load(tensors, form.config), numbers.reference)
    form = FORMATS["fp8 in blocks"]
    numbers = form.make(0, (50, 37))
    tensors = {f"m.{leaf}": array for leaf, array in form.encode(numbers).items()}
    np.testing.assert_array_equal(load(tensors, form.config), numbers.reference)


@pytest.mark.parametrize("name", FORMATS)
def test_each_tensor_that_is_missing_is_named(name):
    tensors, config = stored(name)
    optional = {"m.g_idx"} if not FORMATS[name].config.get("desc_act") else set()
    optional |= {"m.input_scale"}
    for missing in tensors.keys() - optional - MAIN:
        rest = {key: array for key, array in tensors.items() if key != missing}
        alias = {"m.weight_scale": "m.weight_scale_inv"} if config["quant_method"] == "fp8" else {}
        with pytest.raises(CheckpointError, match=rf"^file: {alias.get(missing, missing)}: missing, .* says"):
            find(rest, config)


@pytest.mark.parametrize("name", FORMATS)
def test_each_tensor_of_another_shape_or_type_is_named(name):
    tensors, config = stored(name)
    for changed in tensors.keys() - {"m.input_scale"}:
        others = [np.zeros((3, 5, 7), tensors[changed].dtype), tensors[changed].astype(np.float32)[None, None, None]]
        if changed not in MAIN:  # that alone may be of another matrix
            others.append(np.zeros((25, *tensors[changed].shape[1:]), tensors[changed].dtype))
        others.append(np.zeros(tensors[changed].shape, np.int64 if "scale" in changed else ml_dtypes.bfloat16))
        for other in others:
            with pytest.raises(CheckpointError, match=r"^file: m\.\w+: (shape|type|groups|\[)"):
                find(tensors | {changed: other}, config)


def test_groups_that_do_not_divide_are_refused():
    tensors, config = stored("awq")
    with pytest.raises(CheckpointError, match=r"^file: m\.qweight: groups of 24 do not divide 64 inputs"):
        find(tensors, config | {"group_size": 24})
    with pytest.raises(
        CheckpointError, match=r"^file: m\.scales: shape \[4, 24\], but .* for each 32 inputs, .* \[2, 24\]"
    ):
        find(tensors, config | {"group_size": 32})


def test_values_of_another_type_than_declared_are_refused():
    tensors, _ = stored("W8A8")
    with pytest.raises(CheckpointError, match=r"^file: m\.weight: type I8, but .* says float8_e4m3fn with a scale for"):
        find(tensors, FORMATS["FP8"].config)


def test_weights_that_no_scheme_is_for_are_refused():
    tensors, config = stored("W8A8")
    group = config["config_groups"]["group_0"] | {"weights": None}
    with pytest.raises(
        CheckpointError, match=r"^file: m: quantised, but quantization_config has no scheme for weights"
    ):
        find(tensors, config | {"config_groups": {"group_0": group}})


class NotSearched(dict):
    """Tensors that are asked for by their names alone, as the tensors of thousands of experts have to be."""

    def __iter__(self):
        raise AssertionError("all tensors were searched")

    keys = values = items = __iter__


def test_a_matrix_is_found_by_names_whatever_the_order_of_schemes():
    tensors, config = stored("W4A16")
    quantization = read_quantization(Reader({"quantization_config": config}, "config.json"))
    (right,) = quantization.schemes
    (other,) = read_quantization(Reader({"quantization_config": FORMATS["FP8"].config}, "config.json")).schemes
    found = NotSearched(headers(tensors))
    for schemes in ((other, right), (right, other)):
        both = dataclasses.replace(quantization, schemes=schemes)
        assert find_matrix("m", found, both, tensors.__getitem__).scheme == right
    for schemes, message in (((other,), r"m\.weight: missing"), ((), "m: quantised, but")):
        with pytest.raises(CheckpointError, match=rf"^file: {message}"):
            find_matrix("m", found, dataclasses.replace(quantization, schemes=schemes), tensors.__getitem__)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(name, value):
    tensors, config = stored(name)
    scales = next(key for key in tensors if key.endswith(("weight_scale", "weight_scale_inv", "scales")))
    tensors[scales] = np.array(tensors[scales])
    tensors[scales].reshape(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"^file: {scales}: holds values that are not finite"):
        load(tensors, config)


def test_groups_that_there_are_not_are_refused():
    tensors, config = stored("gptq in act order")
    for wrong in (4, -1):
        tensors["m.g_idx"][5] = wrong
        with pytest.raises(CheckpointError, match=rf"^file: m\.g_idx: holds {wrong}, and there are 4 groups"):
            load(tensors, config)


@pytest.mark.parametrize(("name", "largest"), [("gptq", 15), ("gptq in 8 bits", 255)])
def test_zeros_that_programs_read_in_different_ways_are_refused(name, largest):
    tensors, config = stored(name)
    tensors["m.qzeros"][2, 1] = -1  # all bits
    with pytest.raises(CheckpointError, match=rf"^file: m\.qzeros: holds {largest}, which is not 1 less than a number"):
        load(tensors, config)
    load(tensors, config | {"checkpoint_format": "gptq_v2"})


def test_zeros_of_symmetric_weights_must_be_0():
    tensors, config = stored("W8A8")
    zeros = np.zeros(tensors["m.weight_scale"].shape, np.int8)
    expected = load(tensors, config)
    np.testing.assert_array_equal(load(tensors | {"m.weight_zero_point": zeros}, config), expected)
    zeros[3] = 1
    with pytest.raises(CheckpointError, match=r"^file: m\.weight_zero_point: not 0, but .* weights are symmetric"):
        load(tensors | {"m.weight_zero_point": zeros}, config)
    tensors, config = stored("fp8 with a scale for each matrix")
    tensors["m.weight_zero_point"] = np.zeros((), F8)
    load(tensors, config)


def test_two_names_for_scales_of_float8():
    tensors, config = stored("fp8 in blocks")
    other = {"m.weight": tensors["m.weight"], "m.weight_scale": tensors["m.weight_scale_inv"]}
    np.testing.assert_array_equal(load(other, config), load(tensors, config))
    assert find(tensors, FP8_CONFIG | {"weight_block_size": [20, 24]}).scheme.block == (20, 24)


def test_the_tensors_of_a_matrix():
    tensors, config = stored("W4A16 in act order")
    matrix = find(tensors, config)
    assert matrix.tensors == tensors.keys()
    assert matrix.shape == (24, 64)
    assert dataclasses.replace(matrix, groups=None).tensors == tensors.keys() - {"m.weight_g_idx"}
