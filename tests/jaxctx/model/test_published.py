"""Configurations as their makers published them: read, or refused with the field that is in the way.

Written down from memory, and only what is sure of them; keys that no family reads are left out where several say the
same. Lists of LongRoPE's factors have the published length and other numbers.
"""

import pytest

from jaxctx.model.config import RopeConfig, RopeScaling
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.registry import from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_31_8B = LLAMA | {
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32000,
}
PHI3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
}
LONGROPE = {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.05] * 48}
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 256000,
}

PUBLISHED = {
    "Llama 3.1 8B, DeepSeek R1 distilled": (LLAMA_31_8B, (32, 32, 8, 128, 131072)),
    "Llama 3.2 1B": (
        LLAMA_31_8B
        | {
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "rope_scaling": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        (16, 32, 8, 64, 131072),
    ),
    "TinyLlama 1.1B": (
        LLAMA
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 2048,
            "num_attention_heads": 32,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "rope_theta": 10000.0,
            "vocab_size": 32000,
        },
        (22, 32, 4, 64, 2048),
    ),
    "SmolLM2 135M": (
        LLAMA
        | {
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        (30, 9, 3, 64, 8192),
    ),
    "Yi 1.5 9B": (
        LLAMA
        | {
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rope_theta": 5000000.0,
            "vocab_size": 64000,
        },
        (48, 32, 4, 128, 4096),
    ),
    "DeepSeek Coder 6.7B": (
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 16384,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
            "rope_theta": 100000,
            "vocab_size": 32256,
        },
        (32, 32, 32, 128, 16384),
    ),
    "Mistral 7B Instruct v0.1": (MISTRAL_7B, (32, 32, 8, 128, 32768)),
    "Mistral 7B Instruct v0.3": (
        MISTRAL_7B | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        (32, 32, 8, 128, 32768),
    ),
    "Mistral Nemo": (
        MISTRAL_7B
        | {
            "head_dim": 128,
            "hidden_size": 5120,
            "max_position_embeddings": 1024000,
            "num_hidden_layers": 40,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        (40, 32, 8, 128, 1024000),
    ),
    "Qwen2.5 7B Instruct": (
        QWEN2 | {"max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": 131072},
        (28, 28, 4, 128, 32768),
    ),
    "Qwen2.5 7B Instruct with YaRN, as its card says": (
        QWEN2
        | {
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        (28, 28, 4, 128, 131072),
    ),
    "DeepSeek R1 distilled Qwen 7B": (
        QWEN2
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 10000,
            "sliding_window": 4096,
            "use_mrope": False,
        },
        (28, 28, 4, 128, 131072),
    ),
    "Qwen3 8B": (
        QWEN2
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "vocab_size": 151936,
        },
        (36, 32, 8, 128, 40960),
    ),
    "Phi-3 mini 4k": (PHI3_MINI_4K, (32, 32, 32, 96, 4096)),
    "Phi-3 mini 128k": (
        PHI3_MINI_4K | {"max_position_embeddings": 131072, "rope_scaling": LONGROPE, "sliding_window": 262144},
        (32, 32, 32, 96, 4096),
    ),
    "Phi-4": (
        PHI3_MINI_4K
        | {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "sliding_window": None,
            "vocab_size": 100352,
        },
        (40, 40, 10, 128, 16384),
    ),
    "Phi-4 mini": (
        PHI3_MINI_4K
        | {
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        (32, 24, 8, 128, 4096),
    ),
    "Granite 3.1 8B Instruct": (
        LLAMA
        | {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "logits_scaling": 16.0,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        },
        (40, 32, 8, 128, 131072),
    ),
    "OLMo 2 7B": (
        LLAMA
        | {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_theta": 500000,
            "vocab_size": 100352,
        },
        (32, 32, 32, 128, 4096),
    ),
    "OLMo 3 7B": (
        LLAMA
        | {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "vocab_size": 100278,
        },
        (32, 32, 32, 128, 65536),
    ),
    "SmolLM3 3B": (
        LLAMA
        | {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pretraining_tp": 2,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        (36, 16, 4, 128, 65536),
    ),
    "Gemma 2 2B": (GEMMA2_2B, (26, 8, 4, 256, 8192)),
    "Gemma 2 27B": (
        GEMMA2_2B
        | {
            "head_dim": 128,
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_attention_heads": 32,
            "num_hidden_layers": 46,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 144,
        },
        (46, 32, 16, 128, 8192),
    ),
    "Gemma 3 4B": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
        },
        (34, 8, 4, 256, 131072),
    ),
    "Gemma 3 1B": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "bos_token_id": 2,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 262144,
        },
        (26, 4, 1, 256, 32768),
    ),
}
"""Name → configuration; layers, heads, KV heads, elements of a head, positions."""

IMAGES = PUBLISHED["Gemma 3 4B"][0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_read(name):
    raw, shape = PUBLISHED[name]
    config = from_hf(raw)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.max_positions) == shape


def test_what_is_special_about_published_models():
    def read(name):
        return from_hf(PUBLISHED[name][0])

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


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"architectures": ["GptOssForCausalLM"]},
            r"architectures: 'GptOssForCausalLM' is not supported: attention sin",
        ),
        (
            {"architectures": ["InternLM2ForCausalLM"]},
            r"architectures: 'InternLM2ForCausalLM' is not supported; support",
        ),
        (PUBLISHED["SmolLM2 135M"][0] | {"rope_interleaved": True}, "rope_interleaved: is not understood"),
        (IMAGES | {"text_config": {"hidden_size": 0}}, r"text_config\.hidden_size: must be an integer"),
        (IMAGES | {"text_config": {"attention_sinks": 4}}, r"text_config\.attention_sinks: is not understood"),
        (IMAGES | {"text_config": 7}, "text_config: must be an object"),
        (IMAGES | {"audio_config": {"hidden_size": 8}}, "audio_config: is not understood"),
        (GEMMA2_2B | {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        (
            PHI3_MINI_4K | {"architectures": ["Phi3SmallForCausalLM"]},
            "architectures: 'Phi3SmallForCausalLM' is not supp",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(raw, message):
    with pytest.raises(CheckpointError, match=rf"^config\.json: {message}"):
        from_hf(raw)


def test_a_cap_that_the_class_with_images_does_not_compute_is_refused():
    text = IMAGES["text_config"] | {"final_logit_softcapping": 30.0}
    with pytest.raises(CheckpointError, match=r"^config\.json: text_config\.final_logit_softcapping: "):
        from_hf(IMAGES | {"text_config": text})
