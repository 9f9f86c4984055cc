"""Reading PEFT directories: what they mean, and what is refused by name."""

import dataclasses
import json
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxctx.model.adapters import read_adapter
from jaxctx.model.adapters.peft import MOST_NAMES
from jaxctx.model.config import AdapterSlots
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.functional import abstract
from scripts.checkpoints import write_adapter

Q_PROJ = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q_PROJ}.lora_{side}.weight" for side in "AB")


@pytest.fixture
def model(tiny):
    return abstract(dataclasses.replace(tiny, adapters=AdapterSlots(2, 8)), "float32")[0]


@pytest.fixture
def directory(tiny, tmp_path):
    write_adapter(tmp_path / "adapter", tiny, seed=1)
    return tmp_path / "adapter"


def set_keys(directory, **changes):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory, change):
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


def tensors_of(directory):
    return load_file(directory / "adapter_model.safetensors")


def test_every_matrix_of_every_layer(directory, model, tiny):
    adapter, stored = read_adapter(directory, model), tensors_of(directory)
    assert len(adapter.changes) == 7 * tiny.layers
    assert adapter.rank == 4
    assert adapter.parameters == sum(tensor.size for tensor in stored.values())
    change = adapter.changes[f"{Q_PROJ}.weight"]
    np.testing.assert_array_equal(change.a, stored[A])
    np.testing.assert_array_equal(change.b, stored[B] * np.float32(2))  # alpha 8, rank 4


def test_scales(tiny, model, tmp_path):
    write_adapter(
        tmp_path, tiny, seed=1, alpha=6, use_rslora=True, alpha_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 2}
    )
    adapter, stored = read_adapter(tmp_path, model), tensors_of(tmp_path)

    def scale(module):
        b = stored[f"base_model.model.{module}.lora_B.weight"]
        return (adapter.changes[f"{module}.weight"].b / b).mean()

    assert scale(Q_PROJ) == pytest.approx(3 / 2)
    assert scale("model.layers.0.mlp.up_proj") == pytest.approx(6 / 2)
    assert scale("model.layers.1.mlp.up_proj") == pytest.approx(2 / 2)


def test_ranks_by_pattern(tiny, model, tmp_path):
    write_adapter(tmp_path, tiny, seed=1, rank_pattern={"q_proj": 8, "down_proj": 1})
    adapter = read_adapter(tmp_path, model)
    ranks = {name.split(".")[-2]: change.a.shape[0] for name, change in adapter.changes.items()}
    assert (ranks["q_proj"], ranks["down_proj"], ranks["o_proj"]) == (8, 1, 4)
    assert adapter.rank == 8


def test_the_hash_is_of_the_content(tiny, model, directory, tmp_path):
    first = read_adapter(directory, model).content_hash
    write_adapter(tmp_path / "again", tiny, seed=1)
    set_keys(tmp_path / "again", lora_dropout=0.1, base_model_name_or_path="elsewhere", target_modules="all-linear")
    assert read_adapter(tmp_path / "again", model).content_hash == first
    others = {"seed": 2}, {"seed": 1, "alpha": 9}, {"seed": 1, "targets": ["q_proj"]}
    hashes = {first}
    for number, other in enumerate(others):
        write_adapter(tmp_path / str(number), tiny, **other)
        hashes.add(read_adapter(tmp_path / str(number), model).content_hash)
    assert len(hashes) == 4
    change_tensors(directory, lambda tensors: tensors[A].__setitem__((0, 0), tensors[A][0, 0] + np.float32(1e-6)))
    assert read_adapter(directory, model).content_hash not in hashes


def test_a_fused_module_changes_each_parameter_in_it(tiny, tmp_path):
    """Of a family whose query, key and value are one tensor: they share A, and each has its rows of B."""
    phi3 = dataclasses.replace(tiny, architecture="Phi3ForCausalLM", query_key_norm="none", adapters=AdapterSlots(1, 8))
    write_adapter(tmp_path, phi3, seed=3, targets=["qkv_proj", "gate_up_proj"])
    adapter, stored = read_adapter(tmp_path, abstract(phi3, "float32")[0]), tensors_of(tmp_path)
    assert len(adapter.changes) == 5 * phi3.layers
    for module, rows in (
        (
            "self_attn.qkv_proj",
            {"self_attn.q_proj": (0, 64), "self_attn.k_proj": (64, 96), "self_attn.v_proj": (96, 128)},
        ),
        ("mlp.gate_up_proj", {"mlp.gate_proj": (0, 48), "mlp.up_proj": (48, 96)}),
    ):
        a, b = (stored[f"base_model.model.model.layers.1.{module}.lora_{side}.weight"] for side in "AB")
        for target, (start, stop) in rows.items():
            change = adapter.changes[f"model.layers.1.{target}.weight"]
            np.testing.assert_array_equal(change.a, a)
            np.testing.assert_array_equal(change.b, b[start:stop] * np.float32(2))


def test_names_in_files_and_in_memory_where_a_model_takes_images(tiny, tmp_path):
    """PEFT writes the names that modules have once they are loaded, which are not those of the published files."""
    gemma = dataclasses.replace(tiny, architecture="Gemma3ForConditionalGeneration", adapters=AdapterSlots(1, 8))
    model = abstract(gemma, "float32")[0]
    write_adapter(tmp_path, gemma, seed=3)
    as_published = read_adapter(tmp_path, model)
    prefix = "base_model.model."
    old, new = f"{prefix}language_model.model.", f"{prefix}model.language_model."
    assert all(name.startswith(old) for name in tensors_of(tmp_path))

    def load_names(tensors):
        for name in list(tensors):
            rename(tensors, name, name.replace(old, new))

    change_tensors(tmp_path, load_names)
    assert read_adapter(tmp_path, model).content_hash == as_published.content_hash
    change_tensors(tmp_path, lambda t: t.update({name.replace(new, old): t[name] for name in list(t)}))
    with pytest.raises(CheckpointError, match="as another module does"):
        read_adapter(tmp_path, model)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_changes_of_modules_that_read_images_are_left_out(tiny, tmp_path, prefix):
    """As an adapter of `all-linear` has them, under the names of the files or those in memory."""
    gemma = dataclasses.replace(tiny, architecture="Gemma3ForConditionalGeneration", adapters=AdapterSlots(1, 8))
    model = abstract(gemma, "float32")[0]
    write_adapter(tmp_path, gemma, seed=3)
    without = read_adapter(tmp_path, model).content_hash
    image = f"base_model.model.{prefix}vision_tower.vision_model.encoder.layers.26"

    def add_images(tensors):
        for module in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1"):  # wider than the text's
            tensors[f"{image}.{module}.lora_A.weight"] = np.ones((16, 1152), np.float32)
            tensors[f"{image}.{module}.lora_B.weight"] = np.ones((1152, 16), np.float32)

    change_tensors(tmp_path, add_images)
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    set_keys(tmp_path, target_modules=[*names, "out_proj"], layers_to_transform=list(range(tiny.layers)))
    assert read_adapter(tmp_path, model).content_hash == without
    set_keys(tmp_path, layers_to_transform=[*range(tiny.layers), 26])
    with pytest.raises(CheckpointError, match=r"layers_to_transform: layer 26 has no tensors"):
        read_adapter(tmp_path, model)

    def keep_images(tensors):
        for name in [name for name in tensors if "vision_tower" not in name]:
            del tensors[name]

    change_tensors(tmp_path, keep_images)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: only tensors of modules that read images"):
        read_adapter(tmp_path, model)


def test_modules_of_images_are_refused_where_the_model_takes_none(directory, model):
    def add(tensors):
        tensors["base_model.model.vision_tower.q_proj.lora_A.weight"] = np.ones((4, 8), np.float32)
        tensors["base_model.model.vision_tower.q_proj.lora_B.weight"] = np.ones((8, 4), np.float32)

    change_tensors(directory, add)
    with pytest.raises(CheckpointError, match=r"vision_tower\.q_proj: no matrix of this model"):
        read_adapter(directory, model)


def test_names_of_modules_that_other_models_have_change_nothing(directory, model):
    before = read_adapter(directory, model).content_hash
    names = json.loads((directory / "adapter_config.json").read_text())["target_modules"]
    set_keys(directory, target_modules=[*names, "c_attn", "c_fc"])
    assert read_adapter(directory, model).content_hash == before
    set_keys(directory, target_modules=[*names, "lm_head"])
    with pytest.raises(CheckpointError, match="target_modules: 'lm_head' has no tensors"):
        read_adapter(directory, model)


def test_the_first_pattern_that_names_a_module_counts(tiny, model, tmp_path):
    names = {"q_proj": 3, "self_attn.q_proj": 5, "layers.1.self_attn.q_proj": 7, f"^{Q_PROJ}": 9, "proj": 11}
    b = f"{Q_PROJ}.weight"
    write_adapter(tmp_path, tiny, seed=1)
    plain = read_adapter(tmp_path, model).changes[b].b / 8  # alpha
    for order in (list(names), list(names)[::-1]):
        set_keys(tmp_path, alpha_pattern={name: names[name] for name in order})
        first = next(names[name] for name in order if name not in ("layers.1.self_attn.q_proj", "proj"))
        np.testing.assert_allclose(read_adapter(tmp_path, model).changes[b].b, plain * first, rtol=1e-6)


@pytest.mark.parametrize("key", ["target_modules", "layers_to_transform", "rank_pattern", "alpha_pattern"])
def test_lists_of_any_length_take_no_time(tiny, tmp_path, key):
    """They may be long where they are written for many models; one beyond all bounds is refused."""
    deep = dataclasses.replace(tiny, layers=32, adapters=AdapterSlots(1, 8))
    model = abstract(deep, "float32")[0]
    write_adapter(tmp_path, deep, seed=1)
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    others = [f"other{number}" for number in range(MOST_NAMES)]
    for excess in (0, 1):
        count = MOST_NAMES - len(names) + excess
        lists = {
            "target_modules": names + others[:count],
            "layers_to_transform": [number % 32 for number in range(MOST_NAMES + excess)],
            "rank_pattern": dict.fromkeys([*others, "another"][: MOST_NAMES + excess], 4),
            "alpha_pattern": dict.fromkeys([*others, "another"][: MOST_NAMES + excess], 8),
        }
        set_keys(tmp_path, **{key: lists[key]})
        begun = time.thread_time()
        if excess:
            with pytest.raises(CheckpointError, match=rf"{key}: has 65,537 entries, more than 65,536"):
                read_adapter(tmp_path, model)
        else:
            read_adapter(tmp_path, model)
        assert time.thread_time() - begun < 2


def test_no_layers_are_all(directory, model):
    """As in PEFT."""
    expected = read_adapter(directory, model)
    set_keys(directory, layers_to_transform=[])
    assert read_adapter(directory, model).content_hash == expected.content_hash


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type: must be LORA"),
        ({"r": 0}, "adapter_config.json: r: must be an integer"),
        ({"r": True}, "adapter_config.json: r: must be an integer"),
        ({"r": 5}, r"lora_A.weight: shape \[4, 48\], but the model and adapter_config.json say \[5, 48\]"),
        ({"lora_alpha": float("nan")}, "lora_alpha: must be a number"),
        ({"lora_alpha": None}, "lora_alpha: must be a number"),
        ({"use_rslora": 1}, "use_rslora: must be true or false"),
        ({"bias": "all"}, "bias: must be none"),
        ({"use_dora": True}, "use_dora: True is not supported"),
        ({"lora_bias": True}, "lora_bias: True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: .* is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: .* is not supported"),
        ({"layer_replication": [[0, 1]]}, "layer_replication: .* is not supported"),
        ({"something_new": {"x": 1}}, "something_new: .* is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: .* changes the base model"),
        ({"rank_pattern": {"(q|k)_proj": 4}}, "rank_pattern: .* regular expressions are not supported"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.q_proj: must be an integer"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj: must be a number"),
        ({"alpha_pattern": []}, "alpha_pattern: must be an object"),
        ({"target_modules": ["q_proj"]}, "not in target_modules"),
        ({"target_modules": 3}, "target_modules: must be names"),
        ({"layers_to_transform": [0]}, "not in layers_to_transform"),
        ({"layers_to_transform": [0, 1, 2]}, "layers_to_transform: layer 2 has no tensors"),
        ({"layers_to_transform": "x"}, "layers_to_transform: must be numbers"),
    ],
)
def test_refused_configurations(directory, model, change, match):
    set_keys(directory, **change)
    with pytest.raises(CheckpointError, match=match):
        read_adapter(directory, model)


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(B), "lora_B.weight: missing"),
        (lambda t: t.clear(), "no tensors"),
        (lambda t: t.update({A: t[A].T.copy()}), "lora_A.weight: shape"),
        (lambda t: t.update({A: t[A].astype(np.int32)}), "type I32 is not one of"),
        (lambda t: t[A].__setitem__((1, 2), np.nan), "lora_A.weight: holds values that are not finite"),
        (lambda t: t[B].__setitem__((1, 2), np.inf), "lora_B.weight: holds values that are not finite"),
        (lambda t: t[B].__setitem__((1, 2), 3e38), "lora_B.weight: holds values that are not finite"),
        (lambda t: t.update({"lm_head.weight": t[A]}), "lm_head.weight: unexpected"),
        (lambda t: rename(t, A, A.replace(".weight", ".default.weight")), "default.weight: unexpected"),
        (
            lambda t: rename(t, A, "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"),
            "experts.0.up_proj: no matrix of this model that an adapter may change",
        ),
        (lambda t: rename(t, A, "base_model.model.lm_head.lora_A.weight"), "lm_head: no matrix of this model"),
    ],
)
def test_refused_tensors(directory, model, change, match):
    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=match):
        read_adapter(directory, model)


def test_promised_modules_must_be_there(directory, model):
    change_tensors(directory, lambda t: [t.pop(name) for name in list(t) if "k_proj" in name])
    with pytest.raises(CheckpointError, match=r"target_modules: 'k_proj' has no tensors"):
        read_adapter(directory, model)


def test_a_rank_above_that_of_the_slots(tiny, model, tmp_path):
    write_adapter(tmp_path, tiny, seed=1, rank=9)
    with pytest.raises(CheckpointError, match=r"r: .* has rank 9; this server takes adapters of rank 8 at most"):
        read_adapter(tmp_path, model)


def test_damaged_directories(directory, model, tmp_path):
    with pytest.raises(CheckpointError, match=r"does not exist"):
        read_adapter(tmp_path / "nowhere", model)
    with pytest.raises(CheckpointError, match=r"not a directory"):
        read_adapter(directory / "adapter_config.json", model)
    tensors = directory / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: not a whole safetensors file"):
        read_adapter(directory, model)
    tensors.rename(directory / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin: pickled weights are not read"):
        read_adapter(directory, model)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: missing"):
        read_adapter(directory, model)
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: must be an object"):
        read_adapter(directory, model)
