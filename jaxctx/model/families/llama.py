"""Llama 2 and 3, and the many models of their shape: SmolLM, Yi, distills of DeepSeek."""

from dataclasses import replace

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields
from jaxctx.model.families.family import Family


def read_llama(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    config = fields.within_cached_window(read, fields.read_shared(read))
    return replace(config, qkv_bias=bias, out_bias=bias, ffn_bias=read.flag("mlp_bias"))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,  # as many as there are heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fields=fields.FIELDS | {"use_sliding_window"},
    ignored=frozenset({"max_window_layers", "is_llama_config"}),
    read=read_llama,
)
