"""Writing Orbax checkpoints: whole or not at all, and never over something."""

import dataclasses
import json

import numpy as np
import pytest

from jaxctx.errors import AlreadyExists
from jaxctx.model.weights import CheckpointError, convert, load, load_model, write_orbax
from jaxctx.model.weights.formats import OrbaxSource
from scripts.checkpoints import init_random, save
from tests.jaxctx.model.weights.edits import edit_json


def test_convert_narrows_and_keeps_the_companions(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "added_tokens.json").write_text("{}")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates/tool_use.jinja").write_text("tools")
    (checkpoint / "unrelated.py").write_text("raise SystemExit")
    edit_json(checkpoint / "config.json", torch_dtype="float32", task_specific_params=1)
    seen = []
    convert(checkpoint, tmp_path / "out", dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "added_tokens.json",
        "additional_chat_templates",
        "config.json",
        "params",
        "tokenizer.json",
    ]
    assert (tmp_path / "out/additional_chat_templates/tool_use.jinja").read_text() == "tools"
    assert seen[-1][0] == seen[-1][1]
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["dtype"], written["task_specific_params"], "torch_dtype" in written) == ("bfloat16", 1, False)
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


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_parameters_larger_than_memory_are_not_converted(checkpoint, tmp_path, monkeypatch, backend):
    """They are in the host's memory here, also where the parameters of a model would be on a device."""
    monkeypatch.setattr(load.jax, "default_backend", lambda: backend)
    needed = sum(array.nbytes for array in load_model(checkpoint).params)
    monkeypatch.setattr(load, "physical_memory", lambda: needed - 1)
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: the parameters take .* GiB as float32"):
        convert(checkpoint, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    convert(checkpoint, tmp_path / "new", dtype="bfloat16")


ARRAYS = {"model.norm.weight": np.ones(3, np.float32)}


def test_an_orbax_directory_has_its_configuration_arrays_and_companions(tmp_path):
    (tmp_path / "words.json").write_text("words")
    companions = {"tokenizer.json": tmp_path / "words.json"}
    write_orbax(tmp_path / "new/made", {"dtype": "float32"}, ARRAYS, companions)
    assert sorted(path.name for path in (tmp_path / "new/made").iterdir()) == [
        "config.json",
        "params",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "new/made/config.json").read_text()) == {"dtype": "float32"}
    assert (tmp_path / "new/made/tokenizer.json").read_text() == "words"
    source = OrbaxSource(tmp_path / "new/made")
    assert [(name, array.tolist()) for name, array in source.read(list(ARRAYS))] == [("model.norm.weight", [1, 1, 1])]


def test_no_file_of_a_checkpoint_says_where_it_was_written(tmp_path):
    write_orbax(tmp_path / "made", {}, ARRAYS, {})
    files = [path for path in (tmp_path / "made").rglob("*") if path.is_file()]
    assert files
    assert not [path.name for path in files if str(tmp_path).encode() in path.read_bytes()]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_write_orbax_overwrites_nothing(tmp_path, kind):
    there = tmp_path / "there"
    if kind == "directory":
        there.mkdir()
    else:
        there.write_text("mine")
    with pytest.raises(AlreadyExists, match=r"there: exists; give the path of a new directory$"):
        write_orbax(there, {}, ARRAYS, {})
    assert list(tmp_path.iterdir()) == [there]
    assert there.is_dir() or there.read_text() == "mine"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_orbax(tmp_path / "made", {}, ARRAYS, {"tokenizer.json": tmp_path / "nowhere.json"})
    assert list(tmp_path.iterdir()) == []


def test_companions_that_are_no_plain_files_are_not_copied(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").mkdir()
    (checkpoint / "LICENSE").write_text("free")
    convert(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["LICENSE", "config.json", "params"]


@pytest.mark.parametrize("weights_dtype", ["int8", "float8_e4m3fn"])
def test_converted_weights_of_8_bits_are_those_made_at_load(checkpoint, tmp_path, weights_dtype):
    convert(checkpoint, tmp_path / "out", dtype="bfloat16", weights_dtype=weights_dtype)
    made, stored = load_model(checkpoint, dtype="bfloat16", weights_dtype=weights_dtype), load_model(tmp_path / "out")
    assert stored.revision == made.revision
    assert stored.model.specs == made.model.specs
    assert (stored.model.dtype, stored.model.weights_dtype) == ("bfloat16", weights_dtype)
    assert stored.parameters == made.parameters
    for a, b in zip(stored.params, made.params, strict=True):
        np.testing.assert_array_equal(a, b)
    tensors = OrbaxSource(tmp_path / "out").tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == weights_dtype
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == "float32"
    convert(tmp_path / "out", tmp_path / "again")
    assert load_model(tmp_path / "again").revision == made.revision
