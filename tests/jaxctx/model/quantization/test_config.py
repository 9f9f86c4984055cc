"""`quantization_config`: what each method's fields say, and which are refused by name."""

import pytest

from jaxctx.model.config_reader import CheckpointError, Reader
from jaxctx.model.quantization.config import read_quantization
from tests.jaxctx.model.quantization.encode import AWQ_CONFIG, FORMATS, FP8_CONFIG, GPTQ_CONFIG, compressed


def read(config):
    """The record of this `quantization_config`."""
    return read_quantization(Reader({"quantization_config": config}, "config.json"))


def scheme(config):
    """The only scheme of it."""
    (found,) = read(config).schemes
    return found


def assert_refused(config, match):
    with pytest.raises(CheckpointError, match=rf"^config\.json: quantization_config\.{match}"):
        read(config)


def test_without_one_there_is_none():
    assert read_quantization(Reader({}, "config.json")) is None
    assert read(None) is None


@pytest.mark.parametrize(
    "method",
    [
        "bitsandbytes",
        "hqq",
        "quanto",
        "aqlm",
        "torchao",
        "modelopt",
        "eetq",
        "auto-round",
        "AWQ",
        None,
        4,
        ["awq"],
    ],
)
def test_other_methods_are_refused_by_name(method):
    assert_refused({"quant_method": method, "bits": 4}, r"quant_method: .* is not supported; supported are compressed-")


@pytest.mark.parametrize("config", [True, 4, "awq", ["awq"]])
def test_what_is_no_object_is_refused(config):
    with pytest.raises(CheckpointError, match=r"^config\.json: quantization_config: must be an object"):
        read(config)


@pytest.mark.parametrize("name", FORMATS)
def test_what_stays_in_8_bits(name):
    assert read(FORMATS[name].config).kept_dtype == FORMATS[name].kept


@pytest.mark.parametrize(("name", "form"), FORMATS.items())
def test_an_unknown_field_that_says_something_is_refused(name, form):
    for value in (True, 1, "x", [1], {"a": 1}):
        assert_refused(form.config | {"rotation": value}, r"rotation: .* is not understood, and may change what")
    for value in (None, False, 0, "", [], {}):
        assert read(form.config | {"rotation": value}) == read(form.config)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bits": 3}, "bits: 3 is not supported; supported are 4"),
        ({"w_bit": 8, "bits": None}, "w_bit: 8 is not supported"),
        ({"version": "gemv"}, "version: 'gemv' is not supported; supported is gemm"),
        ({"version": "marlin"}, "version"),
        ({"version": 1}, "version"),
        ({"zero_point": False}, "zero_point: false is not supported without sym"),
        ({"zero_point": False, "sym": "yes"}, "sym: must be true or false"),
        ({"checkpoint_format": "gemv"}, "checkpoint_format: 'gemv' is not supported"),
        ({"method": "gptq"}, "method: 'gptq' is not supported; supported are awq"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"desc_act": True}, "desc_act: True is not supported"),
        ({"dynamic": {"+:x": {}}}, "dynamic"),
        ({"group_size": 0}, "group_size: must be -1 or at least 1"),
        ({"group_size": -2}, "group_size: must be an integer from -1"),
        ({"group_size": 16.5}, "group_size"),
        ({"group_size": True}, "group_size"),
        ({"group_size": 2**40}, "group_size"),
    ],
)
def test_awq(change, field):
    assert_refused(AWQ_CONFIG | change, field)


def test_names_that_fields_of_awq_had():
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert scheme(old) == scheme(AWQ_CONFIG | {"group_size": 64})
    assert scheme(AWQ_CONFIG | {"group_size": -1}).block == (1, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bits": 3}, "bits: 3 is not supported; supported are 4, 8"),
        ({"bits": None}, "bits: must be an integer"),
        ({"group_size": None}, "group_size: must be an integer"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported; supported are gptq, gptq_v2"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "format: 'gptq_v2', but checkpoint_format = gptq"),
        ({"method": "qqq"}, "method: 'qqq' is not supported; supported are gptq"),
        ({"is_marlin_format": True}, "is_marlin_format: True is not supported"),
        ({"pack_dtype": "int16"}, "pack_dtype: 'int16' is not supported"),
        ({"desc_act": "yes"}, "desc_act: must be true or false"),
        ({"dynamic": {"+:.*gate.*": {"bits": 8}}}, "dynamic: .* is not supported, but for modules that are left out"),
        ({"dynamic": ["-:x"]}, "dynamic"),
    ],
)
def test_gptq(change, field):
    assert_refused(GPTQ_CONFIG | change, field)


def test_what_their_newest_writers_add():
    added = {"pack_dtype": "int32", "desc_act": False, "lm_head": False, "meta": {"uri": "x"}}
    written = GPTQ_CONFIG | added | {"method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"}
    assert read(written) == read(GPTQ_CONFIG | {"checkpoint_format": "gptq_v2"})
    for symmetric in (True, False):
        names = {"method": "awq", "format": "gemm", "checkpoint_format": "gemm", "sym": symmetric}
        assert read(AWQ_CONFIG | added | names) == read(AWQ_CONFIG)
    written = FP8_CONFIG | {
        "dequantize": False,
        "modules_to_convert": None,
        "scale_fmt": "float",
        "expert_dtype": "fp8",
    }
    assert read(written) == read(FP8_CONFIG)


AUTO_ROUND = {
    "act_bits": 16,
    "act_data_type": "int",
    "act_dynamic": True,
    "amp": True,
    "autoround_version": "0.9.0",
    "batch_size": 8,
    "data_type": "int",
    "dataset": "NeelNanda/pile-10k",
    "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False,
    "enable_quanted_input": True,
    "gradient_accumulate_steps": 1,
    "iters": 200,
    "low_gpu_mem_usage": True,
    "lr": 0.005,
    "minmax_lr": 0.005,
    "nsamples": 128,
    "provider": "auto-round",
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "to_quant_block_names": "model.layers",
}


def test_what_auto_round_writes():
    gptq = {"packing_format": "auto_round:auto_gptq", "damp_percent": 0.01, "true_sequential": False, "sym": True}
    assert read(GPTQ_CONFIG | AUTO_ROUND | gptq) == read(GPTQ_CONFIG)
    for symmetric in (True, False):
        awq = {"packing_format": "auto_round:auto_awq", "sym": symmetric, "zero_point": not symmetric}
        assert read(AWQ_CONFIG | AUTO_ROUND | awq) == read(AWQ_CONFIG)


@pytest.mark.parametrize("config", [AWQ_CONFIG, GPTQ_CONFIG], ids=["awq", "gptq"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data_type": "mx_fp"}, "data_type: 'mx_fp' is not supported; supported are int"),
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format: .* is not supported"),
        ({"super_bits": 6}, "super_bits: 6 is not understood"),
        ({"regex_config": {".*": {"bits": 8}}}, "regex_config: .* is not understood"),
        ({"hadamard_config": {"block_size": 32}}, "hadamard_config: .* is not understood"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_auto_round_may_do_besides_is_refused(config, change, field):
    assert_refused(config | AUTO_ROUND | change, field)


def test_flags_that_are_null_are_false():
    assert read(GPTQ_CONFIG | {"desc_act": None}) == read(GPTQ_CONFIG)
    assert read(AWQ_CONFIG | {"desc_act": None, "zero_point": None}) == read(AWQ_CONFIG)
    assert read(group(dynamic=None, symmetric=None)) == read(group())


def test_modules_that_gptq_leaves_out():
    assert read(GPTQ_CONFIG | {"dynamic": {"-:.*gate.*": {}}}) == read(GPTQ_CONFIG)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fmt": "e5m2"}, "fmt: 'e5m2' is not supported; supported are e4m3"),
        ({"scale_fmt": "ue4m3"}, "scale_fmt"),
        ({"expert_dtype": "fp4"}, "expert_dtype: 'fp4' is not supported; supported are fp8"),
        ({"weight_block_size": [128]}, "weight_block_size: must be two integers"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [128, 1.5]}, "weight_block_size"),
        ({"weight_block_size": "128"}, "weight_block_size"),
        ({"weight_block_size": 128}, "weight_block_size"),
    ],
)
def test_fp8(change, field):
    assert_refused(FP8_CONFIG | change, field)


def test_blocks_of_fp8():
    assert scheme(FP8_CONFIG | {"weight_block_size": [128, 64]}).block == (128, 64)
    assert scheme(FP8_CONFIG).block == (0, 0)


def group(**change):
    """A configuration of int8 with these fields of its weights."""
    return compressed("int", 8, "int-quantized", **({"strategy": "channel"} | change))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (group(num_bits=4), r"config_groups\.group_0\.weights\.num_bits: 4 is not supported in int-quantized"),
        (group(num_bits="8"), r"config_groups\.group_0\.weights\.num_bits"),
        (group(type="float"), r"config_groups\.group_0\.weights\.type: 'float' is not supported; supported are int"),
        (group(strategy="tensor_group"), r"config_groups\.group_0\.weights\.strategy: 'tensor_group' is not supported"),
        (group(strategy="group"), r"config_groups\.group_0\.weights\.group_size: missing, but strategy = group"),
        (group(group_size=16), r"config_groups\.group_0\.weights\.group_size: 16, but strategy = channel"),
        (group(strategy="block"), r"config_groups\.group_0\.weights\.block_structure: must be two integers"),
        (group(dynamic=True), r"config_groups\.group_0\.weights\.dynamic: true is not supported"),
        (group(actorder="other"), r"config_groups\.group_0\.weights\.actorder"),
        (group(symmetric="yes"), r"config_groups\.group_0\.weights\.symmetric"),
        (group(rotated=True), r"config_groups\.group_0\.weights\.rotated: True is not understood"),
        (group() | {"format": "marlin-24"}, "format: 'marlin-24' is not supported; supported are pack-quantized"),
        (group() | {"format": "nvfp4-pack-quantized"}, "format"),
        (group() | {"format": None}, "format: None is not supported"),
        (group() | {"format": "dense"}, "format: 'dense' is not supported"),
        (group() | {"config_groups": {}}, "config_groups: must name at least one group"),
        (group() | {"config_groups": {"a": 1}}, r"config_groups\.a: must be an object"),
        (group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        (group() | {"transform_config": {"config_groups": {"R1": {}}}}, r"transform_config\.config_groups"),
        (
            compressed("float", 8, "float-quantized", strategy="channel", symmetric=False),
            r"config_groups\.group_0\.weights\.symmetric: false is not supported for type float",
        ),
        (
            compressed("int", 8, "float-quantized", strategy="channel"),
            r"config_groups\.group_0\.weights\.type: 'int' is not what float-quantized holds",
        ),
        (
            compressed("int", 3, "pack-quantized", strategy="channel"),
            r"config_groups\.group_0\.weights\.num_bits: 3 is not supported in pack-quantized; supported are 4, 8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_compressed_tensors(config, field):
    assert_refused(config, field)


def test_the_older_name_of_the_field():
    older = Reader({"compression_config": group()}, "config.json")
    assert read_quantization(older) == read(group())
    both = Reader({"compression_config": {"quant_method": "other"}, "quantization_config": group()}, "config.json")
    assert read_quantization(both) == read(group())
    with pytest.raises(CheckpointError, match=r"^config\.json: compression_config\.format: 'marlin-24' is not"):
        read_quantization(Reader({"compression_config": group() | {"format": "marlin-24"}}, "config.json"))


def test_strategies_that_are_not_named():
    assert scheme(group(strategy=None)).block == (0, 0)
    assert scheme(group(strategy=None, group_size=-1)).block == (1, 0)
    assert scheme(group(strategy=None, group_size=32)).block == (1, 32)
    assert scheme(group(strategy=None, block_structure="16x32")).block == (16, 32)
    assert scheme(group(strategy="group", group_size=-1)).block == (1, 0)


def test_groups_without_weights_and_groups_alike():
    config = group()
    first = config["config_groups"]["group_0"]
    groups = {"a": first, "b": first | {"weights": None}, "c": first}
    assert read(config | {"config_groups": groups}) == read(config)


def test_groups_beyond_all_bounds_are_refused():
    alike, config = group()["config_groups"]["group_0"], group()
    many = {str(number): alike for number in range(4096)}
    assert read(config | {"config_groups": many}) == read(config)
    assert_refused(config | {"config_groups": many | {"x": alike}}, "config_groups: has 4,097 groups, more than 4,096")
    sizes = [group(strategy="group", group_size=size)["config_groups"]["group_0"] for size in range(1, 66)]
    groups = {str(number): each for number, each in enumerate(sizes)}
    assert_refused(config | {"config_groups": groups}, "config_groups: has 65 ways to store weights, more than 64")
    del groups["0"]
    assert len(read(config | {"config_groups": groups}).schemes) == 64


def test_a_format_for_each_group():
    config = group()
    groups = {
        "a": config["config_groups"]["group_0"] | {"format": "int-quantized"},
        "b": FORMATS["W4A16"].config["config_groups"]["group_0"] | {"format": "pack-quantized"},
    }
    found = read(config | {"format": "mixed-precision", "config_groups": groups})
    assert [each.dtype for each in found.schemes] == ["int8", "int4"]
    assert found.kept_dtype == "int8"
    groups["b"] |= {"format": "nvfp4-pack-quantized"}
    assert_refused(config | {"format": "mixed-precision", "config_groups": groups}, r"config_groups\.b\.format")
