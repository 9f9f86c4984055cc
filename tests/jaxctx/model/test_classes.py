"""A config.json that leaves keys out means what the family's class in transformers makes of it.

`tests/goldens/classes.json` has each family's configuration without each of its keys in turn, with null in its place,
and with the keys of windows and RoPE as files combine them; beside each, what transformers builds.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxctx.model.config import Experts
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
    *("Mistral: num_key_value_heads null", "Mixtral: num_key_value_heads null", "Qwen2: head_dim null"),
    *("Qwen2Moe: num_key_value_heads null", "Qwen2Moe: head_dim null"),
    *("Qwen3Moe: num_key_value_heads null", "Qwen3Moe: head_dim null"),
}


def by_name(goldens):
    return pytest.mark.parametrize("golden", goldens, ids=lambda golden: golden["name"])


def test_every_key_with_a_default_is_left_out_once():
    names = {golden["name"] for golden in CLASSES}
    for family in FAMILIES.values():
        name = family.architecture.removesuffix("ForCausalLM")
        assert {f"{name}: without {key}" for key in family.defaults} <= names


@by_name(ACCEPTED)
def test_a_configuration_means_what_transformers_builds(golden):
    config, built = from_hf(golden["config"]), dict(golden["built"])
    frequencies, window, positions = (built.pop(key) for key in ("inverse_frequencies", "window", "positions"))
    assert built.pop("rope_factor") == 1.0  # of queries and keys; only kinds of RoPE that are refused have another
    built |= {"eos_token_ids": tuple(built["eos_token_ids"])}
    if experts := built.get("experts"):
        built["experts"] = Experts(**experts | {"dense_layers": tuple(experts["dense_layers"])})
    assert {key: getattr(config, key) for key in built} == built
    np.testing.assert_allclose(
        rope.inverse_frequencies(config.attention_of(0).rope, config.head_dim), frequencies, rtol=1e-6
    )
    capped = window is not None and window < positions
    assert config.max_positions == (window if capped else positions)
    assert config.declared_positions == (positions if capped else None)


@by_name([golden for golden in REFUSED if golden["name"] not in UNDERSTOOD])
def test_what_transformers_refuses_is_refused_by_name(golden):
    key = golden["name"].removesuffix(" null").rpartition(" ")[2]
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: "):
        from_hf(golden["config"])


@by_name([golden for golden in REFUSED if golden["name"] in UNDERSTOOD])
def test_null_is_one_of_each_head_and_its_share_of_the_width(golden):
    config = from_hf(golden["config"])
    assert config.head_dim == (2 if "head_dim" in golden["name"] else 6)
    assert config.kv_heads == (32 if "num_key_value_heads" in golden["name"] else 16)


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
        "llama3 of all positions",
        "all layers before the window",
        "layer types go before max_window_layers",
    }
]


@pytest.mark.parity
@by_name(WITHOUT_SHAPES)
def test_logits_agree_up_to_the_cap_and_no_further(golden, tmp_path, dense_logits):
    """Full attention is exact up to the width of a window, and the first position beyond it is not."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    config = from_hf(golden["config"])
    write_random(tmp_path, config, seed=3)
    (tmp_path / "config.json").write_text(json.dumps(golden["config"]))
    tokens = np.random.default_rng(4).integers(0, config.vocab_size, 64)
    loaded = load_model(tmp_path)
    got = dense_logits(loaded.model, loaded.params, tokens[None])[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()
    off = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    known = min(len(tokens), config.max_positions)
    assert off[:known].max() <= 1e-4
    assert (off[known:] > 1e-3).all()
