import dataclasses
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.errors import AlreadyExists
from jaxctx.model.weights import CheckpointError, convert, load, load_model
from scripts.checkpoints import init_random, save, write_random

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tiny, tmp_path):
    write_random(tmp_path / "hf", tiny, seed=1)
    return tmp_path / "hf"


@pytest.fixture
def sharded(tiny, tmp_path):
    write_random(tmp_path / "sharded", tiny, seed=1, shards=3)
    return tmp_path / "sharded"


def edit(directory, change):
    """Apply `change` to the dictionary of tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def edit_json(path, **change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


# --- what loads ----------------------------------------------------------------------------------------------------


def test_values_and_counts(checkpoint, tiny):
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


@pytest.mark.parametrize(("stored", "wanted", "loaded_as"), [
    ("float32", None, "float32"),
    ("bfloat16", None, "bfloat16"),
    ("float16", None, "bfloat16"),
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
])  # fmt: skip
def test_types(tiny, tmp_path, stored, wanted, loaded_as):
    write_random(tmp_path, tiny, seed=1, dtype=stored)
    loaded = load_model(tmp_path, dtype=wanted)
    assert {str(array.dtype) for array in loaded.params} == {loaded_as}
    assert loaded.model.dtype == loaded.model.kv.dtype == loaded_as
    assert load_model(tmp_path, dtype=wanted, kv_dtype="float32").model.kv.dtype == "float32"


def test_the_revision_follows_every_bit(checkpoint, tiny):
    before = load_model(checkpoint).revision
    assert load_model(checkpoint).revision == before
    assert load_model(checkpoint, dtype="bfloat16").revision != before

    def flip(tensors):
        tensors[Q].view(np.uint32)[3, 5] ^= 1

    edit(checkpoint, flip)
    flipped = load_model(checkpoint).revision
    assert flipped != before
    edit_json(checkpoint / "config.json", rms_norm_eps=1e-5)
    assert load_model(checkpoint).revision not in (before, flipped)


def test_what_changes_no_value_changes_no_revision(checkpoint):
    before = load_model(checkpoint).revision
    edit_json(checkpoint / "config.json", eos_token_id=[3, 4], transformers_version="9")
    assert load_model(checkpoint).revision == before


def test_progress_counts_bytes(sharded, tmp_path):
    seen = []
    load_model(sharded, progress=lambda done, total: seen.append((done, total)))
    size = sum(array.nbytes for path in sharded.glob("*.safetensors") for array in load_file(path).values())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)
    assert len(seen) == 1 + len(load_model(sharded).model.specs)


def test_tied_embeddings_and_leftovers_of_exporters(tiny, tmp_path):
    write_random(tmp_path, dataclasses.replace(tiny, tied=True), seed=1)
    before = load_model(tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    edit(tmp_path, add)
    assert load_model(tmp_path).revision == before.revision
    assert "lm_head.weight" not in {spec.name for spec in before.model.specs}


# --- what converts -------------------------------------------------------------------------------------------------


def test_convert_narrows_and_keeps_the_companions(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "unrelated.py").write_text("raise SystemExit")
    edit_json(checkpoint / "config.json", torch_dtype="float32", extra=1)
    seen = []
    convert(checkpoint, tmp_path / "out", dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "params", "tokenizer.json"]
    assert seen[-1][0] == seen[-1][1]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(tmp_path / "out").revision == load_model(checkpoint, dtype="bfloat16").revision


def test_save_writes_what_was_trained(tiny, tmp_path):
    model, params = init_random(tiny, 0, "bfloat16")
    (tmp_path / "words.json").write_text("{}")
    save(tmp_path / "made/here", model, params, companions={"tokenizer.json": tmp_path / "words.json"})
    loaded = load_model(tmp_path / "made/here")
    assert loaded.model.config == dataclasses.replace(tiny, dtype="bfloat16")
    assert all((a == b).all() for a, b in zip(loaded.params, params, strict=True))
    assert (tmp_path / "made/here/tokenizer.json").exists()


def test_convert_never_overwrites_and_leaves_nothing_half_done(checkpoint, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(AlreadyExists):
        convert(checkpoint, tmp_path / "there")
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        convert(checkpoint, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "there"]


# --- what is refused -----------------------------------------------------------------------------------------------


def refused(path, match, **options):
    with pytest.raises(CheckpointError, match=match):
        load_model(path, **options)


def test_no_directory(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a directory")
    refused(tmp_path, r"^config\.json: missing")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff\xfe", '{"a":' * 100_000], ids=["", "list", "cut", "utf", "deep"])
def test_malformed_configuration(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    refused(checkpoint, r"^config\.json: (not JSON|must be an object)")


def test_unknown_architecture(checkpoint):
    edit_json(checkpoint / "config.json", architectures=["FalconForCausalLM"])
    refused(checkpoint, r"^config\.json: architectures: 'FalconForCausalLM' is not supported")


def test_no_weights_and_pickled_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "no weights")
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    refused(checkpoint, r"^pytorch_model\.bin: pickled weights are not read, because loading them can run code")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_file(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, r"^model-00002-of-00003\.safetensors: missing$")


def test_missing_tensor(checkpoint):
    edit(checkpoint, lambda tensors: tensors.pop(Q))
    refused(checkpoint, rf"^model\.safetensors: {Q}: missing, shape \[64, 32\] expected")


def test_tensor_that_only_the_index_knows(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.ghost": "model-00001-of-00003.safetensors"})
    refused(
        sharded,
        r"^model-00001-of-00003\.safetensors: model\.ghost: missing, though model\.safetensors\.index\.json says",
    )


@pytest.mark.parametrize("shard", ["../hf/model.safetensors", "/etc/passwd", "a.bin", 7, None])
def test_index_that_points_elsewhere(sharded, shard):
    edit_json(sharded / "model.safetensors.index.json", weight_map={Q: shard})
    refused(sharded, rf"^model\.safetensors\.index\.json: weight_map: {Q}: .* is not the name of a")


@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_empty_index(sharded, weight_map):
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    refused(sharded, r"^model\.safetensors\.index\.json: weight_map: must be a non-empty object")


def test_unexpected_tensor(checkpoint):
    edit(checkpoint, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.ones((2, 2))}))
    refused(checkpoint, r"model\.layers\.2\.mlp\.up_proj\.weight: type F64 is not one of float32, bfloat16, float16")
    edit(checkpoint, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": np.ones(2, np.float32)}))
    refused(checkpoint, r"^model\.safetensors: model\.layers\.2\.mlp\.up_proj\.weight: unexpected")


def test_wrong_shape(checkpoint):
    edit(checkpoint, lambda tensors: tensors.update({Q: tensors[Q].T.copy()}))
    refused(checkpoint, rf"^model\.safetensors: {Q}: shape \[32, 64\], but config\.json says \[64, 32\]")


def test_wrong_type(checkpoint):
    edit(checkpoint, lambda tensors: tensors.update({Q: tensors[Q].astype(np.int8)}))
    refused(checkpoint, rf"^model\.safetensors: {Q}: type I8 is not one of")
    refused(checkpoint, "type I8", dtype="float32")


def test_unknown_run_type(checkpoint):
    refused(checkpoint, "^dtype: must be float32 or bfloat16, not 'float16'", dtype="float16")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, "negative NaN"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_no_numbers(tiny, tmp_path, value, stored, dtype):
    write_random(tmp_path, tiny, seed=1, dtype=stored)
    value = np.copysign(np.nan, -1) if isinstance(value, str) else value
    for name, where in [(Q, (63, 31)), ("model.norm.weight", (0,)), ("model.embed_tokens.weight", (95, 31))]:
        edit(tmp_path, lambda tensors, name=name, where=where: tensors[name].__setitem__(where, value))
        match = rf"^model\.safetensors: {name}: holds values that are not finite in {dtype}; the first is .* at"
        refused(tmp_path, rf"{match} \[{', '.join(map(str, where))}\]", dtype=dtype)
        edit(tmp_path, lambda tensors, name=name, where=where: tensors[name].__setitem__(where, 1))
    load_model(tmp_path, dtype=dtype)


def test_values_that_only_the_wanted_type_has_no_number_for(checkpoint, monkeypatch):
    edit(checkpoint, lambda tensors: tensors[Q].__setitem__((5, 7), np.finfo(np.float32).max))
    load_model(checkpoint)
    refused(checkpoint, rf"{Q}: holds values that are not finite in bfloat16; the first is inf", dtype="bfloat16")
    monkeypatch.setattr(load, "FINITE_AT_ONCE", 3)  # not a divisor of the size
    refused(checkpoint, rf"{Q}: .* at \[5, 7\]", dtype="bfloat16")


def test_no_number_in_orbax(tmp_path, checkpoint):
    edit(checkpoint, lambda tensors: tensors[Q].__setitem__((5, 7), np.nan))
    with pytest.raises(CheckpointError, match=rf"{Q}: holds values that are not finite"):
        convert(checkpoint, tmp_path / "orbax")
    assert not (tmp_path / "orbax").exists()
    tiny_config = load.read_config(checkpoint)
    model, params = init_random(tiny_config, 0)
    broken = tuple(np.full_like(np.asarray(array), np.nan) for array in params)
    save(tmp_path / "trained", model, broken)
    refused(tmp_path / "trained", r"^params: .*: holds values that are not finite in float32; the first is nan at")


def test_parameters_larger_than_memory(checkpoint, monkeypatch):
    needed = sum(array.nbytes for array in load_file(checkpoint / "model.safetensors").values())
    monkeypatch.setattr(load, "physical_memory", lambda: needed)
    load_model(checkpoint)
    monkeypatch.setattr(load, "physical_memory", lambda: needed - 1)
    refused(checkpoint, r"^model\.safetensors: the parameters take .* GiB as float32, and this machine has .* GiB")
    load_model(checkpoint, dtype="bfloat16")


def header(path, **changes):
    """Rewrite a safetensors file's header, which says where in the file each tensor is."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size]) | changes).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [64, 32], "data_offsets": [0, 2**40]},
        {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 8192]},
        {"dtype": "F32", "shape": [64, 32], "data_offsets": [8192, 0]},
        {"dtype": "F32", "shape": [-64, 32], "data_offsets": [0, 8192]},
        {"dtype": "F99", "shape": [64, 32], "data_offsets": [0, 8192]},
        7,
    ],
    ids=["past the end", "overflow", "backwards", "negative", "type", "no object"],
)
def test_a_header_that_lies(checkpoint, entry):
    header(checkpoint / "model.safetensors", **{Q: entry})
    refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_a_header_that_claims_to_be_larger_than_the_file(checkpoint):
    (checkpoint / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_files_that_are_none(checkpoint):
    """A pipe would be waited for, and a file of any size read."""
    for name in ("config.json", "model.safetensors.index.json"):
        kept = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else None
        (checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(checkpoint / name)
        refused(checkpoint, rf"^{name}: not a file")
        (checkpoint / name).unlink()
        with (checkpoint / name).open("wb") as file:
            file.truncate(2**30)
        refused(checkpoint, rf"^{name}: 1,073,741,824 bytes, more than")
        (checkpoint / name).unlink()
        if kept is not None:
            (checkpoint / name).write_bytes(kept)


@pytest.fixture
def orbax(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "orbax")
    return tmp_path / "orbax"


def test_orbax_missing_unexpected_and_misshapen(orbax, tiny, tmp_path):
    edit_json(orbax / "config.json", num_hidden_layers=3)
    refused(orbax, r"^params: model\.layers\.2\..*: missing, shape")
    edit_json(orbax / "config.json", num_hidden_layers=1)
    refused(orbax, r"^params: model\.layers\.1\..*: unexpected")
    edit_json(orbax / "config.json", num_hidden_layers=2, vocab_size=100)
    refused(orbax, r"^params: .*: shape \[96, 32\], but config\.json says \[100, 32\]")


def test_orbax_wrong_type(tiny, tmp_path):
    model, params = init_random(tiny, 0)
    save(tmp_path / "out", model, tuple(np.asarray(array).astype(np.int32) for array in params))
    refused(tmp_path / "out", r"^params: .*: type int32 is not one of")


def test_orbax_without_metadata(orbax):
    (orbax / "params/_METADATA").write_text("{")
    refused(orbax, "^params: not a readable Orbax checkpoint")
    shutil.rmtree(orbax / "params")
    (orbax / "params").mkdir()
    refused(orbax, "^params: not a readable Orbax checkpoint")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of TensorStore's abandoned reads
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_orbax_with_damaged_data(orbax, damage):
    largest = max((orbax / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    refused(orbax, r"^params: .*: cannot be read, the checkpoint is damaged")


def test_float16_stays_in_range(tiny, tmp_path):
    """float16 weights are kept to bfloat16's precision, not to its neighbours' overflow."""
    write_random(tmp_path, tiny, seed=1, dtype="float16")
    stored = load_file(tmp_path / "model.safetensors")[Q]
    loaded = load_model(tmp_path)
    index = [spec.name for spec in loaded.model.specs].index(Q)
    assert (np.asarray(loaded.params[index]) == stored.astype(ml_dtypes.bfloat16)).all()
