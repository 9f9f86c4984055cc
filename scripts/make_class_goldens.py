#!/usr/bin/env python3
"""Write tests/goldens/classes.json: the model that transformers makes of a config.json that leaves keys out.

    scripts/make_class_goldens.py      (needs torch and transformers beside jaxctx; takes half a minute)

For each family a configuration that says everything, and variants of it: without each key in turn, with null in its
place, and with the keys of windows and RoPE in the combinations that files have. Beside each is what transformers
builds, read off its modules (shapes, biases, RoPE's frequencies) and not off its configuration; null where it refuses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

CLASSES = Path(__file__).parent.parent / "tests" / "goldens" / "classes.json"

# Nothing here equals a class's default, so that leaving a key out shows.
COMPLETE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 9000,
    "rms_norm_eps": 1e-3,
    "rope_theta": 777.0,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
}
QWEN_EXPERTS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 40,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [2],
}
OF_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": True,
    "query_pre_attn_scalar": 100,
    "final_logit_softcapping": 10.0,
    "sliding_window": 40,
    "tie_word_embeddings": False,
}
OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "Gemma": {"hidden_act": "gelu_pytorch_tanh", "attention_bias": True, "tie_word_embeddings": False},
    "Gemma2": OF_GEMMA | {"attn_logit_softcapping": 20.0},
    "Gemma3": OF_GEMMA | {"rope_local_base_freq": 333.0, "sliding_window_pattern": 2, "attn_logit_softcapping": None},
    "GptOss": {
        "attention_bias": False,
        "sliding_window": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 5.0,
    },
    "Granite": {
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.25,
        "logits_scaling": 4.0,
    },
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 40},
    "Olmo2": {"attention_bias": True},
    "Olmo3": {
        "num_hidden_layers": 4,
        "attention_bias": True,
        "sliding_window": 40,
        "rope_parameters": {
            "full_attention": {"rope_type": "default"},
            "sliding_attention": {"rope_type": "default", "rope_theta": 333.0},
        },
    },
    "Phi3": {
        "sliding_window": 40,
        "rope_scaling": {"rope_type": "default"},
        "original_max_position_embeddings": 3000,
        "partial_rotary_factor": 0.67,
        "hidden_size": 128,
        "pad_token_id": 0,
    },
    "Qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "attention_bias": True},
    "Mixtral": {"sliding_window": 40, "num_local_experts": 6, "num_experts_per_tok": 3},
    "Qwen2Moe": QWEN_EXPERTS
    | {
        "max_window_layers": 2,
        "num_experts": 10,
        "shared_expert_intermediate_size": 24,
        "qkv_bias": False,
    },
    "Qwen3Moe": QWEN_EXPERTS | {"num_experts": 10, "attention_bias": True},
    "SmolLM3": {
        "attention_bias": True,
        "mlp_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "no_rope_layers": [1, 0, 1] + [1] * 33,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
}
WITH_EXPERTS = ("GptOss", "Mixtral", "Qwen2Moe", "Qwen3Moe")
MODEL_TYPES = {"Gemma3": "gemma3_text", "GptOss": "gpt_oss", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "rope_parameters alone": {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 5.0}},
    "rope_parameters with a base": {
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "empty rope_parameters": {"rope_scaling": None, "rope_parameters": {}},
    "both, which agree": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0}},
    "type for rope_type": {"rope_scaling": {"type": "linear", "factor": 5}},
    "llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    "llama3, positions at the top": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "llama3 of all positions": {"rope_scaling": LLAMA3},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 30, "original_max_position_embeddings": 2250}
OTHER_ROPE_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "yarn of all positions": {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}},
    "yarn with a factor of attention": {"rope_scaling": YARN | {"attention_factor": 1.5, "truncate": False}},
    "yarn with mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    "yarn with mscale alone": {"rope_scaling": YARN | {"mscale": 0.7}},
    "yarn without bounds": {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": None}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 9.0]},
        "original_max_position_embeddings": 3000,
    },
    "longrope with a factor": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 9.0],
            "factor": 32.0,
            "original_max_position_embeddings": 3000,
        },
    },
}
LONG_PHI3 = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
PHI3_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all of a head": {"partial_rotary_factor": 1.0},
    "longrope": {"hidden_size": 192, "rope_scaling": LONG_PHI3 | {"type": "longrope"}},
    "longrope as yarn": {"hidden_size": 192, "rope_scaling": LONG_PHI3 | {"type": "yarn"}},
    "longrope of the class's positions": {
        "hidden_size": 192,
        "rope_scaling": LONG_PHI3 | {"type": "longrope"},
        "original_max_position_embeddings": 4096,
    },
    "longrope with a factor of attention": {
        "hidden_size": 192,
        "rope_scaling": LONG_PHI3 | {"type": "longrope", "attention_factor": 1.25},
    },
}
FULL, SLIDING = "full_attention", "sliding_attention"
EXPERT_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "experts in all layers": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "experts in no layer, by their step": {"decoder_sparse_step": 4},
    "experts in no layer, by name": {"mlp_only_layers": [0, 1, 2]},
    "layers that there are not": {"mlp_only_layers": [0, 7]},
    "as many experts as a row takes": {"num_experts_per_tok": 10},
}
COUNT_VARIANTS: Mapping[str, Mapping[str, Any]] = {  # of the classes that have two names for the number of experts
    "experts by their other name": {"num_experts": 5, "num_local_experts": 5},
}
WINDOW_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all layers before the window": {"max_window_layers": 3},
    "more layers before the window than there are": {"max_window_layers": 28},
    "no layer before the window": {"max_window_layers": 0},
    "no window without use_sliding_window": {"use_sliding_window": False},
    "layer types go before max_window_layers": {"layer_types": [FULL, SLIDING, FULL], "max_window_layers": 3},
    "layer types without a window": {"layer_types": [FULL, FULL, FULL], "max_window_layers": 0},
}
GEMMA3_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "rope_parameters of both kinds": {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 5.0, "rope_theta": 99.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
        },
    },
    "rope_parameters of one kind": {
        "rope_scaling": None,
        "rope_parameters": {"full_attention": YARN | {"rope_theta": 99.0}},
        "layer_types": [FULL, SLIDING, FULL],
    },
    "rope_parameters and rope_scaling": {"rope_parameters": {"full_attention": {"rope_theta": 99.0}}},
    "layer types go before the pattern": {"layer_types": [FULL, SLIDING, FULL]},
}
OLMO3_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "the class's base": {"rope_parameters": None, "rope_theta": 500000.0},
    "layer types": {"layer_types": [FULL, SLIDING, FULL, FULL]},
    "yarn": {"layer_types": [FULL, SLIDING, FULL, FULL], "rope_scaling": YARN},
}
NOT_OF_CLASS = {"Gemma2": {"hidden_act"}, "Gemma3": {"hidden_act"}}
SHAPE = ("architectures", "model_type", "vocab_size", "pad_token_id", "hidden_size", "num_hidden_layers")


def complete(family: str) -> dict[str, Any]:
    model_type = MODEL_TYPES.get(family, family.lower())
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": model_type}
    return named | dict(COMPLETE) | dict(OF_FAMILY[family])


def variants(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and configuration."""
    whole = complete(family)
    yield "complete", whole
    for key in whole.keys() - {"architectures", "model_type", "pad_token_id"} - NOT_OF_CLASS.get(family, set()):
        yield f"without {key}", {name: value for name, value in whole.items() if name != key}
        yield f"{key} null", whole | {key: None}
    yield (
        "nothing but its shape",
        {key: whole[key] for key in SHAPE if key in whole},
    )
    own_variants = {"Gemma3": GEMMA3_VARIANTS, "Olmo3": OLMO3_VARIANTS, "Phi3": PHI3_VARIANTS}
    changes = dict(own_variants.get(family, ROPE_VARIANTS))
    if family in ("GptOss", "Llama", "Qwen3"):
        changes |= OTHER_ROPE_VARIANTS
    if family in ("Qwen2", "Qwen3", "Qwen2Moe"):
        changes |= WINDOW_VARIANTS
    if family.endswith("Moe"):
        changes |= EXPERT_VARIANTS
    if family in ("GptOss", "Mixtral", "Qwen3Moe"):
        changes |= COUNT_VARIANTS
    for name, change in changes.items():
        yield name, whole | dict(change)


def with_images() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and configuration of Gemma 3 with images."""
    elsewhere = ("architectures", "eos_token_id", "final_logit_softcapping")  # above the text model, or not read
    text = {key: value for key, value in complete("Gemma3").items() if key not in elsewhere}
    names = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [8, 9]}
    whole = names | {"text_config": text, "tie_word_embeddings": False}
    yield "complete", whole
    yield "without tie_word_embeddings", names | {"text_config": text}
    yield "without eos_token_id", {key: value for key, value in whole.items() if key != "eos_token_id"}
    yield "nothing but a width", names | {"text_config": {"hidden_size": 64}}


def built(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of a configuration; None where it refuses."""
    if "text_config" in raw:
        return built_with_images(raw)
    family = raw["architectures"][0].removesuffix("ForCausalLM")
    try:
        of_config = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{of_config}Config").from_dict(json.loads(json.dumps(raw)))
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    except Exception:  # of many kinds
        return None
    if SLIDING in (getattr(config, "layer_types", None) or ()) and config.sliding_window is None:
        return None  # the first forward pass raises
    return read_off(family, config, model.model)


def built_with_images(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the text model of Gemma 3 with images."""
    try:
        config = transformers.Gemma3Config.from_dict(json.loads(json.dumps(raw)))
        with torch.device("meta"):
            model = transformers.Gemma3ForConditionalGeneration(config)
    except Exception:  # of many kinds
        return None
    text = config.text_config
    text.tie_word_embeddings = config.tie_word_embeddings
    text.eos_token_id = getattr(config, "eos_token_id", None) or text.eos_token_id
    return read_off("Gemma3", text, model.model.language_model)


def read_off(family: str, config: Any, model: Any) -> dict[str, Any]:
    """What the modules of a decoder are."""
    layer = model.layers[0]
    attention = layer.self_attn
    heads = attention.o_proj.in_features // attention.head_dim
    inverse_frequencies, rope_factor = rope_of_first_layer(config, model)
    eos = config.eos_token_id
    dense = next((each.mlp for each in model.layers if hasattr(each.mlp, "down_proj")), None)
    experts = {"experts": read_experts(model)} if family in WITH_EXPERTS else {}
    return experts | {
        "vocab_size": model.embed_tokens.weight.shape[0],
        "width": model.embed_tokens.weight.shape[1],
        "layers": len(model.layers),
        "heads": heads,
        "kv_heads": heads // attention.num_key_value_groups,
        "head_dim": attention.head_dim,
        "ffn": config.intermediate_size if dense is None else dense.down_proj.in_features,
        "positions": config.max_position_embeddings,
        "windows": windows(family, config),
        "rotates": [bool(getattr(each.self_attn, "use_rope", True)) for each in model.layers],
        "norm_eps": getattr(model.norm, "variance_epsilon", None) or model.norm.eps,
        "inverse_frequencies": inverse_frequencies,
        "rope_factor": rope_factor,
        "qkv_bias": (attention.qkv_proj if family == "Phi3" else attention.q_proj).bias is not None,
        "out_bias": attention.o_proj.bias is not None,
        "ffn_bias": dense is not None and dense.down_proj.bias is not None,
        "query_key_norm": query_key_norm(attention),
        "attention_scale": attention.scaling,
        "residual_scale": getattr(layer, "residual_multiplier", 1.0),
        "logits_scale": 1.0 / getattr(config, "logits_scaling", 1.0),
        "embedding_scale": embedding_scale(model),
        "scores_soft_cap": config.attn_logit_softcapping if family == "Gemma2" else None,
        "logits_soft_cap": getattr(config, "final_logit_softcapping", None),
        "tied": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }


def read_experts(model: Any) -> dict[str, Any] | None:
    """What the sparse layers have; None: there is no such layer."""
    blocks = [layer.mlp for layer in model.layers]
    sparse = [block for block in blocks if hasattr(block, "experts")]
    if not sparse:
        return None
    count, width, _ = sparse[0].experts.gate_up_proj.shape
    inputs_first = hasattr(sparse[0].experts, "alpha")  # as gpt-oss has them
    shared = getattr(sparse[0], "shared_expert", None)
    gate = {"clamped_gate": [sparse[0].experts.alpha, sparse[0].experts.limit]} if inputs_first else {}
    return gate | {
        "count": count,
        "per_token": router(sparse[0]).top_k,
        "ffn": (sparse[0].experts.gate_up_proj.shape[2] if inputs_first else width) // 2,
        "normalised": getattr(router(sparse[0]), "norm_topk_prob", True),
        "shared_ffn": 0 if shared is None else shared.gate_proj.out_features,
        "dense_layers": [number for number, block in enumerate(blocks) if not hasattr(block, "experts")],
    }


def router(block: Any) -> Any:
    """By either of its names."""
    return block.gate if hasattr(block, "gate") else block.router


def rope_of_first_layer(config: Any, model: Any) -> tuple[list[float], float]:
    """Frequencies, and the factor of cosines and sines."""
    rope = type(model.rotary_emb)(config)
    of_kind = f"{config.layer_types[0]}_" if isinstance(rope.rope_type, dict) else ""
    frequencies = getattr(rope, f"{of_kind}inv_freq").tolist()
    return [float(f"{each:.7g}") for each in frequencies], getattr(rope, f"{of_kind}attention_scaling")


def query_key_norm(attention: Any) -> str:
    if not hasattr(attention, "q_norm"):
        return "none"
    return "head" if attention.q_norm.weight.shape[0] == attention.head_dim else "all_heads"


def embedding_scale(model: Any) -> float:
    if hasattr(model, "embedding_multiplier"):
        return float(model.embedding_multiplier)
    return float(getattr(model.embed_tokens, "scalar_embed_scale", 1.0))


def windows(family: str, config: Any) -> list[int | None]:
    """Of each layer, as the masks of the family's forward pass are made."""
    layers = config.num_hidden_layers
    if family in ("Gemma", "Granite", "Llama", "Olmo2"):
        return [None] * layers
    window = None if config.sliding_window is None else int(config.sliding_window)
    if family in ("Mistral", "Mixtral", "Phi3", "Qwen3Moe"):
        return [window] * layers
    return [window if kind == SLIDING else None for kind in config.layer_types]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    configurations = {
        **{f"{family}: {name}": raw for family in OF_FAMILY for name, raw in sorted(variants(family))},
        **{f"Gemma3ForConditionalGeneration: {name}": raw for name, raw in with_images()},
    }
    goldens = [{"name": name, "config": raw, "built": built(raw)} for name, raw in configurations.items()]
    lines = ",\n".join(json.dumps(golden, sort_keys=True) for golden in goldens)
    CLASSES.write_text(f"[\n{lines}\n]\n", "utf-8")
    print(f"{CLASSES}: {len(goldens)} configurations, {sum(g['built'] is None for g in goldens)} of them refused")


if __name__ == "__main__":
    main()
