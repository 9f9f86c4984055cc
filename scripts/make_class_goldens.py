#!/usr/bin/env python3
"""Write tests/goldens/classes.json: the model that transformers makes of a config.json that leaves keys out.

usage: make_class_goldens.py      (needs torch and transformers beside jaxctx; takes half a minute)

For each family a configuration that says everything, and variants of it: without each key in turn, with null in its
place, and with the keys of windows and RoPE in the combinations that files have. Beside each is what transformers
builds, read off its modules (shapes, biases, RoPE's frequencies) and not off its configuration; null where it refuses.
"""

from __future__ import annotations

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
OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 40},
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
}
DENSE = ("Llama", "Mistral", "Qwen2", "Qwen3")  # families without experts
MODEL_TYPES = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
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


def complete(family: str) -> dict[str, Any]:
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": MODEL_TYPES.get(family, family.lower())}
    return named | dict(COMPLETE) | dict(OF_FAMILY[family])


def variants(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and configuration."""
    whole = complete(family)
    yield "complete", whole
    for key in whole.keys() - {"architectures", "model_type"}:
        yield f"without {key}", {name: value for name, value in whole.items() if name != key}
        yield f"{key} null", whole | {key: None}
    yield (
        "nothing but its shape",
        {key: whole[key] for key in ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers")},
    )
    changes = dict(ROPE_VARIANTS)
    if family in ("Qwen2", "Qwen3", "Qwen2Moe"):
        changes |= WINDOW_VARIANTS
    if family.endswith("Moe"):
        changes |= EXPERT_VARIANTS
    if family in ("Mixtral", "Qwen3Moe"):
        changes |= COUNT_VARIANTS
    for name, change in changes.items():
        yield name, whole | dict(change)


def built(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of a configuration; None where it refuses."""
    family = raw["architectures"][0].removesuffix("ForCausalLM")
    try:
        config = getattr(transformers, f"{family}Config").from_dict(json.loads(json.dumps(raw)))
        with torch.device("meta"):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    except Exception:  # of many kinds
        return None
    layer = model.model.layers[0]
    attention = layer.self_attn
    rope = type(model.model.rotary_emb)(config)
    eos = config.eos_token_id
    dense = next((each.mlp for each in model.model.layers if hasattr(each.mlp, "gate_proj")), None)
    experts = {} if family in DENSE else {"experts": read_experts(model)}
    return experts | {
        "vocab_size": model.model.embed_tokens.weight.shape[0],
        "width": model.model.embed_tokens.weight.shape[1],
        "layers": len(model.model.layers),
        "heads": attention.q_proj.out_features // attention.head_dim,
        "kv_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "ffn": config.intermediate_size if dense is None else dense.gate_proj.out_features,
        "positions": config.max_position_embeddings,
        "window": window(family, config),
        "norm_eps": model.model.norm.variance_epsilon,
        "inverse_frequencies": [float(f"{each:.7g}") for each in rope.inv_freq.tolist()],
        "rope_factor": rope.attention_scaling,
        "qkv_bias": attention.q_proj.bias is not None,
        "out_bias": attention.o_proj.bias is not None,
        "ffn_bias": dense is not None and dense.gate_proj.bias is not None,
        "query_key_norm": "head" if hasattr(attention, "q_norm") else "none",
        "tied": model.config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }


def read_experts(model: Any) -> dict[str, Any] | None:
    """What the sparse layers have; None: there is no such layer."""
    blocks = [layer.mlp for layer in model.model.layers]
    sparse = [block for block in blocks if hasattr(block, "experts")]
    if not sparse:
        return None
    count, width, _ = sparse[0].experts.gate_up_proj.shape
    shared = getattr(sparse[0], "shared_expert", None)
    return {
        "count": count,
        "per_token": sparse[0].gate.top_k,
        "ffn": width // 2,
        "normalised": getattr(sparse[0].gate, "norm_topk_prob", True),
        "shared_ffn": 0 if shared is None else shared.gate_proj.out_features,
        "dense_layers": [number for number, block in enumerate(blocks) if not hasattr(block, "experts")],
    }


def window(family: str, config: Any) -> int | None:
    """Of any layer, as the masks of the family's forward pass are made."""
    if family == "Llama":
        return None
    if family in ("Mistral", "Mixtral", "Qwen3Moe"):
        return None if config.sliding_window is None else int(config.sliding_window)
    return config.sliding_window and int(config.sliding_window) if SLIDING in config.layer_types else None


def main() -> None:
    goldens = [
        {"name": f"{family}: {name}", "config": raw, "built": built(raw)}
        for family in OF_FAMILY
        for name, raw in sorted(variants(family))
    ]
    lines = ",\n".join(json.dumps(golden, sort_keys=True) for golden in goldens)
    CLASSES.write_text(f"[\n{lines}\n]\n", "utf-8")
    print(f"{CLASSES}: {len(goldens)} configurations, {sum(g['built'] is None for g in goldens)} of them refused")


if __name__ == "__main__":
    main()
