"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with fused projections, LongRoPE, and heads of which a part rotates."""

from collections.abc import Mapping

from jaxctx.model.config import LayerAttention, ModelConfig, RopeKind
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields, rope
from jaxctx.model.families.family import Family, TensorPart

# "su" and "yarn" are what LongRoPE was called first.
ROPE_KINDS: Mapping[str, RopeKind | None] = {
    "default": None,
    "longrope": "longrope",
    "su": "longrope",
    "yarn": "longrope",
}


def read_phi3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    return fields.read_shared(read, attention=_attention)


def _attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    read.size("original_max_position_embeddings")  # the class demands one whatever RoPE there is
    window = fields.window_of_all_layers(read, slides=True)
    return (LayerAttention(window, rope.read_rope(read, head_dim, kinds=ROPE_KINDS, partial=True)),)


def parts_of(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """Query, key and value are one tensor, and so are gate and up."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, queries + keys),
        "v_proj": ("qkv_proj", queries + keys, queries + 2 * keys),
        "gate_proj": ("gate_up_proj", 0, config.ffn),
        "up_proj": ("gate_up_proj", config.ffn, 2 * config.ffn),
    }
    module, _, leaf = parameter.rpartition(".")
    path, _, name = module.rpartition(".")
    if name not in fused:
        return (TensorPart(parameter),)
    tensor, start, end = fused[name]
    return (TensorPart(f"{path}.{tensor}.{leaf}", (start, end)),)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,  # as many as there are heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    fields=fields.FIELDS,
    ignored=frozenset(
        {
            "attention_bias",
            "mlp_bias",
            "lm_head_bias",
            "full_attn_mod",
            "interpolate_factor",
            "max_window_layers",
            "use_sliding_window",
        }
    ),
    read=read_phi3,
    parts_of=parts_of,
)
