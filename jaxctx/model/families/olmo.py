"""OLMo 2: norms of what comes out of a block, and of queries and keys over all heads together."""

from dataclasses import replace

from jaxctx.model.config import ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields
from jaxctx.model.families.family import Family


def read_olmo2(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    return replace(
        fields.within_cached_window(read, fields.read_shared(read)),
        norms="after",
        query_key_norm="all_heads",
        qkv_bias=bias,
        out_bias=bias,
    )


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    defaults={
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
    },
    fields=fields.FIELDS | {"use_sliding_window"},
    ignored=frozenset({"max_window_layers", "mlp_bias"}),
    read=read_olmo2,
)
