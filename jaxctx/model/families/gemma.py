"""Gemma 1, 2 and 3: embeddings scaled by the root of the width, norms whose scale is 1 + weight, GELU.

Gemma 2 and 3 also normalise what comes out of a block, and most of their layers have a sliding window. In Gemma 2 those
alternate with full ones, and scores and logits have soft caps; in Gemma 3 every sixth is full, with a RoPE of its own,
and the heads of query and key are normalised. Of Gemma 3 with images the text model is served.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxctx.model.config import LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader
from jaxctx.model.families import fields, rope
from jaxctx.model.families.family import Family, TensorPart
from jaxctx.model.families.rope import FULL, SLIDING

SOFT_CAP = (1e-3, 1e6)
SCALAR = (1e-6, 1e6)  # query_pre_attn_scalar

# Keys beside `text_config` that go before those within it.
OF_ALL = frozenset(
    {
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "compression_config",  # its older name
    }
)

DEFAULTS: Mapping[str, Any] = {
    **fields.DEFAULTS,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
OF_2_AND_3: Mapping[str, Any] = {
    **{key: value for key, value in DEFAULTS.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def read_gemma(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    if read.get("hidden_act") == "gelu":  # of the first files, which mean the approximation
        read = replace(read, raw={**read.raw, "hidden_act": "gelu_pytorch_tanh"})
    return _gemma(read, fields.within_cached_window(read, fields.read_shared(read)))


def read_gemma2(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    config = fields.read_shared(read, attention=_attention_of_2, activation_key="hidden_activation")
    read.one_of([None, read.get("sliding_window")], "sliding_window_size")  # said twice in the files of 9B
    return replace(
        _gemma(read, config),
        norms="around",
        attention_scale=read.number("query_pre_attn_scalar", *SCALAR) ** -0.5,
        scores_soft_cap=_soft_cap(read, "attn_logit_softcapping"),
        logits_soft_cap=_soft_cap(read, "final_logit_softcapping"),
    )


def read_gemma3(read: Reader) -> ModelConfig:
    """See `Family.read`."""
    read.one_of([None], "attn_logit_softcapping")  # the class does not see another value
    config = fields.read_shared(read, attention=_attention_of_3, activation_key="hidden_activation")
    return replace(
        _gemma(read, config),
        norms="around",
        query_key_norm="head",
        attention_scale=read.number("query_pre_attn_scalar", *SCALAR) ** -0.5,
        logits_soft_cap=_soft_cap(read, "final_logit_softcapping"),
    )


def read_gemma3_with_images(read: Reader) -> ModelConfig:
    """See `Family.read`. A text that has no image is what the model of `text_config` makes of it."""
    text = replace(read.inner("text_config"), defaults=GEMMA3.defaults)
    fields.refuse_unknown(text, GEMMA3.fields | GEMMA3.defaults.keys() | GEMMA3.ignored)
    text.one_of([None], "final_logit_softcapping")  # this class does not see another value, the one for text alone does
    above = {key: value for key, value in read.raw.items() if key in OF_ALL and value is not None}
    tied = read.flag("tie_word_embeddings")  # of the head, which is not within the text model
    return read_gemma3(replace(text, raw={**text.raw, **above, "tie_word_embeddings": tied}))


def parts_with_images(config: ModelConfig, parameter: str) -> tuple[TensorPart, ...]:
    """Beside the tensors for images, those of the text model have a name in front."""
    return (TensorPart(f"language_model.{parameter}"),)


def _gemma(read: Reader, config: ModelConfig) -> ModelConfig:
    read.one_of([False], "use_bidirectional_attention")
    bias = read.flag("attention_bias")
    return replace(config, norm_adds_one=True, embedding_scale=math.sqrt(config.width), qkv_bias=bias, out_bias=bias)


def _attention_of_2(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    embedding = rope.read_rope(read, head_dim)
    return tuple(LayerAttention(window, embedding) for window in fields.windows_of_kinds(read, _kinds(read, 2)))


def _attention_of_3(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    bases = {
        FULL: read.number("rope_theta", *rope.ROPE_THETA),
        SLIDING: read.number("rope_local_base_freq", *rope.ROPE_THETA),
    }
    embeddings = rope.read_rope_of_kinds(read, head_dim, bases)
    kinds = _kinds(read, read.size("sliding_window_pattern"))
    windows = fields.windows_of_kinds(read, kinds)
    return tuple(LayerAttention(window, embeddings[kind]) for window, kind in zip(windows, kinds, strict=True))


def _kinds(read: Reader, period: int) -> Sequence[str]:
    """Of each layer; unless the file says otherwise the last one of each `period` is full."""
    layers = range(read.size("num_hidden_layers"))
    return fields.layer_types(read) or [SLIDING if (layer + 1) % period else FULL for layer in layers]


def _soft_cap(read: Reader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key, *SOFT_CAP)


GEMMA = Family(
    architecture="GemmaForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
    },
    fields=fields.FIELDS | {"use_sliding_window", "use_bidirectional_attention"},
    ignored=frozenset({"hidden_activation", "max_window_layers"}),
    read=read_gemma,
)
GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    defaults={
        **OF_2_AND_3,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fields=fields.FIELDS - {"hidden_act"} | {"use_bidirectional_attention", "sliding_window_size"},
    ignored=frozenset({"hidden_act"}),
    read=read_gemma2,
)
GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    defaults={
        **OF_2_AND_3,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    fields=fields.FIELDS - {"hidden_act", "original_max_position_embeddings"} | {"use_bidirectional_attention"},
    ignored=frozenset({"hidden_act"}),
    read=read_gemma3,
)
GEMMA3_WITH_IMAGES = Family(
    architecture="Gemma3ForConditionalGeneration",
    defaults={"tie_word_embeddings": True},
    fields=OF_ALL | {"text_config"},
    ignored=frozenset(
        {
            "vision_config",
            "mm_tokens_per_image",
            "image_token_index",
            "image_token_id",
            "boi_token_index",
            "boi_token_id",
            "eoi_token_index",
            "eoi_token_id",
        }
    ),
    read=read_gemma3_with_images,
    parts_of=parts_with_images,
    unread=("vision_tower.", "multi_modal_projector."),
)
