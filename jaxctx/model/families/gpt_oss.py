"""gpt-oss: every layer has experts with biases and a clamped gate, every query head a sink, every other layer a window.

The experts of a layer are two tensors with their inputs first, of which one has gate and up in turn. Published files
have them in MXFP4, see `quantization.mxfp4`.
"""

from dataclasses import replace

from jaxctx.model.config import ClampedGate, Experts, LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import experts, fields, rope
from jaxctx.model.families.family import Family, TensorPart
from jaxctx.model.families.rope import FULL, SLIDING

SLOPE, LIMIT = (1e-3, 1e3), (1e-3, 1e6)  # bounds of the gate's
GATE_AND_UP = {"gate_proj": 0, "up_proj": 1}  # where the channels of each begin in `gate_up_proj`
YARN = {  # where the file says nothing of RoPE
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    config = fields.read_shared(read, attention=_attention)
    read.one_of(["silu"], "hidden_act")  # by which the gate's form is meant
    count = experts.read_count(read)
    gate = ClampedGate(read.number("swiglu_alpha", *SLOPE), read.number("swiglu_limit", *LIMIT))
    bias = read.flag("attention_bias")
    found = Experts(
        count=count,
        per_token=experts.read_per_token(read, count),
        ffn=config.ffn,
        normalised=True,
        has_bias=True,
        clamped_gate=gate,
    )
    return replace(config, qkv_bias=bias, out_bias=bias, attention_sinks=True, experts=found)


def _attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    if all(read.get(key) is None for key in ("rope_parameters", "rope_scaling")):
        read = replace(read, defaults={**read.defaults, "rope_parameters": YARN})
    embedding = rope.read_rope(read, head_dim)
    kinds = fields.layer_types(read)
    if kinds is None:
        kinds = [FULL if layer % 2 else SLIDING for layer in range(read.size("num_hidden_layers"))]
    return tuple(LayerAttention(window, embedding) for window in fields.windows_of_kinds(read, kinds))


def gpt_oss_parts(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """See `PartsOf`."""
    name = parameter.replace(".mlp.gate.", ".mlp.router.")
    before, found, behind = name.partition(".experts.")
    if not found:
        return (TensorPart(name),)
    matrix, _, kind = behind.partition(".")  # such as gate_proj and weight
    is_bias = kind == "bias"
    ending = "_bias" if is_bias else ""
    if matrix not in GATE_AND_UP:
        return (TensorPart(f"{before}.experts.{matrix}{ending}", inputs_first=not is_bias),)
    channels = (GATE_AND_UP[matrix], len(GATE_AND_UP))
    return (TensorPart(f"{before}.experts.gate_up_proj{ending}", inputs_first=not is_bias, channels=channels),)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    fields=fields.FIELDS | {"num_experts"},
    # What the makers' own program reads, beside what transformers does.
    ignored=experts.TRAINING | {"experts_per_token", "initial_context_length"},
    read=read_gpt_oss,
    parts_of=gpt_oss_parts,
)
