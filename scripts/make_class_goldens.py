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
OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 40},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen3": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "attention_bias": True},
}
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
WINDOW_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all layers before the window": {"max_window_layers": 3},
    "more layers before the window than there are": {"max_window_layers": 28},
    "no layer before the window": {"max_window_layers": 0},
    "no window without use_sliding_window": {"use_sliding_window": False},
    "layer types go before max_window_layers": {"layer_types": [FULL, SLIDING, FULL], "max_window_layers": 3},
    "layer types without a window": {"layer_types": [FULL, FULL, FULL], "max_window_layers": 0},
}


def complete(family: str) -> dict[str, Any]:
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
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
    if family.startswith("Qwen"):
        changes |= WINDOW_VARIANTS
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
    return {
        "vocab_size": model.model.embed_tokens.weight.shape[0],
        "width": model.model.embed_tokens.weight.shape[1],
        "layers": len(model.model.layers),
        "heads": attention.q_proj.out_features // attention.head_dim,
        "kv_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "ffn": layer.mlp.gate_proj.out_features,
        "positions": config.max_position_embeddings,
        "window": window(family, config),
        "norm_eps": model.model.norm.variance_epsilon,
        "inverse_frequencies": [float(f"{each:.7g}") for each in rope.inv_freq.tolist()],
        "rope_factor": rope.attention_scaling,
        "qkv_bias": attention.q_proj.bias is not None,
        "out_bias": attention.o_proj.bias is not None,
        "ffn_bias": layer.mlp.gate_proj.bias is not None,
        "query_key_norm": "head" if hasattr(attention, "q_norm") else "none",
        "tied": model.config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }


def window(family: str, config: Any) -> int | None:
    """Of any layer, as the masks of the family's forward pass are made."""
    if family == "Llama":
        return None
    if family == "Mistral":
        return None if config.sliding_window is None else int(config.sliding_window)
    return int(config.sliding_window) if SLIDING in config.layer_types else None


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
