"""SmolLM3: Llama's layers, of which some, every fourth as published, do not rotate."""

from collections.abc import Sequence
from dataclasses import replace

from jaxctx.model.config import LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.families import fields, rope
from jaxctx.model.families.family import Family
from jaxctx.model.families.rope import FULL, SLIDING


def read_smollm3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    bias = read.flag("attention_bias")
    return replace(
        fields.read_shared(read, attention=_attention), qkv_bias=bias, out_bias=bias, ffn_bias=read.flag("mlp_bias")
    )


def _attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    embedding, rotating = rope.read_rope(read, head_dim), _rotating(read)
    windows = _windows(read, rotating)
    return tuple(
        LayerAttention(window, embedding if rotates else None)
        for window, rotates in zip(windows, rotating, strict=True)
    )


def _windows(read: Reader, rotating: Sequence[bool]) -> tuple[int | None, ...]:
    """Of each layer: unless the file says otherwise, those that do not rotate have a window, if any has."""
    if not read.flag("use_sliding_window") or read.get("sliding_window") is None:
        return (fields.window_of_all_layers(read, slides=False),) * len(rotating)
    kinds = fields.layer_types(read)
    return fields.windows_of_kinds(read, kinds or [FULL if each else SLIDING for each in rotating])


def _rotating(read: Reader) -> list[bool]:
    """Of each layer, whether it rotates."""
    layers, interval = read.size("num_hidden_layers"), read.size("no_rope_layer_interval")
    listed = read.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or not all(type(each) is int and each in (0, 1) for each in listed):
        read.refuse("no_rope_layers", f"must be a list of 0 and 1, not {shown(listed)}")
    if len(listed) < layers:
        read.refuse("no_rope_layers", f"of {len(listed)} layers, but num_hidden_layers = {layers}")
    return [bool(each) for each in listed[:layers]]


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    defaults={
        **fields.DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
    },
    fields=fields.FIELDS,
    ignored=frozenset({"max_window_layers"}),
    read=read_smollm3,
)
