"""Qwen2 and Qwen2.5: biases of query, key and value. Qwen3: norms of the heads of query and key instead.

In both, layers from `max_window_layers` on, or those that `layer_types` says, may have a sliding window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields
from jaxctx.model.families.family import Family

DEFAULTS: Mapping[str, Any] = {
    **fields.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}


def read_qwen2(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    return replace(_shared(read), qkv_bias=True)


def read_qwen3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    return replace(_shared(read), query_key_norm="head", qkv_bias=bias, out_bias=bias)


def _shared(read: Reader) -> ModelConfig:
    return fields.capped(fields.read_shared(read), _window(read))


def _window(read: Reader) -> int | None:
    """Width in tokens of the window that some layers have."""
    kinds = fields.layer_types(read)
    slides = read.flag("use_sliding_window") and read.get("sliding_window") is not None
    if not slides:
        return fields.window_of_all_layers(read, slides=False)
    window = read.size("sliding_window")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if read.get("max_window_layers") == 0:
        return window
    # The first so many are full.
    return window if read.size("max_window_layers") < read.size("num_hidden_layers") else None


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults={**DEFAULTS, "head_dim": None},
    fields=fields.FIELDS,
    ignored=frozenset({"attention_bias", "mlp_bias"}),
    read=read_qwen2,
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults={**DEFAULTS, "head_dim": 128, "attention_bias": False},
    fields=fields.FIELDS,
    ignored=frozenset({"mlp_bias"}),
    read=read_qwen3,
)
