"""Mistral: Llama's layers, with a sliding window in all of them or in none."""

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields
from jaxctx.model.families.family import Family


def read_mistral(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    return fields.read_shared(read, attention=fields.one_window)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fields=fields.FIELDS,
    ignored=frozenset({"attention_bias", "max_window_layers", "mlp_bias", "use_sliding_window"}),
    read=read_mistral,
)
