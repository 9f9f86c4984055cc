"""Whole checkpoints in every format: what is loaded, what it computes, and that conversion is the same model."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from jaxctx.engine.runner.matmul_choice import check_matmul_dtype
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.families.family import TensorPart
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.registry import FAMILIES
from jaxctx.model.weights import convert, formats, load_model, parts, stored_matrix_types
from tests.jaxctx.model.quantization.encode import F8, FORMATS, edit_quantized, write_quantized
from tests.jaxctx.model.weights.edits import edit_json

by_format = pytest.mark.parametrize("name", FORMATS)


def arrays(loaded):
    """Parameter name → its array."""
    return {spec.name: np.asarray(each) for spec, each in zip(loaded.model.specs, loaded.params, strict=True)}


@by_format
def test_every_matrix_is_what_its_format_says(tiny, tmp_path, name):
    form = FORMATS[name]
    found = write_quantized(tmp_path, tiny, form)
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
    write_quantized(tmp_path, tiny, FORMATS[name])
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
    write_quantized(tmp_path / "src", tiny, form)
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


@pytest.mark.parametrize("images", [False, True])
def test_a_configuration_under_its_older_name(tiny, tmp_path, images):
    form = FORMATS["W8A8"]
    write_quantized(tmp_path / "src", WITH_IMAGES if images else tiny, form)
    expected = load_model(tmp_path / "src")
    assert expected.model.weights_dtype == "int8"
    edit_json(tmp_path / "src/config.json", quantization_config=None, compression_config=dict(form.config))
    assert load_model(tmp_path / "src").revision == expected.revision
    convert(tmp_path / "src", tmp_path / "dst")
    assert load_model(tmp_path / "dst").revision == expected.revision


def test_what_becomes_wide_is_said(tiny, tmp_path):
    write_quantized(tmp_path, tiny, FORMATS["awq"])
    stored = "14 matrices of 4-bit integers with a scale for each 16 inputs"
    assert load_model(tmp_path).widened == f"{stored} were made float32, which takes 8 times their memory"
    found = load_model(tmp_path, dtype="bfloat16").widened
    assert found == f"{stored} were made bfloat16, which takes 4 times their memory"
    loaded = load_model(tmp_path, dtype="bfloat16", weights_dtype="int8")
    assert loaded.model.weights_dtype == "int8"
    assert loaded.widened == f"{stored} were made int8, which takes 2 times their memory"
    write_quantized(tmp_path / "8", tiny, FORMATS["W8A8"])
    assert load_model(tmp_path / "8").widened == ""


def test_matrices_that_are_left_out_stay_wide(tiny, tmp_path, dense_logits):
    """One of the first layer too, and one type of all layers."""
    left = ("layers.0.self_attn.q_proj", "down_proj")
    found = write_quantized(tmp_path / "src", tiny, FORMATS["W8A8"], leave_out=left)
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
    write_quantized(tmp_path / "int8", tiny, FORMATS["W8A8"])
    write_quantized(tmp_path / "left", tiny, FORMATS["W8A8"], leave_out=("down_proj",))
    found = {
        load_model(tmp_path / "int8").revision,
        load_model(tmp_path / "int8/wide").revision,
        load_model(tmp_path / "int8", dtype="bfloat16").revision,
        load_model(tmp_path / "left").revision,
    }
    assert len(found) == 4


def float8_beside_4_bits(ffn):
    """The format of float8 for attention and packed 4 bits for matrices of so many outputs or inputs."""
    float8, four = FORMATS["FP8"], FORMATS["W4A16"]
    groups = {
        "a": float8.config["config_groups"]["group_0"] | {"format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "b": four.config["config_groups"]["group_0"] | {"format": "pack-quantized", "targets": ["re:.*mlp.*"]},
    }
    return dataclasses.replace(
        four,
        config=four.config | {"format": "mixed-precision", "config_groups": groups},
        make=lambda seed, shape: (four if ffn in shape else float8).make(seed, shape),
        encode=lambda n: (four if n.values.dtype == np.int64 else float8).encode(n),
    )


def test_two_schemes_in_one_checkpoint(tiny, tmp_path):
    """Float8 of attention stays, packed 4 bits of the feed-forward become wide."""
    found = write_quantized(tmp_path, tiny, float8_beside_4_bits(48))
    loaded = load_model(tmp_path)
    held = arrays(loaded)
    assert loaded.model.weights_dtype == "float8_e4m3fn"
    for name, numbers in found.items():
        if "mlp" in name:
            np.testing.assert_array_equal(held[name], numbers.reference)
        else:
            np.testing.assert_array_equal(held[name], numbers.values.view(np.uint8))


@pytest.mark.parametrize("symmetric_first", [True, False])
def test_symmetric_groups_beside_groups_with_zeros(tiny, tmp_path, symmetric_first):
    """Whatever their order: a scheme without zeros would take modules of the other, and then refuse their zeros."""
    without, zeros = FORMATS["W4A16"], FORMATS["W4A16 with zeros"]
    forms = [without, zeros] if symmetric_first else [zeros, without]
    groups = {f"group_{place}": form.config["config_groups"]["group_0"] for place, form in enumerate(forms)}
    both = dataclasses.replace(
        without,
        config=without.config | {"config_groups": groups},
        make=lambda seed, shape: (zeros if 48 in shape else without).make(seed, shape),
        encode=lambda n: (zeros if n.zeros.any() else without).encode(n),
    )
    found = write_quantized(tmp_path, tiny, both)
    assert {bool(numbers.zeros.any()) for numbers in found.values()} == {True, False}
    held = arrays(load_model(tmp_path, dtype="float32"))
    for name, numbers in found.items():
        np.testing.assert_array_equal(held[name], numbers.reference)


def test_values_of_8_bits_are_loaded_as_nothing_else(tiny, tmp_path):
    write_quantized(tmp_path, tiny, FORMATS["FP8"])
    with pytest.raises(
        Exception, match=r"^weights_dtype: the weights in model\.safetensors are stored as float8_e4m3fn"
    ):
        load_model(tmp_path, weights_dtype="int8")


def test_progress_counts_what_is_read(tiny, tmp_path):
    write_quantized(tmp_path, tiny, FORMATS["awq"])
    calls = []
    load_model(tmp_path, progress=lambda done, total: calls.append((done, total)))
    matrices = sum(each.values.size for each in write_quantized(tmp_path, tiny, FORMATS["awq"]).values())
    wide = sum(a.size for name, a in arrays(load_model(tmp_path)).items()) - matrices
    assert calls[0] == (0, matrices // 2 + 4 * wide)
    assert calls[-1][0] == calls[-1][1]


def test_scales_of_activations_and_of_kv_are_passed_over(tiny, tmp_path):
    form = FORMATS["FP8, a scale for each matrix"]
    config = form.config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    write_quantized(tmp_path, tiny, dataclasses.replace(form, config=config))
    revision = load_model(tmp_path).revision
    scales = {f"model.layers.0.self_attn.{kind}_scale": np.ones(1, ml_dtypes.bfloat16) for kind in "kv"}
    edit_quantized(tmp_path, lambda tensors: tensors.update(scales))
    assert load_model(tmp_path).revision == revision


def test_zeros_that_some_programs_write_as_biases_are_passed_over(tiny, tmp_path):
    write_quantized(tmp_path, tiny, FORMATS["gptq"])
    revision = load_model(tmp_path).revision
    bias = np.zeros(64, np.float16)
    edit_quantized(tmp_path, lambda tensors: tensors.update({f"{Q}.bias": bias}))
    assert load_model(tmp_path).revision == revision
    bias[5] = 1
    edit_quantized(tmp_path, lambda tensors: tensors.update({f"{Q}.bias": bias}))
    with pytest.raises(CheckpointError, match=rf"{Q}\.bias: unexpected"):
        load_model(tmp_path)


def test_such_biases_are_read_in_one_go(tiny, tmp_path, monkeypatch):
    """The header of a file is read each time it is opened, and an expert may have one each."""
    found = write_quantized(tmp_path, tiny, FORMATS["gptq"])
    opened = []
    open_safetensors = formats.open_safetensors
    monkeypatch.setattr(formats, "open_safetensors", lambda *file: opened.append(file) or open_safetensors(*file))
    load_model(tmp_path)
    without = len(opened)
    biases = {name.removesuffix("weight") + "bias": np.zeros(each.values.shape[0]) for name, each in found.items()}
    zeros = {name: bias.astype(np.float16) for name, bias in biases.items()}
    edit_quantized(tmp_path, lambda tensors: tensors.update(zeros))
    opened.clear()
    load_model(tmp_path)
    assert len(opened) == without + 1 < len(biases)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", lambda t: t.pop(f"{Q}.scales"), rf"{Q}\.scales: missing, quantization_config says 4-bit integers"),
        ("awq", lambda t: t.update({f"{Q}.g": np.zeros(1, np.float32)}), rf"{Q}\.g: unexpected"),
        ("awq", lambda t: t.pop(f"{Q}.qweight"), rf"{Q}\.(qzeros|scales): "),
        ("W8A8", lambda t: t.pop(f"{Q}.weight"), rf"{Q}\.weight: missing, shape \[64, 32\] expected"),
        (
            "W8A8",
            lambda t: t.update({f"{Q}.weight": np.zeros((64, 32), np.float32)}),
            rf"{Q}\.weight: type float32, but other weights are int8",
        ),
        (
            "W8A8",
            lambda t: t.update({f"{Q}.weight": np.zeros((64, 48), np.int8)}),
            rf"{Q}\.weight: shape \[64, 48\], but config\.json says \[64, 32\]",
        ),
        (
            "W8A8",
            lambda t: t.update({"model.embed_tokens.weight": np.zeros((96, 32), np.int8)}),
            r"model\.embed_tokens\.weight_scale: missing",
        ),
        (
            "FP8",
            lambda t: t[f"{Q}.weight"].__setitem__((5, 7), np.nan),
            rf"{Q}\.weight: holds values that are not finite",
        ),
        (
            "fp8 in blocks",
            lambda t: t[f"{Q}.weight"].__setitem__((5, 7), np.nan),
            rf"{Q}\.weight: holds values that are not finite in float32; the first is nan at \[5, 7\]",
        ),
        (
            "fp8 in blocks",
            lambda t: t[f"{Q}.weight_scale_inv"].fill(3e38),
            rf"{Q}\.weight: holds values that are not finite in float32",
        ),
    ],
)
def test_what_contradicts_is_refused_by_name(tiny, tmp_path, name, change, message):
    write_quantized(tmp_path, tiny, FORMATS[name])
    edit_quantized(tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: {message}"):
        load_model(tmp_path)


def test_a_quantised_head_becomes_wide(tiny, tmp_path):
    """A head never has 8 bits here."""
    found = write_quantized(tmp_path, tiny, FORMATS["W8A8"])
    numbers = FORMATS["W8A8"].make(99, (96, 32))
    encoded = {f"lm_head.{leaf}": array for leaf, array in FORMATS["W8A8"].encode(numbers).items()}
    edit_quantized(tmp_path, lambda tensors: tensors.update(encoded))
    held = arrays(load_model(tmp_path))
    np.testing.assert_array_equal(held["lm_head.weight"], numbers.reference)
    assert held[next(iter(found))].dtype == np.int8


@pytest.mark.parametrize(("declared", "dtype"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32",) * 2])
@pytest.mark.parametrize("name", ["W8A8", "awq"])
def test_with_a_quantised_embedding_the_declared_type_counts(tiny, tmp_path, name, declared, dtype):
    """It becomes wide, so that the type it has as shown says nothing."""
    write_quantized(tmp_path, tiny, FORMATS[name])
    embedding = FORMATS[name].encode(FORMATS[name].make(99, (96, 32)))
    edit_quantized(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    encoded = {f"model.embed_tokens.{leaf}": array for leaf, array in embedding.items()}
    edit_quantized(tmp_path, lambda tensors: tensors.update(encoded))
    edit_json(tmp_path / "config.json", dtype=declared)
    model = load_model(tmp_path).model
    assert (model.dtype, model.kv.dtype) == (dtype, dtype)
    assert load_model(tmp_path, dtype="float32").model.dtype == "float32"


WITH_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    },
}


def test_nothing_is_asked_of_quantised_tensors_for_images(tmp_path):
    """Which are not read: of inputs that groups do not divide, without scales, or of a type that no weight has."""
    write_quantized(tmp_path, WITH_IMAGES, FORMATS["W4A16"])
    expected = load_model(tmp_path)
    numbers = FORMATS["W4A16"].make(7, (8, 20))
    encoded = FORMATS["W4A16"].encode(numbers)
    image = {f"vision_tower.fc2.{leaf}": array for leaf, array in encoded.items()} | {
        "vision_tower.fc1.weight": np.ones((4, 4), np.int8),
        "vision_tower.embeddings.position_ids": np.arange(4, dtype=np.int64),
        "multi_modal_projector.x_blocks": np.ones((2, 2), np.int32),
    }
    edit_quantized(tmp_path, lambda tensors: tensors.update(image))
    loaded = load_model(tmp_path)
    assert (loaded.revision, loaded.widened) == (expected.revision, expected.widened)
    assert stored_matrix_types(tmp_path) == stored_matrix_types(tmp_path / "wide")


def test_an_orbax_checkpoint_is_not_of_another_program(tiny, tmp_path):
    write_quantized(tmp_path / "src", tiny, FORMATS["awq"])
    convert(tmp_path / "src/wide", tmp_path / "dst")
    edit_json(tmp_path / "dst/config.json", quantization_config=dict(FORMATS["awq"].config))
    with pytest.raises(CheckpointError, match=r"^config\.json: quantization_config: not in an Orbax checkpoint"):
        load_model(tmp_path / "dst")


def test_quantised_tensors_without_a_configuration_are_refused(tiny, tmp_path):
    for name, kind in (("W8A8", "I8"), ("FP8", "F8_E4M3"), ("awq", "I32")):
        write_quantized(tmp_path, tiny, FORMATS[name])
        edit_json(tmp_path / "config.json", quantization_config=None)
        with pytest.raises(CheckpointError, match=rf": type {kind} is not one of float32"):
            load_model(tmp_path)


class Fused:
    """A family whose query, key and value are one tensor."""

    @staticmethod
    def parts_of(config, parameter):
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        starts = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}
        for name, start in starts.items():
            if f".{name}." in parameter:
                rows = start, start + (queries if name == "q_proj" else keys)
                return (TensorPart(parameter.replace(name, "qkv_proj"), rows),)
        return (TensorPart(parameter),)


@by_format
def test_matrices_that_are_one_tensor(tiny, tmp_path, monkeypatch, name):
    family = dataclasses.replace(FAMILIES["Qwen3ForCausalLM"], parts_of=Fused.parts_of)
    monkeypatch.setattr(parts, "FAMILIES", {**FAMILIES, "Qwen3ForCausalLM": family})
    found = write_quantized(tmp_path, tiny, FORMATS[name])
    loaded = load_model(tmp_path)
    held, wide = arrays(loaded), arrays(load_model(tmp_path / "wide"))
    assert {"qkv_proj"} == {key.split(".")[-2] for key in found if "self_attn" in key and "o_proj" not in key}
    kept = FORMATS[name].kept
    for spec in loaded.model.specs:
        if spec.is_scale or spec.name not in wide:
            continue
        values = held[spec.name]
        if spec.dtype == kept:
            numbers = values.view(F8) if kept == "float8_e4m3fn" else values
            values = numbers.astype(np.float64) * held[spec.scale_name].astype(np.float64)[:, None]
        np.testing.assert_array_equal(values.astype(np.float32), wide[spec.name])


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "max_position_embeddings": 64,
}


@by_format
def test_experts_whose_routers_are_left_out(tmp_path, dense_logits, name):
    """The matrices of all experts of a layer are one parameter, their scales another."""
    write_quantized(tmp_path, EXPERTS, FORMATS[name], leave_out=("mlp.gate.",))
    loaded, wide = load_model(tmp_path, dtype="float32"), load_model(tmp_path / "wide")
    assert loaded.model.weights_dtype == (FORMATS[name].kept or "float32")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 24))
    expected = dense_logits(wide.model, wide.params, tokens)
    found = dense_logits(loaded.model, loaded.params, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())


def load_and_compare(directory, dense_logits):
    """The checkpoint's model, which gives the logits of `…/wide`, and is the same once it is converted."""
    loaded, wide = load_model(directory, dtype="float32"), load_model(directory / "wide")
    tokens = np.random.default_rng(0).integers(0, 96, (1, 24))
    expected = dense_logits(wide.model, wide.params, tokens)
    found = dense_logits(loaded.model, loaded.params, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())
    convert(directory, directory / "converted", dtype="float32")
    converted = load_model(directory / "converted")
    assert (converted.revision, converted.model) == (loaded.revision, loaded.model)
    return loaded


GATES = tuple(f".experts.{number}.gate_proj" for number in range(EXPERTS["num_experts"]))


@pytest.mark.parametrize(
    ("left", "is_wide"),
    [
        (("experts",), {"q_proj": False, "gate_proj": True, "down_proj": True}),
        (GATES, {"q_proj": False, "gate_proj": True, "down_proj": False}),
        (("self_attn",), {"q_proj": True, "gate_proj": False, "down_proj": False}),
    ],
    ids=["experts", "a matrix of experts", "attention"],
)
@pytest.mark.parametrize("name", ["W8A8", "FP8"])
def test_experts_or_attention_that_are_left_out_stay_wide(tmp_path, dense_logits, name, left, is_wide):
    write_quantized(tmp_path, EXPERTS, FORMATS[name], leave_out=(*left, "mlp.gate."))
    loaded = load_and_compare(tmp_path, dense_logits)
    assert loaded.model.weights_dtype == FORMATS[name].kept
    of_first_layer = {
        spec.name.split(".")[-2]: spec.dtype == "float32"
        for spec in loaded.model.specs
        if "layers.0." in spec.name and spec.name.endswith("proj.weight")
    }
    assert {matrix: of_first_layer[matrix] for matrix in is_wide} == is_wide


def test_the_type_that_experts_alone_are_multiplied_as_is_the_models(tmp_path):
    """As where other matrices have 8 bits too: it can be asked for, and another one is another model."""
    write_quantized(tmp_path, EXPERTS, FORMATS["W8A8"], leave_out=("self_attn", "layers.1.mlp", "mlp.gate."))
    wide, rounding = (load_model(tmp_path, dtype="bfloat16", matmul_dtype=each) for each in ("bfloat16", "int8"))
    check_matmul_dtype(wide.model, "int8", "cpu")
    for loaded, matmul_dtype in ((wide, "bfloat16"), (rounding, "int8")):
        assert (loaded.model.weights_dtype, loaded.model.matmul_dtype) == ("int8", matmul_dtype)
    assert wide.model != rounding.model
    assert wide.revision != rounding.revision


def test_experts_that_become_wide_beside_attention_in_float8(tmp_path, dense_logits):
    wide = {**EXPERTS, "mlp_only_layers": [], "moe_intermediate_size": 48}
    write_quantized(tmp_path, wide, float8_beside_4_bits(48), leave_out=("mlp.gate.",))
    loaded = load_and_compare(tmp_path, dense_logits)
    assert loaded.model.weights_dtype == "float8_e4m3fn"
    assert "18 matrices of 4-bit integers" in loaded.widened


@pytest.mark.parametrize(("left", "named"), [((".experts.1.",), 1), ((".experts.0.", ".experts.2."), 0)])
def test_the_experts_of_a_matrix_are_stored_alike(tmp_path, left, named):
    write_quantized(tmp_path, EXPERTS, FORMATS["W8A8"], leave_out=(*left, "mlp.gate."))
    tensor = rf"model\.layers\.0\.mlp\.experts\.{named}\.down_proj\.weight"
    why = "type float32, but other weights are int8; the experts of a matrix must be stored alike"
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: {tensor}: {why}$"):
        load_model(tmp_path)


def test_an_expert_that_is_missing_is_named(tmp_path):
    write_quantized(tmp_path, EXPERTS, FORMATS["W8A8"], leave_out=("experts", "mlp.gate."))
    tensor = "model.layers.0.mlp.experts.1.up_proj.weight"
    edit_quantized(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(CheckpointError, match=rf"^model\.safetensors: {tensor}: missing, shape"):
        load_model(tmp_path)
