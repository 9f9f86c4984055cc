"""Granite: Llama's layers, with multipliers of embedding, scores and residual stream, and a divisor of logits."""

from dataclasses import replace

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields
from jaxctx.model.families.family import Family

MULTIPLIER = (1e-6, 1e6)


def read_granite(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    return replace(
        fields.within_cached_window(read, fields.read_shared(read)),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=read.flag("mlp_bias"),
        embedding_scale=read.number("embedding_multiplier", *MULTIPLIER),
        attention_scale=read.number("attention_multiplier", *MULTIPLIER),
        residual_scale=read.number("residual_multiplier", *MULTIPLIER),
        logits_scale=1.0 / read.number("logits_scaling", *MULTIPLIER),
    )


GRANITE = Family(
    architecture="GraniteForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,  # as many as there are heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fields=fields.FIELDS | {"use_sliding_window"},
    ignored=frozenset({"max_window_layers"}),
    read=read_granite,
)
