"""Mixtral: Mistral's layers with experts in each, whose tensors have names of their own."""

from dataclasses import replace

from jaxctx.model.config import Experts, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import experts, fields
from jaxctx.model.families.family import Family, TensorPart

LINEARS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def read_mixtral(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    config = fields.read_shared(read, attention=fields.one_window)
    count = experts.read_count(read)
    per_token = experts.read_per_token(read, count)
    return replace(config, experts=Experts(count=count, per_token=per_token, ffn=config.ffn, normalised=True))


def mixtral_parts(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """See `PartsOf`."""
    name = parameter.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." in name:
        for ours, theirs in LINEARS.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
    return experts.experts_of_parameter(name, config)


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fields=fields.FIELDS | {"num_experts"},
    ignored=experts.TRAINING
    | {"attention_bias", "max_window_layers", "mlp_bias", "use_sliding_window", "norm_topk_prob"},
    read=read_mixtral,
    parts_of=mixtral_parts,
)
