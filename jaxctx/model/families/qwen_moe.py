"""Qwen2-MoE and Qwen3-MoE: Qwen2's and Qwen3's layers with experts in some or all; Qwen2's share one more."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import experts, fields
from jaxctx.model.families.family import Family, TensorPart

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
    config = fields.capped(fields.read_shared(read), _qwen2_window(read))
    bias = read.flag("qkv_bias")
    return replace(config, qkv_bias=bias, experts=experts.read_qwen(read, config, shared_ffn=shared_ffn))


def read_qwen3_moe(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    window = fields.window_of_all_layers(read, slides=read.flag("use_sliding_window"))
    config = fields.capped(fields.read_shared(read), window)
    bias = read.flag("attention_bias")
    found = experts.read_qwen(read, config)
    return replace(config, query_key_norm="head", qkv_bias=bias, out_bias=bias, experts=found)


def _qwen2_window(read: Reader) -> int | None:
    """Width in tokens of the window that some layers have: of the first `max_window_layers` every other one."""
    kinds = fields.layer_types(read)
    if not read.flag("use_sliding_window") or read.get("sliding_window") is None:
        return fields.window_of_all_layers(read, slides=False)
    window = read.size("sliding_window")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    if read.get("max_window_layers") == 0:
        return None
    read.size("max_window_layers")
    return window


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
    fields=fields.FIELDS | experts.SPARSE_LAYERS | {"num_local_experts"},
    ignored=experts.TRAINING | {"max_window_layers", "mlp_bias"},
    read=read_qwen3_moe,
    parts_of=qwen_moe_parts,
)
