"""Qwen2 and Qwen2.5: biases of query, key and value. Qwen3: norms of the heads of query and key instead.

In both, layers from `max_window_layers` on, or those that `layer_types` says, may have a sliding window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxctx.model.config import LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields, rope
from jaxctx.model.families.family import Family
from jaxctx.model.families.rope import FULL, SLIDING

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
    return replace(_within_one_chunk(read, _shared(read)), qkv_bias=True)


def read_qwen3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    return replace(_shared(read), query_key_norm="head", qkv_bias=bias, out_bias=bias)


def _within_one_chunk(read: Reader, config: ModelConfig) -> ModelConfig:
    """Of Qwen2.5 1M: up to the positions that it was trained on its attention in two chunks is plain attention.

    transformers knows nothing of the chunks, and computes plain attention for any length.
    """
    chunks = read.inner("dual_chunk_attention_config")
    exact = chunks.size("original_max_position_embeddings") if chunks.raw else config.max_positions
    if exact >= config.max_positions:
        return config
    return replace(config, max_positions=exact, declared_positions=config.declared_positions or config.max_positions)


def _shared(read: Reader) -> ModelConfig:
    return fields.read_shared(read, attention=_attention)


def _attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    embedding = rope.read_rope(read, head_dim)
    return tuple(LayerAttention(window, embedding) for window in _windows(read))


def _windows(read: Reader) -> tuple[int | None, ...]:
    """Of each layer, or of all: the width of its window in tokens."""
    slides = read.flag("use_sliding_window") and read.get("sliding_window") is not None
    if not slides:
        return (fields.window_of_all_layers(read, slides=False),)
    kinds = fields.layer_types(read)
    if kinds is None:
        full = 0 if read.get("max_window_layers") == 0 else read.size("max_window_layers")  # the first so many
        kinds = [SLIDING if layer >= full else FULL for layer in range(read.size("num_hidden_layers"))]
    return fields.windows_of_kinds(read, kinds)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    defaults={**DEFAULTS, "head_dim": None},
    fields=fields.FIELDS | {"dual_chunk_attention_config"},
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
