"""Loading: values, types and revision of a model, and checkpoints that do not hold what their configuration says."""

import dataclasses
import json
import os
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.model.config import AdapterSlots
from jaxctx.model.functional import EIGHT_BITS
from jaxctx.model.weights import CheckpointError, convert, load, load_model, write_orbax
from jaxctx.model.weights.formats import OrbaxSource
from jaxctx.model.weights.quantize import quantize
from scripts.checkpoints import init_random, save, write_random
from tests.jaxctx.model.weights.edits import Q_PROJ, assert_refused, edit_json, edit_tensors

GOLDENS = Path(__file__).parents[3] / "goldens"


def test_every_parameter_is_loaded_as_it_is_stored(checkpoint, tiny):
    loaded = load_model(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    assert loaded.model.config == tiny
    assert loaded.parameters == sum(array.size for array in stored.values())
    for spec, array in zip(loaded.model.specs, loaded.params, strict=True):
        assert (np.asarray(array) == stored[spec.name]).all()


def test_shards_single_file_and_orbax_are_the_same_model(checkpoint, sharded, tmp_path):
    convert(sharded, tmp_path / "orbax")
    single, split, orbax = (load_model(path) for path in (checkpoint, sharded, tmp_path / "orbax"))
    assert single.revision == split.revision == orbax.revision
    assert single.model == split.model == orbax.model
    for a, b in zip(single.params, orbax.params, strict=True):
        assert (a == b).all()


@pytest.fixture(params=["mixtral_8_experts", "qwen2moe_shared_expert"])
def of_experts(request, tmp_path):
    """A directory of shards whose experts are a tensor each."""
    config = json.loads(str(np.load(GOLDENS / f"{request.param}.npz")["config"]))
    write_random(tmp_path / "experts", config, seed=1, shards=5)
    return tmp_path / "experts"


@pytest.mark.parametrize("weights_dtype", [None, "int8"])
def test_experts_are_stacked_from_their_tensors(of_experts, tmp_path, weights_dtype):
    """And kept so by a conversion: the same model."""
    stored = {name: array for file in of_experts.glob("*.safetensors") for name, array in load_file(file).items()}
    loaded = load_model(of_experts, weights_dtype=weights_dtype)
    (part,) = {name.partition(".experts.")[0] for name in stored if ".layers.1." in name and ".experts.0." in name}
    arrays = {spec.name: np.asarray(a) for spec, a in zip(loaded.model.specs, loaded.params, strict=True)}
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        found = arrays[f"model.layers.1.mlp.experts.{ours}.weight"]
        for number, expert in enumerate(found):
            theirs = theirs if "block_sparse_moe" in part else ours
            want = stored[f"{part}.experts.{number}.{theirs}.weight"]
            if weights_dtype is not None:
                scale = arrays[f"model.layers.1.mlp.experts.{ours}.weight_scale"][number]
                want, scales = quantize(want, weights_dtype)
                np.testing.assert_array_equal(scale, scales)
            np.testing.assert_array_equal(expert, want)
    convert(of_experts, tmp_path / "orbax", weights_dtype=weights_dtype)
    assert load_model(tmp_path / "orbax").revision == loaded.revision


@pytest.mark.parametrize("weights_dtype", [None, "int8"])
def test_experts_are_read_from_tensors_of_gate_and_up_in_turn(tmp_path, weights_dtype):
    """As gpt-oss has them, with the inputs first. A conversion keeps the same model."""
    config = json.loads(str(np.load(GOLDENS / "gptoss_gqa4_yarn.npz")["config"]))
    write_random(tmp_path / "published", config, seed=1, shards=3)
    files = (tmp_path / "published").glob("*.safetensors")
    stored = {name: array for file in files for name, array in load_file(file).items()}
    loaded = load_model(tmp_path / "published", weights_dtype=weights_dtype)
    arrays = {spec.name: np.asarray(a) for spec, a in zip(loaded.model.specs, loaded.params, strict=True)}
    layer = "model.layers.1"
    of_gate_and_up = stored[f"{layer}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
    wanted = {
        "gate_proj": (of_gate_and_up[:, ::2], stored[f"{layer}.mlp.experts.gate_up_proj_bias"][:, ::2]),
        "up_proj": (of_gate_and_up[:, 1::2], stored[f"{layer}.mlp.experts.gate_up_proj_bias"][:, 1::2]),
        "down_proj": (
            stored[f"{layer}.mlp.experts.down_proj"].swapaxes(1, 2),
            stored[f"{layer}.mlp.experts.down_proj_bias"],
        ),
    }
    for name, (weight, bias) in wanted.items():
        np.testing.assert_array_equal(arrays[f"{layer}.mlp.experts.{name}.bias"], bias)
        if weights_dtype is not None:
            weight, scale = quantize(weight, weights_dtype)
            np.testing.assert_array_equal(arrays[f"{layer}.mlp.experts.{name}.weight_scale"], scale)
        np.testing.assert_array_equal(arrays[f"{layer}.mlp.experts.{name}.weight"], weight)
    np.testing.assert_array_equal(arrays[f"{layer}.mlp.gate.bias"], stored[f"{layer}.mlp.router.bias"])
    np.testing.assert_array_equal(arrays[f"{layer}.self_attn.sinks"], stored[f"{layer}.self_attn.sinks"])
    convert(tmp_path / "published", tmp_path / "orbax", weights_dtype=weights_dtype)
    assert load_model(tmp_path / "orbax").revision == loaded.revision


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path):
    config = json.loads(str(np.load(GOLDENS / "mixtral_8_experts.npz")["config"]))
    write_random(tmp_path, config, seed=1)
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][:, 1:]}))
    assert_refused(tmp_path, rf"{re.escape(name)}: shape \[64, 159\], but config.json says \[64, 160\]")
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    assert_refused(tmp_path, f"{re.escape(name)}: missing")


@pytest.mark.parametrize(("stored", "wanted", "loaded_as"), [
    ("float32", None, "float32"),
    ("bfloat16", None, "bfloat16"),
    ("float16", None, "bfloat16"),
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
])  # fmt: skip
def test_the_type_is_that_of_the_embedding_or_the_one_that_is_asked_for(tiny, tmp_path, stored, wanted, loaded_as):
    write_random(tmp_path, tiny, seed=1, dtype=stored)
    loaded = load_model(tmp_path, dtype=wanted)
    assert {str(array.dtype) for array in loaded.params} == {loaded_as}
    assert loaded.model.dtype == loaded.model.kv.dtype == loaded_as
    assert load_model(tmp_path, dtype=wanted, kv_dtype="float32").model.kv.dtype == "float32"


def test_revisions_stay_what_they_were(tmp_path):
    """Snapshots have them. A family that came later, with fields of its own, changes none."""
    write_random(tmp_path / "dense", json.loads(str(np.load(GOLDENS / "llama_gqa2_yarn.npz")["config"])), seed=1)
    write_random(tmp_path / "sparse", json.loads(str(np.load(GOLDENS / "mixtral_8_experts.npz")["config"])), seed=1)
    assert load_model(tmp_path / "dense").revision == "fbb91b8abf39fcaa29ec010f1a477b08"
    assert load_model(tmp_path / "sparse").revision == "fde3d81094c460e59cb7861b0989acd0"


def test_the_revision_changes_with_every_bit(checkpoint, tiny):
    before = load_model(checkpoint).revision
    assert load_model(checkpoint).revision == before
    assert load_model(checkpoint, dtype="bfloat16").revision != before

    def flip(tensors):
        tensors[Q_PROJ].view(np.uint32)[3, 5] ^= 1

    edit_tensors(checkpoint, flip)
    flipped = load_model(checkpoint).revision
    assert flipped != before
    edit_json(checkpoint / "config.json", rms_norm_eps=1e-5)
    assert load_model(checkpoint).revision not in (before, flipped)


def test_the_revision_stays_where_no_computed_value_changes(checkpoint):
    before = load_model(checkpoint).revision
    edit_json(checkpoint / "config.json", eos_token_id=[3, 4], transformers_version="9")
    assert load_model(checkpoint).revision == before


def test_the_revision_is_of_the_positions_that_are_computed_not_of_those_that_are_declared(tiny, tmp_path):
    plain = dataclasses.replace(tiny, architecture="LlamaForCausalLM", query_key_norm="none")
    declared = dataclasses.replace(plain, declared_positions=4096)
    for name, config in (("plain", plain), ("declared", declared)):
        write_random(tmp_path / name, config, seed=1)
    assert load_model(tmp_path / "declared").model.config.declared_positions is not None
    assert load_model(tmp_path / "declared").revision == load_model(tmp_path / "plain").revision


def test_progress_counts_bytes(sharded, tmp_path):
    seen = []
    load_model(sharded, progress=lambda done, total: seen.append((done, total)))
    size = sum(array.nbytes for path in sharded.glob("*.safetensors") for array in load_file(path).values())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert len(seen) == 1 + len(load_model(sharded).model.specs)


def test_tensors_that_exporters_write_again_are_ignored(tiny, tmp_path):
    write_random(tmp_path, dataclasses.replace(tiny, tied=True), seed=1)
    before = load_model(tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    edit_tensors(tmp_path, add)
    assert load_model(tmp_path).revision == before.revision
    assert "lm_head.weight" not in {spec.name for spec in before.model.specs}


@pytest.mark.parametrize("row", [0, 95])
def test_a_head_beside_a_tied_embedding_that_is_another_one_is_refused(tiny, tmp_path, monkeypatch, row):
    """transformers would compute with it."""
    monkeypatch.setattr(load, "HEAD_ROWS", 40)  # three blocks
    write_random(tmp_path, dataclasses.replace(tiny, tied=True), seed=1)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].copy()
    head[row, 3] += 1
    match = "lm_head.weight: differs from model.embed_tokens.weight.*set tie_word_embeddings to false"
    for wrong in (head, head[:-1]):
        edit_tensors(tmp_path, lambda tensors, wrong=wrong: tensors.update({"lm_head.weight": wrong.copy()}))
        assert_refused(tmp_path, match)


def test_a_directory_of_modelopt_is_refused_by_name(checkpoint):
    (checkpoint / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert_refused(checkpoint, "hf_quant_config.json: weights that ModelOpt quantised are not supported")


def test_a_path_that_is_no_checkpoint_directory_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", "not a directory")
    assert_refused(tmp_path, r"^config\.json: missing")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff\xfe", '{"a":' * 100_000], ids=["", "list", "cut", "utf", "deep"])
def test_a_malformed_configuration_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(checkpoint, r"^config\.json: (not JSON|must be an object)")


def test_an_unknown_architecture_is_refused(checkpoint):
    edit_json(checkpoint / "config.json", architectures=["FalconForCausalLM"])
    assert_refused(checkpoint, r"^config\.json: architectures: 'FalconForCausalLM' is not supported")


def test_a_missing_tensor_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    assert_refused(checkpoint, rf"^model\.safetensors: {Q_PROJ}: missing, shape \[64, 32\] expected")


def test_an_unexpected_tensor_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.ones((2, 2))}))
    assert_refused(
        checkpoint, r"model\.layers\.2\.mlp\.up_proj\.weight: type F64 is not one of float32, bfloat16, float16"
    )
    edit_tensors(
        checkpoint, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.ones(2, np.float32)})
    )
    assert_refused(checkpoint, r"^model\.safetensors: model\.layers\.2\.mlp\.up_proj\.weight: unexpected")


def test_a_wrong_shape_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.copy()}))
    assert_refused(checkpoint, rf"^model\.safetensors: {Q_PROJ}: shape \[32, 64\], but config\.json says \[64, 32\]")


def test_a_type_that_is_no_floating_point_is_refused(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype(np.int8)}))
    assert_refused(checkpoint, rf"^model\.safetensors: {Q_PROJ}: type I8 is not one of")
    assert_refused(checkpoint, "type I8", dtype="float32")


def test_an_unknown_type_to_load_as_is_refused(checkpoint):
    assert_refused(checkpoint, "^dtype: must be float32 or bfloat16, not 'float16'", dtype="float16")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "negative NaN"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite_are_refused(tiny, tmp_path, value, stored, dtype):
    write_random(tmp_path, tiny, seed=1, dtype=stored)
    value = np.copysign(np.nan, -1) if isinstance(value, str) else value
    for name, index in [(Q_PROJ, (63, 31)), ("model.norm.weight", (0,)), ("model.embed_tokens.weight", (95, 31))]:
        edit_tensors(tmp_path, lambda tensors, name=name, index=index: tensors[name].__setitem__(index, value))
        match = rf"^model\.safetensors: {name}: holds values that are not finite in {dtype}; the first is .* at"
        assert_refused(tmp_path, rf"{match} \[{', '.join(map(str, index))}\]", dtype=dtype)
        edit_tensors(tmp_path, lambda tensors, name=name, index=index: tensors[name].__setitem__(index, 1))
    load_model(tmp_path, dtype=dtype)


def test_values_that_overflow_the_type_to_load_as_are_refused(checkpoint, monkeypatch):
    edit_tensors(checkpoint, lambda tensors: tensors[Q_PROJ].__setitem__((5, 7), np.finfo(np.float32).max))
    load_model(checkpoint)
    assert_refused(
        checkpoint, rf"{Q_PROJ}: holds values that are not finite in bfloat16; the first is inf", dtype="bfloat16"
    )
    monkeypatch.setattr(load, "FINITE_AT_ONCE", 3)  # not a divisor of the size
    assert_refused(checkpoint, rf"{Q_PROJ}: .* at \[5, 7\]", dtype="bfloat16")


def test_values_of_orbax_that_are_not_finite_are_refused(tmp_path, checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors[Q_PROJ].__setitem__((5, 7), np.nan))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}: holds values that are not finite"):
        convert(checkpoint, tmp_path / "orbax")
    assert not (tmp_path / "orbax").exists()
    tiny_config = load.read_config(checkpoint)
    model, params = init_random(tiny_config, 0)
    broken = tuple(np.full_like(np.asarray(array), np.nan) for array in params)
    save(tmp_path / "trained", model, broken)
    assert_refused(
        tmp_path / "trained", r"^params: .*: holds values that are not finite in float32; the first is nan at"
    )


def test_parameters_larger_than_memory_are_refused(checkpoint, monkeypatch):
    needed = sum(array.nbytes for array in load_file(checkpoint / "model.safetensors").values())
    monkeypatch.setattr(load, "physical_memory", lambda: needed)
    load_model(checkpoint)
    monkeypatch.setattr(load, "physical_memory", lambda: needed - 1)
    assert_refused(
        checkpoint, r"^model\.safetensors: the parameters take .* GiB as float32, and this machine has .* GiB"
    )
    load_model(checkpoint, dtype="bfloat16")


def test_pipes_and_huge_files_are_refused_unread(checkpoint):
    """A pipe would be waited for, and a file of any size read."""
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")  # which goes by an index
    for name in ("config.json", "model.safetensors.index.json"):
        kept = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else None
        (checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(checkpoint / name)
        assert_refused(checkpoint, rf"^{name}: not a file")
        (checkpoint / name).unlink()
        with (checkpoint / name).open("wb") as file:
            file.truncate(2**30)
        assert_refused(checkpoint, rf"^{name}: 1,073,741,824 bytes, more than")
        (checkpoint / name).unlink()
        if kept is not None:
            (checkpoint / name).write_bytes(kept)


def test_missing_unexpected_and_misshapen_arrays_of_orbax_are_refused(orbax, tiny, tmp_path):
    edit_json(orbax / "config.json", num_hidden_layers=3)
    assert_refused(orbax, r"^params: model\.layers\.2\..*: missing, shape")
    edit_json(orbax / "config.json", num_hidden_layers=1)
    assert_refused(orbax, r"^params: model\.layers\.1\..*: unexpected")
    edit_json(orbax / "config.json", num_hidden_layers=2, vocab_size=100)
    assert_refused(orbax, r"^params: .*: shape \[96, 32\], but config\.json says \[100, 32\]")


def test_integers_in_orbax_are_refused(tiny, tmp_path):
    model, params = init_random(tiny, 0)
    save(tmp_path / "out", model, tuple(np.asarray(array).astype(np.int32) for array in params))
    assert_refused(tmp_path / "out", r"^params: .*: type int32 is not one of")


def test_float16_is_loaded_as_bfloat16(tiny, tmp_path):
    """float16 weights are kept to bfloat16's precision, not to its neighbours' overflow."""
    write_random(tmp_path, tiny, seed=1, dtype="float16")
    stored = load_file(tmp_path / "model.safetensors")[Q_PROJ]
    loaded = load_model(tmp_path)
    index = [spec.name for spec in loaded.model.specs].index(Q_PROJ)
    assert (np.asarray(loaded.params[index]) == stored.astype(ml_dtypes.bfloat16)).all()


SCALE = Q_PROJ + "_scale"


@pytest.fixture
def narrow(checkpoint, tmp_path):
    """The configuration and arrays of a checkpoint whose weights are stored in int8."""
    convert(checkpoint, tmp_path / "int8", weights_dtype="int8")
    source = OrbaxSource(tmp_path / "int8")
    return json.loads((tmp_path / "int8/config.json").read_text()), dict(source.read(list(source.tensors)))


@pytest.mark.parametrize("weights_dtype", EIGHT_BITS)
@pytest.mark.parametrize(("dtype", "computes"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_weights_are_quantised_at_load(checkpoint, weights_dtype, dtype, computes):
    loaded = load_model(checkpoint, dtype=dtype, weights_dtype=weights_dtype)
    stored = load_file(checkpoint / "model.safetensors")
    assert (loaded.model.dtype, loaded.model.weights_dtype) == (computes, weights_dtype)
    assert loaded.parameters == sum(array.size for array in stored.values())
    arrays = {spec.name: np.asarray(array) for spec, array in zip(loaded.model.specs, loaded.params, strict=True)}
    values, scale = quantize(stored[Q_PROJ], weights_dtype)  # of what is stored, not of that as bfloat16
    assert arrays[Q_PROJ].dtype == EIGHT_BITS[weights_dtype]
    np.testing.assert_array_equal(arrays[Q_PROJ].view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(arrays[SCALE], scale)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(arrays[name], stored[name].astype(arrays[name].dtype))
        assert arrays[name].dtype == computes


def test_each_type_of_weights_is_another_revision(checkpoint):
    types = [{}, {"weights_dtype": "int8"}, {"weights_dtype": "float8_e4m3fn"}, {"dtype": "bfloat16"}]
    types.append({"dtype": "bfloat16", "weights_dtype": "int8"})
    assert len({load_model(checkpoint, **each).revision for each in types}) == len(types)
    assert (
        load_model(checkpoint, weights_dtype="bfloat16").revision == load_model(checkpoint, dtype="bfloat16").revision
    )


def test_rounded_activations_are_another_revision(checkpoint):
    """Pages that one machine computed serve on another that multiplies as the other exact type, and nowhere else."""

    def revision(matmul_dtype):
        loaded = load_model(checkpoint, dtype="bfloat16", weights_dtype="int8", matmul_dtype=matmul_dtype)
        assert loaded.model.matmul_dtype == (matmul_dtype or "bfloat16")
        return loaded.revision

    assert revision(None) == revision("bfloat16") == revision("float32") != revision("int8")


def test_weights_that_are_not_finite_are_refused_before_they_are_quantised(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors[Q_PROJ].__setitem__((5, 7), np.inf))
    assert_refused(checkpoint, rf"^model\.safetensors: {Q_PROJ}: holds values .* inf at \[5, 7\]", weights_dtype="int8")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"weights_dtype": "int4"}, "^weights_dtype: must be float32, bfloat16, int8 or float8_e4m3fn, not 'int4'"),
        ({"weights_dtype": "bfloat16", "dtype": "float32"}, "^weights_dtype: bfloat16, but dtype is float32"),
    ],
)
def test_types_that_do_not_exist_or_contradict_each_other_are_refused(checkpoint, types, message):
    assert_refused(checkpoint, message, **types)


@pytest.mark.parametrize("weights_dtype", ["float8_e4m3fn", "float32"])
def test_weights_of_8_bits_are_loaded_as_nothing_else(narrow, tmp_path, weights_dtype):
    assert load_model(tmp_path / "int8", weights_dtype="int8").model.weights_dtype == "int8"
    message = rf"^weights_dtype: the weights in params are stored as int8 and cannot be loaded as {weights_dtype}"
    assert_refused(tmp_path / "int8", message, weights_dtype=weights_dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop(SCALE), rf"{SCALE}: missing, shape \[64\] expected"),
        (lambda arrays: arrays.update({SCALE: np.ones((64, 1), np.float32)}), rf"{SCALE}: shape \[64, 1\], but"),
        (lambda arrays: arrays[SCALE].__setitem__(3, np.nan), rf"{SCALE}: holds values .* nan at \[3\]"),
        (lambda arrays: arrays.update({SCALE: np.ones(64, np.int8)}), rf"{SCALE}: type int8, which only"),
        (lambda arrays: arrays.update({Q_PROJ: np.ones((64, 32), np.float32)}), rf"{Q_PROJ}: type float32, but other"),
        (
            lambda arrays: arrays.update({Q_PROJ: np.ones((64, 32), ml_dtypes.float8_e4m3fn)}),
            r": type (int8, but other weights are float8_e4m3fn|float8_e4m3fn, but other weights are int8)",
        ),
        (
            lambda arrays: arrays.update({"model.norm.weight": np.ones(32, np.int8)}),
            r"model\.norm\.weight: type int8, which only layers' matrices may have",
        ),
        (
            lambda arrays: arrays.update({"model.norm.weight_scale": np.ones(1, np.float32)}),
            r"model\.norm\.weight_scale: unexpected",
        ),
    ],
)
def test_stored_scales_and_types_are_checked(narrow, tmp_path, change, message):
    config, arrays = narrow
    arrays = {name: np.array(array) for name, array in arrays.items()}
    change(arrays)
    write_orbax(tmp_path / "changed", config, arrays, {})
    assert_refused(tmp_path / "changed", rf"^params: .*{message}")


def test_float8_that_is_no_number_is_refused(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "float8", weights_dtype="float8_e4m3fn")
    source = OrbaxSource(tmp_path / "float8")
    arrays = {name: np.array(array) for name, array in source.read(list(source.tensors))}
    arrays[Q_PROJ][5, 7] = np.nan
    write_orbax(tmp_path / "changed", json.loads((tmp_path / "float8/config.json").read_text()), arrays, {})
    message = rf"{Q_PROJ}: holds values that are not finite in float8_e4m3fn; the first is nan at \[5, 7\]"
    assert_refused(tmp_path / "changed", message)


def test_scales_in_a_checkpoint_without_8_bits_are_unexpected(checkpoint):
    edit_tensors(checkpoint, lambda tensors: tensors.update({SCALE: np.ones(64, np.float32)}))
    assert_refused(checkpoint, rf"{SCALE}: unexpected")
    assert_refused(checkpoint, rf"{SCALE}: unexpected", weights_dtype="int8")


def test_8_bits_need_less_memory(checkpoint, monkeypatch):
    needed = sum(array.nbytes for array in load_model(checkpoint, weights_dtype="int8").params)
    monkeypatch.setattr(load, "physical_memory", lambda: needed)
    load_model(checkpoint, weights_dtype="int8")
    monkeypatch.setattr(load, "physical_memory", lambda: needed - 1)
    assert_refused(checkpoint, "the parameters take .* GiB as int8", weights_dtype="int8")


def test_slots_for_adapters_are_zeros_and_change_no_revision(checkpoint):
    plain, wide = load_model(checkpoint), load_model(checkpoint, adapters=AdapterSlots(2, 4))
    assert wide.revision == plain.revision
    assert wide.parameters == plain.parameters
    empty = [np.asarray(a) for spec, a in zip(wide.model.specs, wide.params, strict=True) if spec.is_of_adapters]
    assert len(empty) == 2 * 7 * wide.model.config.layers
    assert not any(array.any() for array in empty)


def test_tensors_for_images_are_not_read(tmp_path, dense_logits):
    """Of Gemma 3 the text model is loaded, by the names that it has beside a model of images."""
    text = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
    }
    with_images = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    write_random(tmp_path / "images", with_images, seed=1)
    file = tmp_path / "images" / "model.safetensors"
    tensors = load_file(file)
    alone = tmp_path / "text"
    write_random(alone, {"architectures": ["Gemma3ForCausalLM"], **text}, seed=1)
    save_file({name.removeprefix("language_model."): each for name, each in tensors.items()}, alone / file.name)
    image = {
        "vision_tower.x.weight": np.ones((3, 3), np.float32),
        "vision_tower.position_ids": np.arange(3),  # of a type that no weight has
        "multi_modal_projector.y": np.ones(3, np.float32),
    }
    save_file(tensors | image, file)

    loaded, expected = load_model(tmp_path / "images"), load_model(alone)
    assert loaded.model.dtype == expected.model.dtype == "float32"
    tokens = np.arange(20)[None]
    np.testing.assert_array_equal(
        dense_logits(loaded.model, loaded.params, tokens), dense_logits(expected.model, expected.params, tokens)
    )
    save_file(tensors | {"language_model.model.layers.0.other.weight": image["multi_modal_projector.y"]}, file)
    with pytest.raises(CheckpointError, match=r"language_model\.model\.layers\.0\.other\.weight: unexpected"):
        load_model(tmp_path / "images")
    convert(alone, tmp_path / "converted")
    assert load_model(tmp_path / "converted").revision == expected.revision


def test_a_model_with_images_is_converted_to_its_text_model(tmp_path):
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48},
    }
    write_random(tmp_path / "src", raw, seed=1)
    convert(tmp_path / "src", tmp_path / "dst")
    assert load_model(tmp_path / "dst").revision == load_model(tmp_path / "src").revision


def test_a_fused_tensor_of_another_size_is_refused(tmp_path):
    raw = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    write_random(tmp_path, raw, seed=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for size in (63, 65):
        save_file(tensors | {name: np.resize(tensors[name], (size, 32))}, file)
        with pytest.raises(CheckpointError, match=rf"qkv_proj\.weight: shape \[{size}, 32\], but .* \[64, 32\]"):
            load_model(tmp_path)
    save_file({key: each for key, each in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight: missing, shape \[64, 32\] expected"):
        load_model(tmp_path)
