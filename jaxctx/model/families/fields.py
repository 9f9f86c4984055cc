"""The fields of `config.json` that families share, and those that change no computed value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxctx.model.config import DTYPES, Activation, LayerAttention, ModelConfig
from jaxctx.model.config_reader import Reader, shown
from jaxctx.model.families import rope
from jaxctx.model.families.rope import FULL, SLIDING
from jaxctx.model.quantization.config import read_quantization

NORM_EPS = (1e-37, 1.0)  # every root of a mean square is a finite float32 above 0

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By the names that `hidden_act` has for them."""

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Of most classes in transformers 5.23. Checkpoints are written with their class at hand, so that a file may leave out
whatever equals it."""

FIELDS = rope.FIELDS | {
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "compression_config",  # its older name
    "layer_types",
    "sliding_window",
    "is_causal",
}
"""Understood by every family, in `read_shared` and the functions about windows: each family calls one of these."""

CHANGE_NOTHING = frozenset(
    {
        # where a file comes from, and with what it was written
        "model_type",
        "auto_map",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "internal_version",
        "tokenizer_class",
        "unsloth_fixed",
        "unsloth_version",
        # tokens that a model's text uses, not its arithmetic
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "model_max_length",
        "max_sequence_length",  # of Llama 1, beside max_position_embeddings
        # training
        "attention_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "attn_pdrop",
        "hidden_dropout",
        "initializer_range",
        "initializer_factor",
        "gradient_checkpointing",
        "neftune_noise_alpha",
        "pretraining_tp",  # in how many parts transformers 4 computed some products
        # how another program computes the same
        "use_cache",
        "cache_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "use_bfloat16",
        "tf_legacy_loss",
        # what it returns
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
        # other tasks
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "finetuning_task",
        "prefix",
        # how to sample, which requests and generation_config.json say
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "max_length",
        "min_length",
        "early_stopping",
        "repetition_penalty",
        "encoder_no_repeat_ngram_size",
        "diversity_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
    }
)
"""Fields that every family ignores, as are those whose name begins with an underscore."""


def refuse_unknown(read: Reader, known: frozenset[str]) -> None:
    """Raise CheckpointError for the first key that is neither `known` nor ignored, and says something.

    A model that would run and silently compute something else is worse than one that does not load. null, false, 0 and
    empty values say that a feature is not used.
    """
    for key, value in read.raw.items():
        if value and key not in known and key not in CHANGE_NOTHING and not key.startswith("_"):
            read.refuse(key, "is not understood, and may change what the model computes")


ReadAttention = Callable[[Reader, int], tuple[LayerAttention, ...]]
"""Reads `ModelConfig.layer_attention`, given the number of elements of a head."""


def full_attention(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    """Layers that all have the same embedding, and see everything."""
    return (LayerAttention(rope=rope.read_rope(read, head_dim)),)


def one_window(read: Reader, head_dim: int) -> tuple[LayerAttention, ...]:
    """Layers that all have the same embedding, and `sliding_window` if it is not null."""
    window = window_of_all_layers(read, slides=True)
    return (LayerAttention(window, rope.read_rope(read, head_dim)),)


def read_shared(
    read: Reader, *, attention: ReadAttention = full_attention, activation_key: str = "hidden_act"
) -> ModelConfig:
    """What the fields that families share say: a model of Llama's layers, which a family changes to its own."""
    read.one_of([None, True], "is_causal")  # of embedding models; transformers lets every row see all then
    read_quantization(read)  # refuses what is not supported; how weights are stored is nothing of the model
    width, heads = read.size("hidden_size"), read.size("num_attention_heads")
    head_dim = _head_dim(read, width, heads)
    layer_attention = attention(read, head_dim)
    ropes = [each.rope for each in layer_attention]
    max_positions, declared_positions = rope.exact_positions(ropes, read.size("max_position_embeddings"))
    most = declared_positions or max_positions
    return ModelConfig(
        architecture=read.get("architectures")[0],
        vocab_size=read.size("vocab_size"),
        width=width,
        layers=read.size("num_hidden_layers"),
        heads=heads,
        kv_heads=_kv_heads(read, heads),
        head_dim=head_dim,
        ffn=read.size("intermediate_size"),
        max_positions=max_positions,
        declared_positions=declared_positions,
        layer_attention=tuple(_without_wide_window(each, most) for each in layer_attention),
        norm_eps=read.number("rms_norm_eps", *NORM_EPS),
        activation=_activation(read, activation_key),
        tied=read.flag("tie_word_embeddings"),
        dtype=read.one_of(DTYPES, "dtype", "torch_dtype"),
        bos_token_id=next(iter(read.token_ids("bos_token_id")), None),
        eos_token_ids=read.token_ids("eos_token_id"),
    )


def _activation(read: Reader, key: str) -> Activation:
    name = read.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.refuse(key, f"{shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _kv_heads(read: Reader, heads: int) -> int:
    kv_heads = read.size("num_key_value_heads", null=heads)
    if heads % kv_heads:
        whence = "" if "num_key_value_heads" in read.raw else " (missing, so that the default of the class holds)"
        read.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}{whence}")
    return kv_heads


def _head_dim(read: Reader, width: int, heads: int) -> int:
    """As in transformers: the file's value, else the class's, else an equal share of the width."""
    if read.get("head_dim") is None and width % heads:
        read.refuse("head_dim", f"missing, and num_attention_heads = {heads} does not divide hidden_size = {width}")
    share = width // heads if read.defaults.get("head_dim") is None else None
    head_dim = read.size("head_dim", null=share)
    if head_dim % 2:
        read.refuse("head_dim", f"must be even for RoPE, not {head_dim}")
    return head_dim


def _without_wide_window(attention: LayerAttention, positions: int) -> LayerAttention:
    """Without a window that all of so many positions are within."""
    if attention.window is None or attention.window < positions:
        return attention
    return replace(attention, window=None)


def within_cached_window(read: Reader, config: ModelConfig) -> ModelConfig:
    """The model of a class that has no windows, with no more positions than a window that the file has all the same.

    In transformers such a window is of the cache and not of the layers: a prompt sees all of itself, and later tokens
    do not. Up to the width of the window both agree.
    """
    slides = read.flag("use_sliding_window") or "use_sliding_window" not in read.raw
    window = window_of_all_layers(read, slides=slides)
    if window is None or window >= config.max_positions:
        return config
    return replace(config, max_positions=window, declared_positions=config.declared_positions or config.max_positions)


def window_of_all_layers(read: Reader, *, slides: bool) -> int | None:
    """Width in tokens of the window that all layers have; None: their attention is full, as it is unless it `slides`.

    Raises CheckpointError if `layer_types` says otherwise.
    """
    kinds = layer_types(read)
    window = read.size("sliding_window") if slides and read.get("sliding_window") is not None else None
    other = SLIDING if window is None else FULL
    if kinds is not None and other in kinds:
        there_is = "there is no sliding_window" if window is None else f"sliding_window = {window} is of all layers"
        read.refuse("layer_types", f"{other}, but the other keys say that {there_is}")
    return window


def windows_of_kinds(read: Reader, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Of each layer the width of its window in tokens, None where its kind is full. Only a window has to be there."""
    window = read.size("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def layer_types(read: Reader) -> list[str] | None:
    """`full_attention` or `sliding_attention` for each layer, or None where the file does not say."""
    kinds, layers = read.get("layer_types"), read.size("num_hidden_layers")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        read.refuse("layer_types", f"must be a list, not {shown(kinds)}")
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown:
        read.refuse("layer_types", f"{', '.join(unknown)[:80]} not supported")
    if len(kinds) != layers:
        read.refuse("layer_types", f"of {len(kinds)} layers, but num_hidden_layers = {layers}")
    return kinds
