"""Configurations as their makers published them: read, or refused with the field that is in the way."""

import pytest
from published_models import PUBLISHED

from jaxctx.model.config import ClampedGate, Experts, RopeConfig, RopeScaling
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.registry import FAMILIES, from_hf

READ = {
    "Llama 3.1 8B, DeepSeek R1 distilled": (32, 32, 8, 128, 131072),
    "Llama 3.2 1B": (16, 32, 8, 64, 131072),
    "TinyLlama 1.1B": (22, 32, 4, 64, 2048),
    "SmolLM2 135M": (30, 9, 3, 64, 8192),
    "Yi 1.5 9B": (48, 32, 4, 128, 4096),
    "DeepSeek Coder 6.7B": (32, 32, 32, 128, 16384),
    "Mistral 7B Instruct v0.1": (32, 32, 8, 128, 32768),
    "Mistral 7B Instruct v0.3": (32, 32, 8, 128, 32768),
    "Mistral Nemo": (40, 32, 8, 128, 1024000),
    "Qwen2.5 7B Instruct": (28, 28, 4, 128, 32768),
    "Qwen2.5 7B Instruct with YaRN, as its card says": (28, 28, 4, 128, 131072),
    "Qwen2.5 7B Instruct 1M": (28, 28, 4, 128, 262144),
    "DeepSeek R1 distilled Qwen 7B": (28, 28, 4, 128, 131072),
    "Qwen3 8B": (36, 32, 8, 128, 40960),
    "DeepSeek R1 0528 Qwen3 8B": (36, 32, 8, 128, 131072),
    "Phi-3 mini 4k": (32, 32, 32, 96, 4096),
    "Phi-3 mini 128k": (32, 32, 32, 96, 4096),
    "Phi-4": (40, 40, 10, 128, 16384),
    "Phi-4 mini": (32, 24, 8, 128, 4096),
    "Granite 3.1 8B Instruct": (40, 32, 8, 128, 131072),
    "OLMo 2 7B": (32, 32, 32, 128, 4096),
    "OLMo 3 7B": (32, 32, 32, 128, 65536),
    "SmolLM3 3B": (36, 16, 4, 128, 65536),
    "Gemma 2 2B": (26, 8, 4, 256, 8192),
    "Gemma 2 9B": (42, 16, 8, 256, 8192),
    "Gemma 2 27B": (46, 32, 16, 128, 8192),
    "Gemma 3 4B": (34, 8, 4, 256, 131072),
    "Gemma 3 1B": (26, 4, 1, 256, 32768),
    "Llama 2 7B": (32, 32, 32, 128, 4096),
    "Llama 3.1 70B": (80, 64, 8, 128, 131072),
    "Mixtral 8x7B": (32, 32, 8, 128, 32768),
    "gpt-oss 20B": (24, 64, 8, 64, 131072),
    "gpt-oss 120B": (36, 64, 8, 64, 131072),
    "Qwen1.5 MoE A2.7B": (24, 16, 16, 128, 8192),
    "Qwen3 0.6B": (28, 16, 8, 128, 40960),
    "Qwen3 30B A3B": (48, 32, 4, 128, 40960),
    "Qwen3 Coder 30B A3B Instruct": (48, 32, 4, 128, 262144),
    "Gemma 2B": (18, 8, 1, 256, 8192),
    "Gemma 7B": (28, 16, 16, 256, 8192),
}
"""Name → layers, heads, KV heads, elements of a head, positions."""


IMAGES = PUBLISHED["Gemma 3 4B"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_read(name):
    config = from_hf(PUBLISHED[name])
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.max_positions) == READ[name]


def test_every_family_is_published():
    assert {raw["architectures"][0] for raw in PUBLISHED.values()} == {*FAMILIES}


def test_what_is_special_about_published_models():
    def read(name):
        return from_hf(PUBLISHED[name])

    windows = [read("OLMo 3 7B").attention_of(layer) for layer in range(4)]
    assert [each.window for each in windows] == [4096, 4096, 4096, None]
    assert [each.rope.scaling is None for each in windows] == [True, True, True, False]
    assert [read("SmolLM3 3B").attention_of(layer).rope is None for layer in range(5)] == [*[False] * 3, True, False]
    assert [read("Gemma 3 1B").attention_of(layer).window for layer in range(7)] == [*[512] * 5, None, 512]
    assert [read("Gemma 3 1B").attention_of(layer).rope.theta for layer in (4, 5)] == [1e4, 1e6]
    assert read("Gemma 3 4B").attention_of(5).rope == RopeConfig(1e6, RopeScaling("linear", 8.0))
    assert read("Gemma 3 4B").attention_of(4).rope == RopeConfig(1e4)
    assert [read("Gemma 2 27B").attention_of(layer).window for layer in (0, 1)] == [4096, None]
    assert read("Gemma 2 27B").attention_scale == pytest.approx(1 / 12)
    assert read("Phi-3 mini 4k").attention_of(0).window == 2047
    assert read("Phi-4 mini").attention_of(0).rope.rotated == 96
    assert read("Phi-4 mini").for_contexts_of(100_000).max_positions == 131072
    assert read("Granite 3.1 8B Instruct").logits_scale == 1 / 16
    assert [read("gpt-oss 20B").attention_of(layer).window for layer in range(3)] == [128, None, 128]
    assert read("gpt-oss 20B").attention_of(0).rope == read("gpt-oss 20B").attention_of(1).rope
    assert read("gpt-oss 120B").experts == Experts(
        count=128, per_token=4, ffn=2880, normalised=True, has_bias=True, clamped_gate=ClampedGate(1.702, 7.0)
    )
    assert read("Qwen2.5 7B Instruct 1M").declared_positions == 1010000
    embedding = read("DeepSeek R1 0528 Qwen3 8B").attention_of(0).rope  # whose makers mean that nothing is scaled
    assert embedding is not None
    assert embedding.attention_factor == pytest.approx(1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            r"architectures: 'DeepseekV3ForCausalLM' is not supported: multi-head latent atten",
        ),
        (
            {"architectures": ["InternLM2ForCausalLM"]},
            r"architectures: 'InternLM2ForCausalLM' is not supported; support",
        ),
        (PUBLISHED["SmolLM2 135M"] | {"rope_interleaved": True}, "rope_interleaved: is not understood"),
        (IMAGES | {"text_config": {"hidden_size": 0}}, r"text_config\.hidden_size: must be an integer"),
        (IMAGES | {"text_config": {"attention_sinks": 4}}, r"text_config\.attention_sinks: is not understood"),
        (IMAGES | {"text_config": 7}, "text_config: must be an object"),
        (IMAGES | {"audio_config": {"hidden_size": 8}}, "audio_config: is not understood"),
        (
            PUBLISHED["Gemma 2 2B"] | {"use_bidirectional_attention": True},
            "use_bidirectional_attention: True is not supported",
        ),
        (PUBLISHED["Qwen2.5 7B Instruct"] | {"is_causal": False}, "is_causal: False is not supported"),
        (
            PUBLISHED["Gemma 3 1B"] | {"rope_scaling": {"type": "linear", "factor": 8.0}},
            r"rope_scaling\.type: transformers does not see it",
        ),
        (
            PUBLISHED["Phi-3 mini 4k"] | {"architectures": ["Phi3SmallForCausalLM"]},
            "architectures: 'Phi3SmallForCausalLM' is not supp",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(raw, message):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        from_hf(raw)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama 2 7B", {"max_sequence_length": 2048, "internal_version": "1", "is_causal": True}),
        ("Qwen2.5 7B Instruct with YaRN, as its card says", {"rope_scaling": {"finetuned": True}}),
    ],
)
def test_keys_of_published_files_that_change_nothing(name, change):
    raw = PUBLISHED[name]
    change = {key: raw[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    assert from_hf(raw | change) == from_hf(raw)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("Gemma 2 9B", "sliding_window_size", 2048), ("Qwen3 Coder 30B A3B Instruct", "use_qk_norm", False)],
)
def test_what_is_said_twice_must_be_the_same(name, key, value):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: .* is not supported"):
        from_hf(PUBLISHED[name] | {key: value})


def test_a_cap_that_the_class_with_images_does_not_compute_is_refused():
    text = IMAGES["text_config"] | {"final_logit_softcapping": 30.0}
    with pytest.raises(CheckpointError, match=r"^config\.json: text_config\.final_logit_softcapping: "):
        from_hf(IMAGES | {"text_config": text})
