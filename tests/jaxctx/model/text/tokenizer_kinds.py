"""Small tokenizers of each kind that the supported families have, as directories: in their order of steps they are as
published, with some tens of entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["▁the", "▁cat", "▁Hello", "Hello", "▁world", "漢", "é", "▁é", "🎉", "▁1", "▁▁", "▁▁▁▁", "ing", "ed"]
# How the families cut texts into words; those of Llama 3, Qwen, and GPT-4's kind (Phi-4, OLMo 2) differ in digits.
_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + _REST
LLAMA3_SPLIT = SPLIT.replace("DIGITS", r"\p{N}{1,3}")
QWEN_SPLIT = SPLIT.replace("DIGITS", r"\p{N}")
TEXTS = [
    "Hello world",
    " Hello  the cat",
    "é👍漢字🎉 n\u0303",
    "12345 tabs\tand\n\nlines  \n",
    "it's THE'S end , it 's  so .",
    "",
    " ",
    "a<s>b </s> c<s> d",
    "<|x|>Hello <|x|> the <|y|>the",
    "the<z>the <z> cat",
    "x \u3000 \ufeff\x00 y",
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A tokenizer's files."""

    backend: Callable[[], tokenizers.Tokenizer]
    settings: dict[str, Any]  # tokenizer_config.json
    config: dict[str, Any] = field(default_factory=dict)  # of config.json, beside the vocabulary's size

    def write(self, path: Path) -> Path:
        backend = self.backend()
        (path / "tokenizer.json").write_text(backend.to_str(), "utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(self.settings), "utf-8")
        config = {"vocab_size": backend.get_vocab_size() + 64, **self.config}  # as of a matrix that is padded
        (path / "config.json").write_text(json.dumps(config), "utf-8")
        return path


ADDED = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|x|>", special=True, normalized=False, lstrip=True, rstrip=True),
    AddedToken("<|y|>", special=False, normalized=True, single_word=True),
    AddedToken("<z>", special=False, normalized=False, rstrip=True),
]


def with_bos(backend: tokenizers.Tokenizer, *, eos: bool = False) -> None:
    """Let the tokenizer add a begin of a sequence, and an end."""
    special = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    single = "<s> $A </s>" if eos else "<s> $A"
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)


def byte_level(
    split: str, *, bos: bool, nfc: bool = False, prefix: bool = False, eos: bool = False
) -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("Ã", "©"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ")]
    entries = [*letters, *(first + second for first, second in merges)]
    backend = tokenizers.Tokenizer(models.BPE({entry: place for place, entry in enumerate(entries)}, merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_tokens(ADDED)
    if bos:
        with_bos(backend, eos=eos)
    return backend


def sentencepiece_model() -> models.BPE:
    """Bytes, letters and some words, with merges that make the words."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = list(dict.fromkeys("▁abcdefghijklmnopqrstuvwxyzHTES123'<>|/" + "".join(WORDS)))
    entries += letters
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        whole = word[0]
        for letter in word[1:]:
            if (whole, letter) not in merges:
                merges.append((whole, letter))
            whole += letter
            if whole not in entries:
                entries.append(whole)
    vocabulary = {entry: place for place, entry in enumerate(entries)}
    return models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def llama2(*, prepend: bool = True, bos: bool = True) -> tokenizers.Tokenizer:
    """As converted for Llama 2 and Mistral 7B: spaces by a normalizer."""
    backend = tokenizers.Tokenizer(sentencepiece_model())
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prepend else parts)
    backend.add_tokens(ADDED)
    if bos:
        with_bos(backend)
    return backend


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """As converted later: spaces by a pre-tokenizer."""
    backend = llama2()
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return backend


def gemma() -> tokenizers.Tokenizer:
    backend = llama2(prepend=False)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


def unigram() -> tokenizers.Tokenizer:
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz'<>|"]
    scored = [(entry, -float(place % 17) - 1) for place, entry in enumerate([*entries, *WORDS])]
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="always")])
    backend.add_tokens(ADDED)
    with_bos(backend, eos=True)
    return backend


LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 32}
GEMMA: dict[str, Any] = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
PHI3: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
OLMO2: dict[str, Any] = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
LLAMA_CLASS = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", **NAMED}

KINDS: dict[str, Kind] = {
    "llama 3": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=True), FAST, LLAMA),
    "llama 3, cleaned up": Kind(
        lambda: byte_level(LLAMA3_SPLIT, bos=True), {**FAST, "clean_up_tokenization_spaces": True}, LLAMA
    ),
    "bos switched off": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=True), {**FAST, "add_bos_token": False}, LLAMA),
    "bos switched on": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=False), {**FAST, "add_bos_token": True}, LLAMA),
    "bos left alone": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=True), {**FAST, "add_bos_token": None}, LLAMA),
    "eos switched on": Kind(
        lambda: byte_level(LLAMA3_SPLIT, bos=True), {**FAST, "add_bos_token": True, "add_eos_token": True}, LLAMA
    ),
    "eos alone": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=True), {**FAST, "add_eos_token": True}, LLAMA),
    "eos in the file": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=True, eos=True), FAST, LLAMA),
    "bos without a name": Kind(
        lambda: byte_level(LLAMA3_SPLIT, bos=False),
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True},
        LLAMA,
    ),
    "qwen 2": Kind(
        lambda: byte_level(QWEN_SPLIT, bos=False, nfc=True),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "add_bos_token": False, "pad_token": "</s>"},
        QWEN2,
    ),
    "phi 4": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=False), {**NAMED, "tokenizer_class": "GPT2Tokenizer"}, PHI3),
    "olmo 2": Kind(lambda: byte_level(LLAMA3_SPLIT, bos=False), {**NAMED, "tokenizer_class": "GPT2Tokenizer"}, OLMO2),
    "gemma": Kind(
        gemma, {**NAMED, "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>", "add_bos_token": True}, GEMMA
    ),
    "mistral 7b": Kind(llama2, {**LLAMA_CLASS, "legacy": True, "add_bos_token": True}, MISTRAL),
    "mistral, first": Kind(lambda: metaspace("first"), {**LLAMA_CLASS, "legacy": False}, MISTRAL),
    "phi 3": Kind(llama2, {**LLAMA_CLASS, "add_bos_token": False, "legacy": False}, PHI3),
    "llama 2": Kind(llama2, {**LLAMA_CLASS, "legacy": False, "add_bos_token": True}, LLAMA),
    "llama 2, legacy": Kind(llama2, {**LLAMA_CLASS, "legacy": True}, LLAMA),
    "llama 2, no prefix": Kind(llama2, {**LLAMA_CLASS, "legacy": False, "add_prefix_space": False}, LLAMA),
    "llama 2, as it is": Kind(llama2, FAST, LLAMA),
    "metaspace": Kind(lambda: metaspace("always"), FAST, LLAMA),
    "unigram": Kind(unigram, FAST, LLAMA),
}
