#!/usr/bin/env python3
"""Write tests/goldens/*.npz: what transformers computes for tiny random models, so that the suite need not have torch.

usage: make_goldens.py [NAME ...]     of SHAPES; none: all of them

Needs torch and transformers beside jaxctx; all of them take some minutes.

Each file holds a configuration and a seed, from which `write_random` makes the weights again anywhere, 500 tokens, and
for prompts of 1, 15, 16, 17 and 500 of them the float32 logits of the last row and the 64 greedy tokens that follow.
The seed is the first with which no greedy choice is close to a tie.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import hf_config, write_random

from jaxctx.model.config import ModelConfig, RopeScaling

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
PROMPTS = (1, 15, 16, 17, 500)  # tokens
GREEDY = 64  # tokens
MARGIN = 2e-4  # least lead of a greedy token, relative to the largest logit

SMALL = {"vocab_size": 320, "width": 64, "layers": 2, "heads": 8, "ffn": 160, "max_positions": 2048}
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 256)  # one of four frequencies is blended


def shape(architecture: str, **fields: object) -> ModelConfig:
    return ModelConfig(**{**SMALL, "architecture": f"{architecture}ForCausalLM", **fields})  # type: ignore[arg-type]


SHAPES = {
    "llama_gqa1_llama3": shape("Llama", kv_heads=8, head_dim=8, rope_theta=5e5, rope_scaling=LLAMA3),
    "llama_gqa8_biases_linear_tied": shape(
        "Llama",
        kv_heads=1,
        head_dim=16,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        rope_scaling=RopeScaling("linear", 4.0),
        tied=True,
    ),
    "mistral_gqa4_wide_heads": shape("Mistral", kv_heads=2, head_dim=32, norm_eps=1e-5),
    "mistral_gqa1_tied": shape("Mistral", kv_heads=8, head_dim=8, tied=True),
    "qwen2_gqa4_tied": shape("Qwen2", kv_heads=2, head_dim=8, qkv_bias=True, rope_theta=1e6, tied=True),
    "qwen2_gqa8": shape("Qwen2", kv_heads=1, head_dim=8, qkv_bias=True, rope_theta=1e6),
    "qwen3_gqa8_wide_heads": shape("Qwen3", kv_heads=1, head_dim=32, qk_norm=True, rope_theta=1e6),
    "qwen3_gqa1_narrow_heads_tied": shape("Qwen3", kv_heads=8, head_dim=4, qk_norm=True, tied=True),
}


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or SHAPES:
        config = SHAPES[name]
        seed, golden = first_without_ties(config)
        raw = json.dumps(hf_config(config))
        arrays: dict[str, Any] = {"config": np.array(raw), "seed": np.array(seed), **golden}
        np.savez_compressed(GOLDENS / f"{name}.npz", **arrays)
        print(f"{name}: {(GOLDENS / f'{name}.npz').stat().st_size} bytes")


def first_without_ties(config: ModelConfig) -> tuple[int, dict[str, np.ndarray]]:
    """The first seed from 1 on whose greedy choices are no ties, and its arrays."""
    for seed in itertools.count(1):
        golden = compute(config, seed)
        if golden is not None:
            return seed, golden
    raise AssertionError("itertools.count ended")


def compute(config: ModelConfig, seed: int) -> dict[str, np.ndarray] | None:
    """The arrays of a golden file, or None if a greedy choice is nearly a tie."""
    with tempfile.TemporaryDirectory() as checkpoint:
        write_random(checkpoint, config, seed=seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = np.random.RandomState(seed).randint(0, model.config.vocab_size, max(PROMPTS)).astype(np.int32)
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
