#!/usr/bin/env python3
"""Write tests/goldens/*.npz: what transformers computes for tiny random models, so that the suite need not have torch.

    scripts/make_goldens.py [NAME ...]     of SHAPES; none: all of them

Needs torch and transformers beside jaxctx; all of them take some minutes.

Each file holds a configuration and a seed, from which `write_random` makes the weights again anywhere, 500 tokens, and
for prompts of 1, 15, 16, 17 and 500 of them the float32 logits of the last row and the 64 greedy tokens that follow.
The seed is the first with which no greedy choice is close to a tie.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import write_random

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
PROMPTS = (1, 15, 16, 17, 500)  # tokens
GREEDY = 64  # tokens
MARGIN = 2e-4  # least lead of a greedy token, relative to the largest logit

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 160,
    "max_position_embeddings": 2048,
}
LLAMA3 = {  # one of four frequencies is blended
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {  # of eight frequencies two are kept, two divided, and the others blended
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 3.0],
    "long_factor": [1.2, 2.0, 4.0, 9.0, 20.0, 31.0],
}
MILLION = {"rope_type": "default", "rope_theta": 1e6}
SMALL_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 224,
    "patch_size": 14,
}
MODEL_TYPES = {"Gemma3": "gemma3_text", "GptOss": "gpt_oss", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"}
"""Of classes whose name in lower case is another type."""


def shape(architecture: str, *, kv_heads: int, head_dim: int, **fields: object) -> dict[str, Any]:
    """A small config.json of this class, with these fields."""
    names = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": MODEL_TYPES.get(architecture, architecture.lower()),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    return SMALL | names | fields


SHAPES: dict[str, dict[str, Any]] = {
    "llama_gqa1_llama3": shape("Llama", kv_heads=8, head_dim=8, rope_parameters=LLAMA3),
    "llama_gqa8_biases_linear_tied": shape(
        "Llama",
        kv_heads=1,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LINEAR,
        tie_word_embeddings=True,
    ),
    "mistral_gqa4_wide_heads": shape("Mistral", kv_heads=2, head_dim=32, rms_norm_eps=1e-5, sliding_window=None),
    "mistral_gqa1_tied": shape("Mistral", kv_heads=8, head_dim=8, sliding_window=None, tie_word_embeddings=True),
    "llama_gqa2_yarn": shape("Llama", kv_heads=4, head_dim=16, rope_parameters=YARN),
    "llama_gqa3_yarn_scaled": shape(
        "Llama",
        kv_heads=2,
        head_dim=16,
        num_attention_heads=6,
        hidden_size=96,
        rope_parameters=YARN
        | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 9, "beta_slow": 2},
    ),
    "llama_gqa1_dynamic": shape(
        "Llama", kv_heads=8, head_dim=8, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
    "phi3_gqa2_partial_short_factors_tied": shape(
        "Phi3",
        pad_token_id=0,
        kv_heads=2,
        head_dim=16,
        num_attention_heads=4,
        partial_rotary_factor=0.75,
        rope_parameters=LONG | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=2048,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    ),
    # One token is the same with any factors, so that all others have the long ones.
    "phi3_gqa5_long_factors": shape(
        "Phi3",
        pad_token_id=0,
        kv_heads=1,
        head_dim=12,
        hidden_size=60,
        num_attention_heads=5,
        rope_parameters=LONG | {"attention_factor": 1.3},
        original_max_position_embeddings=1,
    ),
    "phi3_window": shape("Phi3", pad_token_id=0, kv_heads=4, head_dim=8, sliding_window=37),
    "mistral_window_gqa4": shape("Mistral", kv_heads=2, head_dim=8, sliding_window=48),
    "qwen2_window_of_last_layer_gqa2": shape(
        "Qwen2", kv_heads=4, head_dim=8, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "gemma_gqa8": shape("Gemma", kv_heads=1, head_dim=16, hidden_act="gelu", tie_word_embeddings=True),
    "gemma2_gqa2_tied": shape(
        "Gemma2",
        kv_heads=4,
        head_dim=8,
        num_hidden_layers=3,
        sliding_window=24,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        tie_word_embeddings=True,
    ),
    "gemma2_gqa1_without_caps": shape(
        "Gemma2",
        kv_heads=8,
        head_dim=8,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=33,
        attention_bias=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma3_gqa4_tied": shape(
        "Gemma3",
        kv_heads=1,
        head_dim=16,
        num_attention_heads=4,
        num_hidden_layers=4,
        sliding_window=32,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_local_base_freq=1e3,
        rope_theta=1e5,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        tie_word_embeddings=True,
    ),
    "gemma3_with_images_gqa2": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "image_token_index": 319,
        "text_config": shape(
            "Gemma3",
            kv_heads=2,
            head_dim=8,
            num_attention_heads=4,
            num_hidden_layers=7,
            sliding_window=40,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        "vision_config": SMALL_VISION,
    },
    "olmo3_gqa2_yarn": shape(
        "Olmo3",
        kv_heads=4,
        head_dim=8,
        num_hidden_layers=4,
        sliding_window=25,
        rope_parameters={
            "full_attention": YARN | {"rope_theta": 5e5, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "granite_gqa3_multipliers": shape(
        "Granite",
        kv_heads=3,
        head_dim=16,
        num_attention_heads=9,
        hidden_size=144,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.3,
        logits_scaling=5.0,
    ),
    "granite_gqa1_biases_tied": shape(
        "Granite",
        kv_heads=8,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        attention_multiplier=0.2,
        tie_word_embeddings=True,
    ),
    "olmo2_gqa1": shape("Olmo2", kv_heads=8, head_dim=8, rope_parameters=LINEAR),
    "olmo2_gqa2_biases_tied": shape(
        "Olmo2",
        kv_heads=3,
        head_dim=8,
        num_attention_heads=6,
        hidden_size=48,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "smollm3_gqa4_tied": shape(
        "SmolLM3", pad_token_id=0, kv_heads=2, head_dim=8, num_hidden_layers=4, tie_word_embeddings=True
    ),
    "smollm3_gqa3_biases": shape(
        "SmolLM3",
        pad_token_id=0,
        kv_heads=1,
        head_dim=12,
        num_attention_heads=3,
        hidden_size=36,
        no_rope_layers=[0, 1],
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "qwen2_gqa4_tied": shape("Qwen2", kv_heads=2, head_dim=8, rope_parameters=MILLION, tie_word_embeddings=True),
    "qwen2_gqa8": shape("Qwen2", kv_heads=1, head_dim=8, rope_parameters=MILLION),
    "qwen3_gqa8_wide_heads": shape("Qwen3", kv_heads=1, head_dim=32, rope_parameters=MILLION),
    "qwen3_gqa1_narrow_heads_tied": shape("Qwen3", kv_heads=8, head_dim=4, tie_word_embeddings=True),
    "mixtral_8_experts": shape("Mixtral", kv_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2),
    "mixtral_5_experts_of_which_1_tied": shape(
        "Mixtral", kv_heads=8, head_dim=8, num_local_experts=5, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "gptoss_gqa4_yarn": shape(
        "GptOss",
        kv_heads=2,
        head_dim=8,
        num_hidden_layers=3,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=30,
        swiglu_limit=0.5,
        rope_parameters=YARN | {"truncate": False},
    ),
    "gptoss_gqa2_of_one_kind": shape(
        "GptOss",
        kv_heads=4,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=3,
        layer_types=["full_attention", "full_attention"],
        swiglu_alpha=1.1,
        attention_bias=False,
        rope_parameters=LINEAR,
    ),
    "qwen3moe_normalised": shape(
        "Qwen3Moe",
        kv_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        rope_parameters=MILLION,
    ),
    "qwen3moe_every_other_layer_tied": shape(
        "Qwen3Moe",
        kv_heads=1,
        head_dim=32,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen2moe_shared_expert": shape(
        "Qwen2Moe",
        kv_heads=4,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=56,
        mlp_only_layers=[0],
        rope_parameters=MILLION,
    ),
    "qwen2moe_normalised_no_bias": shape(
        "Qwen2Moe",
        kv_heads=8,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        norm_topk_prob=True,
        qkv_bias=False,
    ),
}
"""What config.json says of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*")
    arguments = parser.parse_args()
    GOLDENS.mkdir(exist_ok=True)
    for name in arguments.names or SHAPES:
        config = SHAPES[name]
        seed, golden = first_without_ties(config)
        raw = json.dumps(config)
        arrays: dict[str, Any] = {"config": np.array(raw), "seed": np.array(seed), **golden}
        np.savez_compressed(GOLDENS / f"{name}.npz", **arrays)
        print(f"{name}: {(GOLDENS / f'{name}.npz').stat().st_size} bytes")


def first_without_ties(config: Mapping[str, Any]) -> tuple[int, dict[str, np.ndarray]]:
    """The first seed from 1 on whose greedy choices are no ties, and its arrays."""
    for seed in itertools.count(1):
        golden = compute(config, seed)
        if golden is not None:
            return seed, golden
    raise AssertionError("itertools.count ended")


def compute(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray] | None:
    """The arrays of a golden file, or None if a greedy choice is nearly a tie."""
    with tempfile.TemporaryDirectory() as checkpoint:
        write_random(checkpoint, config, seed=seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = (
        np.random.RandomState(seed).randint(0, model.config.get_text_config().vocab_size, max(PROMPTS)).astype(np.int32)
    )
    logits, greedy = [], []
    for length in PROMPTS:
        sequence = torch.tensor(tokens[:length], dtype=torch.long)[None]
        with torch.no_grad():
            out = model(sequence, use_cache=True)
            logits.append(out.logits[0, -1].numpy())
            chosen = continue_greedily(model, out)
        if chosen is None:
            return None
        greedy.append(chosen)
    return {"tokens": tokens, "prompts": np.array(PROMPTS), "logits": np.stack(logits), "greedy": np.stack(greedy)}


def continue_greedily(model: transformers.PreTrainedModel, out: Any) -> np.ndarray | None:
    chosen: list[int] = []
    while len(chosen) < GREEDY:
        row = out.logits[0, -1]
        best, second = torch.topk(row, 2).values
        if float(best - second) < MARGIN * float(row.abs().max()):
            return None
        chosen.append(int(row.argmax()))
        out = model(torch.tensor([[chosen[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return np.array(chosen, np.int32)


if __name__ == "__main__":
    main()
