"""Qwen2-MoE and Qwen3-MoE: Qwen2's and Qwen3's layers with experts in some or all; Qwen2's share one more."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxctx.model.config import LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import experts, fields, rope
from jaxctx.model.families.family import Family, TensorPart
from jaxctx.model.families.rope import FULL, SLIDING

DEFAULTS: Mapping[str, Any] = {
    **fields.DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def read_qwen2_moe(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    shared_ffn = read.size("shared_expert_intermediate_size")
    config = fields.read_shared(read, attention=_qwen2_attention)
    bias = read.flag("qkv_bias")
    return replace(config, qkv_bias=bias, experts=experts.read_qwen(read, config, shared_ffn=shared_ffn))


def read_qwen3_moe(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    config = fields.read_shared(read, attention=_qwen3_attention)
    read.one_of([None, True], "use_qk_norm")  # in the files of Qwen3-Coder; it is always so
    bias = read.flag("attention_bias")
    found = experts.read_qwen(read, config)
    return replace(config, query_key_norm="head", qkv_bias=bias, out_bias=bias, experts=found)


def _qwen3_attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    """All layers have a window, or none has."""
    window = fields.window_of_all_layers(read, slides=read.flag("use_sliding_window"))
    return (LayerAttention(window, rope.read_rope(read, head_dim)),)


def _qwen2_attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    embedding = rope.read_rope(read, head_dim)
    return tuple(LayerAttention(window, embedding) for window in _qwen2_windows(read))


def _qwen2_windows(read: Reader) -> tuple[int | None, ...]:
    """Of each layer, or of all: of the first `max_window_layers` every other one has a window."""
    if not read.flag("use_sliding_window"):
        return (fields.window_of_all_layers(read, slides=False),)
    kinds = fields.layer_types(read)
    if kinds is None:
        first = 0 if read.get("max_window_layers") == 0 else read.size("max_window_layers")
        layers = range(read.size("num_hidden_layers"))
        kinds = [SLIDING if layer < first and layer % 2 == 0 else FULL for layer in layers]
    return fields.windows_of_kinds(read, kinds)


def qwen_moe_parts(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """See `PartsOf`."""
    return experts.experts_of_parameter(parameter, config)


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    fields=fields.FIELDS | experts.SPARSE_LAYERS,
    ignored=experts.TRAINING | {"attention_bias", "mlp_bias"},
    read=read_qwen2_moe,
    parts_of=qwen_moe_parts,
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
    },
    fields=fields.FIELDS | experts.SPARSE_LAYERS | {"num_local_experts", "use_qk_norm"},
    ignored=experts.TRAINING | {"max_window_layers", "mlp_bias"},
    read=read_qwen3_moe,
    parts_of=qwen_moe_parts,
)
