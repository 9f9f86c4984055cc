"""Tokenizers of the class LlamaTokenizer, whose steps `transformers` 5 takes from its class, not from `tokenizer.json`.

Llama 2, TinyLlama, Yi and others: their `tokenizer.json` puts a space before each piece of a text between special
tokens; the class puts one before the text alone, unless `tokenizer_config.json` says `"legacy": true`. Only the model's
own type decides: with `"model_type": "mistral"` or "phi3" the same class is overruled by the file.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxctx.model.config_reader import Reader
from jaxctx.model.text.tokenizer import WORD_START, decoder_json

CLASS = "LlamaTokenizer"
MODEL_TYPES = {"llama"}  # whose class of tokenizers is what tokenizer_config.json says
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # by the class


def has_llama_class(backend: tokenizers.Tokenizer, settings: Reader, config: Reader) -> bool:
    """Whether the steps of this tokenizer are those of the class."""
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    is_byte_level = '"type":"ByteLevel"' in decoder_json(backend)  # Llama 3 with the name of the older class
    return (
        str(name).removesuffix("Fast") == CLASS
        and config.get("model_type") in MODEL_TYPES
        and isinstance(backend.model, models.BPE)
        and not is_byte_level
    )


def with_class_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json with the special tokens that the class names where it leaves them out."""
    return {**{name: token for name, token in NAMED.items() if name not in settings}, **settings}


def use_llama_class(backend: tokenizers.Tokenizer, settings: Reader) -> None:
    """Give the tokenizer the steps of the class.

    Raises CheckpointError naming a key that is neither true, false nor null.
    """
    prefix, legacy = (settings.get(key) for key in ("add_prefix_space", "legacy"))
    for key, value in (("add_prefix_space", prefix), ("legacy", legacy)):
        if value is not None and not isinstance(value, bool):
            settings.refuse(key, "must be true, false or null")
    has_prefix = prefix is None or prefix
    scheme = "never" if not has_prefix else "always" if legacy else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(WORD_START, prepend_scheme=scheme, split=False)
    parts: list[decoders.Decoder] = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
