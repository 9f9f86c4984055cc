"""The checkpoint formats: which tensors a directory has, in what order they are read, and which files are refused."""

import itertools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxctx.model.families.family import TensorPart
from jaxctx.model.weights import CheckpointError, formats, load_model
from jaxctx.model.weights.formats import OrbaxSource, SafetensorsSource, StoredTensor, open_source
from scripts.checkpoints import write_random
from tests.jaxctx.model.quantization.encode import F8, save_tensors
from tests.jaxctx.model.weights.edits import Q_PROJ, assert_refused, edit_header, edit_json


def test_the_size_of_a_stored_tensor():
    assert StoredTensor((3, 5), "bfloat16", "a").size_bytes == 30
    assert StoredTensor((), "float32", "a").size_bytes == 4
    assert StoredTensor((7, 0), "float32", "a").size_bytes == 0


@pytest.mark.parametrize(("stored", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_headers_say_which_tensors_there_are(tiny, tmp_path, stored, size):
    write_random(tmp_path, tiny, seed=1, dtype=stored)
    tensor = SafetensorsSource(tmp_path).tensors[Q_PROJ]
    assert (tensor.shape, tensor.dtype, tensor.file) == ((64, 32), stored, "model.safetensors")
    assert tensor.size_bytes == 64 * 32 * size


def test_tensors_of_shards_name_their_file(sharded):
    source = SafetensorsSource(sharded)
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: tensor.file for name, tensor in source.tensors.items()} == weight_map
    assert source.file == "model.safetensors.index.json"


def whole(names):
    return {name: (TensorPart(name),) for name in names}


def test_shards_are_read_one_after_the_other(sharded):
    """Whatever the order of the names, no shard is opened twice, and each tensor comes once."""
    source = SafetensorsSource(sharded)
    names = sorted(source.tensors, key=lambda name: name[::-1])
    read = dict(source.read(whole(names)))
    files = [source.tensors[name].file for name in read]
    assert files == sorted(files)
    assert read.keys() == source.tensors.keys()
    stored = load_file(sharded / source.tensors[Q_PROJ].file)[Q_PROJ]
    np.testing.assert_array_equal(read[Q_PROJ], stored)


def test_only_the_named_tensors_are_read(checkpoint, orbax):
    for source in (SafetensorsSource(checkpoint), OrbaxSource(orbax)):
        assert [name for name, _ in source.read(whole([Q_PROJ]))] == [Q_PROJ]
        assert list(source.read({})) == []


def test_parts_of_tensors_are_cut_out_and_stacked(sharded):
    """Also of tensors that are in several shards."""
    source = SafetensorsSource(sharded)
    first, last = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1))
    assert source.tensors[first].file != source.tensors[last].file
    stored = {name: load_file(sharded / source.tensors[name].file)[name] for name in (first, last)}
    parts = {
        "both": (TensorPart(last), TensorPart(first)),
        "rows": (TensorPart(first, (3, 7)),),
        "rows of both": (TensorPart(first, (0, 2)), TensorPart(last, (30, 32))),
    }
    read = dict(source.read(parts))
    np.testing.assert_array_equal(read["both"], np.stack([stored[last], stored[first]]))
    np.testing.assert_array_equal(read["rows"], stored[first][3:7])
    np.testing.assert_array_equal(read["rows of both"], np.stack([stored[first][:2], stored[last][30:]]))


def test_float8_is_read_with_one_look_at_the_header_of_a_file(tmp_path, monkeypatch):
    """The header of a model with many experts takes long to parse."""
    random = np.random.default_rng(0)
    tensors = {f"t{number}": random.normal(size=(3, 5)).astype(F8) for number in range(4)}
    save_tensors(tmp_path / "model.safetensors", tensors | {"wide": np.ones(7, np.float32)})
    source, parsed, loads = SafetensorsSource(tmp_path), [], json.loads
    monkeypatch.setattr(formats.json, "loads", lambda text: parsed.append(len(text)) or loads(text))
    parts = whole(["t3", "wide", "t0", "t2"]) | {"rows": (TensorPart("t1", (1, 3)),)}
    read = dict(source.read(parts))
    assert len(parsed) == 1
    for name in ("t0", "t2", "t3"):
        np.testing.assert_array_equal(read[name], tensors[name])
    np.testing.assert_array_equal(read["rows"], tensors["t1"][1:])
    assert read["rows"].dtype == F8
    np.testing.assert_array_equal(read["wide"], np.ones(7))


def test_a_file_that_is_cut_short_after_it_was_opened_is_refused(checkpoint):
    source = SafetensorsSource(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: not a whole safetensors file"):
        list(source.read(whole([Q_PROJ])))


def test_orbax_is_read_in_groups(orbax, checkpoint, monkeypatch):
    """A low limit makes several groups, which together have every array as it is stored."""
    source, groups = OrbaxSource(orbax), []
    restore = source._restore

    def counted(names):
        groups.append(list(names))
        return restore(names)

    monkeypatch.setattr(source, "_restore", counted)
    monkeypatch.setattr(formats, "_READ_AT_ONCE_BYTES", 20_000)
    read = dict(source.read(whole(source.tensors)))
    assert len(groups) > 1
    assert sorted(itertools.chain(*groups)) == sorted(source.tensors)
    stored = load_file(checkpoint / "model.safetensors")
    assert read.keys() == stored.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, stored[name])


def test_orbax_has_the_shapes_and_types_of_its_arrays(orbax):
    source = OrbaxSource(orbax)
    assert source.file == "params"
    tensor = source.tensors[Q_PROJ]
    assert tensor == StoredTensor((64, 32), "float32", "params")


def test_of_several_formats_orbax_goes_first_and_pickles_last(checkpoint, orbax):
    assert isinstance(open_source(checkpoint), SafetensorsSource)
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    assert isinstance(open_source(checkpoint), SafetensorsSource)
    shutil.copytree(orbax / "params", checkpoint / "params")
    assert isinstance(open_source(checkpoint), OrbaxSource)


def test_a_single_file_goes_before_an_index(checkpoint, sharded):
    """As in transformers, whose `save_pretrained` removes earlier shards, and leaves their index."""
    shutil.copy(checkpoint / "model.safetensors", sharded / "model.safetensors")
    source = open_source(sharded)
    assert source.file == "model.safetensors"
    assert {tensor.file for tensor in source.tensors.values()} == {"model.safetensors"}
    for shard in sharded.glob("model-*"):
        shard.unlink()
    assert open_source(sharded).tensors == source.tensors
    assert load_model(sharded).revision == load_model(checkpoint).revision


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_of_any_name_is_named_and_not_read(tmp_path, suffix):
    (tmp_path / f"weights{suffix}").write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"^weights\{suffix}: pickled weights are not read"):
        open_source(tmp_path)


def test_missing_and_pickled_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert_refused(checkpoint, "no weights")
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    assert_refused(checkpoint, r"^pytorch_model\.bin: pickled weights are not read, because loading them can run code")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_a_missing_shard_is_refused(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert_refused(sharded, r"^model-00002-of-00003\.safetensors: missing$")


def test_a_tensor_that_only_the_index_knows_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.ghost": "model-00001-of-00003.safetensors"})
    assert_refused(
        sharded,
        r"^model-00001-of-00003\.safetensors: model\.ghost: missing, though model\.safetensors\.index\.json says",
    )


@pytest.mark.parametrize("shard", ["../hf/model.safetensors", "/etc/passwd", "a.bin", 7, None])
def test_an_index_that_points_elsewhere_is_refused(sharded, shard):
    edit_json(sharded / "model.safetensors.index.json", weight_map={Q_PROJ: shard})
    assert_refused(sharded, rf"^model\.safetensors\.index\.json: weight_map: {Q_PROJ}: .* is not the name of a")


@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_an_empty_index_is_refused(sharded, weight_map):
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    assert_refused(sharded, r"^model\.safetensors\.index\.json: weight_map: must be a non-empty object")


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
def test_a_header_with_a_wrong_entry_is_refused(checkpoint, entry):
    edit_header(checkpoint / "model.safetensors", **{Q_PROJ: entry})
    assert_refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_a_header_larger_than_the_file_is_refused(checkpoint):
    (checkpoint / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    assert_refused(checkpoint, r"^model\.safetensors: not a whole safetensors file")


def test_orbax_without_metadata_is_refused(orbax):
    (orbax / "params/_METADATA").write_text("{")
    assert_refused(orbax, "^params: not a readable Orbax checkpoint")
    shutil.rmtree(orbax / "params")
    (orbax / "params").mkdir()
    assert_refused(orbax, "^params: not a readable Orbax checkpoint")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of TensorStore's abandoned reads
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_orbax_with_damaged_data_is_refused(orbax, damage):
    largest = max((orbax / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert_refused(orbax, r"^params: .*: cannot be read, the checkpoint is damaged")
