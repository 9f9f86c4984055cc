"""A config.json that leaves keys out means what the family's class in transformers makes of it.

`tests/goldens/classes.json` has each family's configuration without each of its keys in turn, with null in its place,
and with the keys of windows and RoPE as files combine them; beside each, what transformers builds.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxctx.model.config import ClampedGate, Experts, RopeConfig
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.layers import rope
from jaxctx.model.registry import FAMILIES, from_hf
from jaxctx.model.weights import load_model
from scripts.checkpoints import write_random

CLASSES = json.loads((Path(__file__).parents[2] / "goldens" / "classes.json").read_text())
ACCEPTED = [golden for golden in CLASSES if golden["built"] is not None]
REFUSED = [golden for golden in CLASSES if golden["built"] is None]
# transformers' own checks refuse these, though the class would go on to give them the meaning that they have here.
UNDERSTOOD = {
    f"{family}: num_key_value_heads null"
    for family in ("Gemma", "Gemma2", "Gemma3", "GptOss", "Mistral", "Mixtral", "Qwen2Moe", "Qwen3Moe")
} | {
    f"{family}: head_dim null"
    for family in ("Granite", "Olmo2", "Olmo3", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3Moe", "SmolLM3")
}
# transformers 5.23 takes the base of the file for some layers, and another one for the others.
AMBIGUOUS = {"Olmo3: without rope_parameters", "Olmo3: rope_parameters null"}
# Where the file says nothing of RoPE, the class has a YaRN that takes more tokens than these files say.
YARN_OF_CLASS = {"GptOss: without rope_scaling", "GptOss: rope_scaling null"}


def by_name(goldens):
    return pytest.mark.parametrize("golden", goldens, ids=lambda golden: golden["name"])


def test_every_key_with_a_default_is_left_out_once():
    names = {golden["name"] for golden in CLASSES}
    for family in FAMILIES.values():
        name = family.architecture.removesuffix("ForCausalLM")
        assert {f"{name}: without {key}" for key in family.defaults} <= names


@by_name([golden for golden in ACCEPTED if golden["name"] in AMBIGUOUS])
def test_a_base_that_some_layers_would_not_take_is_refused(golden):
    with pytest.raises(
        CheckpointError, match=r"^config\.json: rope_theta: 777, but .* 500000 for layers with a window"
    ):
        from_hf(golden["config"])
    assert from_hf(golden["config"] | {"rope_theta": 500000.0}).attention_of(1).rope == RopeConfig(500000.0)


@by_name([golden for golden in ACCEPTED if golden["name"] not in AMBIGUOUS])
def test_a_configuration_means_what_transformers_builds(golden):
    config, built = from_hf(golden["config"]), dict(golden["built"])
    keys = ("inverse_frequencies", "rope_factor", "windows", "rotates", "positions", "attention_scale")
    frequencies, rope_factor, windows, rotates, positions, scale = (built.pop(key) for key in keys)
    built |= {"eos_token_ids": tuple(built["eos_token_ids"])}
    if experts := built.get("experts"):
        experts = experts | {"dense_layers": tuple(experts["dense_layers"])}
        if "clamped_gate" in experts:  # gpt-oss
            experts |= {"clamped_gate": ClampedGate(*experts["clamped_gate"]), "has_bias": True}
        built["experts"] = Experts(**experts)
    assert {key: getattr(config, key) for key in built} == built
    layers = [config.attention_of(layer) for layer in range(config.layers)]
    first = next(each.rope for each in layers if each.rope is not None)
    np.testing.assert_allclose(rope.inverse_frequencies(first, config.head_dim), frequencies, rtol=1e-6)
    assert first.attention_factor == pytest.approx(rope_factor, rel=1e-12)
    positions = 131072 if golden["name"] in YARN_OF_CLASS else positions
    assert [each.window for each in layers] == [None if w is not None and w >= positions else w for w in windows]
    assert [each.rope is not None for each in layers] == rotates
    assert (config.declared_positions or config.max_positions) == positions * (2 if "dynamic" in golden["name"] else 1)
    assert (config.attention_scale or config.head_dim**-0.5) == pytest.approx(scale)


@by_name([golden for golden in REFUSED if golden["name"] not in UNDERSTOOD])
def test_what_transformers_refuses_is_refused_by_name(golden):
    key = golden["name"].removesuffix(" null").rpartition(" ")[2]
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: "):
        from_hf(golden["config"])


@by_name([golden for golden in REFUSED if golden["name"] in UNDERSTOOD])
def test_null_is_one_of_each_head_and_its_share_of_the_width(golden):
    config = from_hf(golden["config"])
    assert config.head_dim == (config.width // 32 if "head_dim" in golden["name"] else 6)
    assert config.kv_heads == (
        32 if "num_key_value_heads" in golden["name"] else golden["config"]["num_key_value_heads"]
    )


@pytest.mark.parity
@by_name(CLASSES)
def test_the_stored_classes_are_those_of_transformers(golden):
    pytest.importorskip("transformers")
    from scripts.make_class_goldens import built

    assert built(golden["config"]) == golden["built"]


WITHOUT_SHAPES = [  # what changes no tensor's shape, so that only the numbers tell
    golden
    for golden in ACCEPTED
    if golden["name"].partition(": ")[2]
    in {
        "complete",
        "without rms_norm_eps",
        "without rope_theta",
        "without rope_scaling",
        "without max_position_embeddings",
        "without max_window_layers",
        "without use_sliding_window",
        "without tie_word_embeddings",
        "both, which agree",
        "without no_rope_layers",
        "yarn",
        "yarn with a factor of attention",
        "longrope",
        "llama3 of all positions",
        "all layers before the window",
        "layer types go before max_window_layers",
    }
]


@pytest.mark.parity
@by_name(WITHOUT_SHAPES)
def test_logits_agree_within_windows_and_beyond(golden, tmp_path, dense_logits):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    config = from_hf(golden["config"])
    write_random(tmp_path, golden["config"], seed=3)
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, 64)
    loaded = load_model(tmp_path)
    got = dense_logits(loaded.model, loaded.params, tokens[None])[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
