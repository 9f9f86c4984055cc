"""OLMo 2 and 3: norms of what comes out of a block, and of queries and keys over all heads together.

In OLMo 3 three of four layers have a sliding window, and only the others' RoPE is stretched.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxctx.model.config import LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields, rope
from jaxctx.model.families.family import Family
from jaxctx.model.families.rope import FULL, SLIDING

THETA_OF_3 = 500000.0


def read_olmo2(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    return _olmo(read, fields.within_cached_window(read, fields.read_shared(read)))


def read_olmo3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    return _olmo(read, fields.read_shared(read, attention=_attention_of_3))


def _olmo(read: Reader, config: ModelConfig) -> ModelConfig:
    bias = read.flag("attention_bias")
    return replace(config, norms="after", query_key_norm="all_heads", qkv_bias=bias, out_bias=bias)


def _attention_of_3(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    theta, sliding = read.number("rope_theta", *rope.ROPE_THETA), read.inner("rope_parameters").inner(SLIDING)
    if theta != THETA_OF_3 and "rope_theta" not in sliding.raw:
        other = f"transformers takes {THETA_OF_3:g} for layers with a window"
        read.refuse("rope_theta", f"{theta:g}, but {other}; say theirs in {sliding.prefix[:-1]}")
    embeddings = rope.read_rope_of_kinds(read, head_dim, {FULL: theta, SLIDING: THETA_OF_3})
    layers = range(read.size("num_hidden_layers"))
    kinds = fields.layer_types(read) or [SLIDING if (layer + 1) % 4 else FULL for layer in layers]
    windows = fields.windows_of_kinds(read, kinds)
    return tuple(LayerAttention(window, embeddings[kind]) for window, kind in zip(windows, kinds, strict=True))


DEFAULTS: Mapping[str, Any] = {
    **fields.DEFAULTS,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "num_key_value_heads": None,  # as many as there are heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults=DEFAULTS,
    fields=fields.FIELDS | {"use_sliding_window"},
    ignored=frozenset({"max_window_layers", "mlp_bias"}),
    read=read_olmo2,
)
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    defaults={**DEFAULTS, "rope_theta": THETA_OF_3, "sliding_window": 4096},
    fields=fields.FIELDS - {"original_max_position_embeddings"},
    ignored=frozenset({"mlp_bias"}),
    read=read_olmo3,
)
