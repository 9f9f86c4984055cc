"""A tokenizer.json that would cost a time or a memory beyond all proportion is refused within seconds, by name."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxctx.errors import InvalidArgument
from jaxctx.model.bundled import BUNDLED
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import Tokenizer
from jaxctx.model.text import bounds as bounds_module
from tests.echo import echo_text

ECHO: dict[str, Any] = json.loads(echo_text().tokenizer._backend.to_str())


def written(path: Path, **changes: Any) -> Path:
    """The echo tokenizer with some of its keys replaced."""
    (path / "tokenizer.json").write_text(json.dumps(ECHO | changes), "utf-8")
    return path / "tokenizer.json"


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.from_file(path)


def split(pattern: str) -> dict[str, Any]:
    expression = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [expression, byte_level]}


REGEX = r"^tokenizer\.json: pre_tokenizer\.pretokenizers\[0\]\.pattern\.Regex: "

# As in the tokenizers of Llama 3, Qwen 2 and 3, Mistral Nemo, and others that are published in the same format.
PUBLISHED = {
    "llama 3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+(?!\S)|\s+",
    "gpt 2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "brackets": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+| ?[^(\s|[.,!?…。，、।۔،])]+"
    r"|[[:alpha:]&&[^a]]+|[]a]+",
    "digits": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "lines": r"(?:\r\n|\n)+",
}


@pytest.mark.parametrize("pattern", PUBLISHED.values(), ids=PUBLISHED)
def test_published_patterns_are_read(tmp_path: Path, pattern: str) -> None:
    tokenizer = Tokenizer.from_file(written(tmp_path, pre_tokenizer=split(pattern)))
    assert (
        tokenizer.decode(tokenizer.encode("It's 12,345 words —\r\n  and more")) == "It's 12,345 words —\r\n  and more"
    )


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a+)+$", "repeats what can itself match in several ways"),
        (r"(?:a|a)*b", "repeats what can itself match"),
        (r"(a?){30}a{30}b", "repeats what can itself match"),
        (r"(?=(\w+)*!)x", "repeats what can itself match"),
        (r"(?>(a*)*b)", "repeats what can itself match"),
        (r"(?i)(?:\s|\w)+x", "repeats what can itself match"),
        (r"(?<name>(?:a|ab)(?:c|bcd))*d", "repeats what can itself match"),
        (r"(?:a{1,2}){30}", "repeats what can itself match"),  # the last, and yet it can fail
        (r"a{1,2}+b", "repeats what can itself match"),  # no possessive repeat in this syntax
        (r"[(]([)]*|x)*y", "repeats what can itself match"),
        ("a?" * 25 + "a" * 25 + "b", "25 repeats one after another, more than 10"),
        (r"(\w+)\1", "refers to another group"),
        (r"(?<n>a|b\g<n>c)", "refers to another group"),
        (r"(?~(a+)+)", "a group of the kind"),
        (r"(?x: a # )", "a group of the kind"),
        (r"(*FAIL)", "a callout"),
        (r"((a{1000}){1000}){1000}", "repeats more than 1000 times"),
        (r"a{99999999999}", "repeats more than 1000 times"),
        ("(" * 2000 + ")" * 2000, "more than 50 groups"),
        ("a" * 5000, "5,000 characters, more than 4,096"),
        ("[a", "unbalanced bracket"),
        ("(a", "unbalanced parenthesis"),
        ("a)", "unbalanced parenthesis"),
        ("a\\", "a backslash at the end"),
    ],
)
def test_a_pattern_that_explodes_is_refused(tmp_path: Path, pattern: str, why: str) -> None:
    refused(written(tmp_path, pre_tokenizer=split(pattern)), REGEX + why)


def test_a_pattern_in_a_normalizer_or_decoder_is_one_too(tmp_path: Path) -> None:
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    refused(written(tmp_path, normalizer=step), r"^tokenizer\.json: normalizer\.pattern\.Regex: repeats")
    refused(written(tmp_path, decoder=step), r"^tokenizer\.json: decoder\.pattern\.Regex: repeats")


def replace(short: str | None, long: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": "b*"} if short is None else {"String": short}, "content": long}


def charsmap(*texts: bytes) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + b"tree" + b"\0".join(texts)).decode()


@pytest.mark.parametrize(
    "steps",
    [
        [replace("a", "aa")] * 40,
        [replace("ab", "abababab")] * 20,
        [replace("a", "a" * 2000)],
        [replace(None, "b" * 2000)],
        [{"type": "Prepend", "prepend": "a" * 2000}],
        [{"type": "NFKD"}] * 10,
        [{"type": "ByteLevel"}] * 40,
        [{"type": "Sequence", "normalizers": [replace("a", "aa")] * 6}] * 6,
        [{"type": "Precompiled", "precompiled_charsmap": charsmap(b"a", b"a" * 2000)}],
    ],
    ids=lambda steps: f"{len(steps)} {steps[0]['type']}",
)
def test_steps_that_each_lengthen_a_text_are_refused(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    path = written(tmp_path, normalizer={"type": "Sequence", "normalizers": steps})
    refused(path, r"^tokenizer\.json: normalizer\.normalizers\[\d+\].*: with the steps before it, can make a text more")


def test_so_are_pre_tokenizers_and_decoders(tmp_path: Path) -> None:
    bytes_as_letters = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 40
    path = written(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": bytes_as_letters})
    refused(path, r"^tokenizer\.json: pre_tokenizer\.pretokenizers\[10\]: with the steps before it")
    path = written(tmp_path, decoder={"type": "Sequence", "decoders": [replace("a", "aa")] * 40})
    refused(path, r"^tokenizer\.json: decoder\.decoders\[10\]: with the steps before it")


def test_what_published_normalizers_do_to_a_text_is_allowed(tmp_path: Path) -> None:
    steps = [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]
    Tokenizer.from_file(written(tmp_path, normalizer={"type": "Sequence", "normalizers": steps}))


def template(pieces: list[Any], ids: int = 1) -> dict[str, Any]:
    special = {"<|startoftext|>": {"id": "<|startoftext|>", "ids": [257] * ids, "tokens": ["<|startoftext|>"] * ids}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}


TEXT, BOS = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|startoftext|>", "type_id": 0}}


def test_a_post_processor_that_multiplies_a_text_is_refused(tmp_path: Path) -> None:
    Tokenizer.from_file(written(tmp_path, post_processor=template([BOS, TEXT])))
    refused(
        written(tmp_path, post_processor=template([TEXT, TEXT])), r"post_processor\.single: must hold the text once"
    )
    refused(
        written(tmp_path, post_processor=template([BOS] * 100 + [TEXT])), "post_processor: adds more than 64 tokens"
    )
    refused(written(tmp_path, post_processor=template([BOS, TEXT], 10**5)), "post_processor: adds more than 64 tokens")
    many = {"type": "Sequence", "processors": [template([BOS, TEXT], 40)] * 2}
    refused(written(tmp_path, post_processor=many), r"post_processor\.processors\[1\]: adds more than 64 tokens")


def nested(depth: int) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": None}, "model: missing"),
        ({"model": []}, "model: must be an object"),
        ({"model": ECHO["model"] | {"vocab": {}, "merges": []}, "added_tokens": []}, r"model\.vocab: empty"),
        ({"model": {"type": "Unigram", "unk_id": None, "vocab": []}, "added_tokens": []}, r"model\.vocab: empty"),
        ({"model": {"type": "BPE"}}, r"model\.vocab: missing"),
        ({"model": {"type": "BPE", "vocab": 7}}, r"model\.vocab: must be"),
        ({"model": {"type": "BPE", "vocab": {"a" * 20000: 0}, "merges": []}}, r"model\.vocab: an entry of 20,000"),
        (
            {"model": {"type": "BPE", "vocab": {"~~~~": 0}, "merges": []}, "added_tokens": []},
            r"model\.vocab: no entry is",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]}}, "not a tokenizer"),  # panics
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "not a tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}, "not a tokenizer"),
        ({"model": ECHO["model"] | {"dropout": 0.1}}, r"model\.dropout: "),
        (
            {
                "model": {
                    "type": "WordPiece",
                    "vocab": {"a": 0},
                    "unk_token": "a",
                    "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 10**9,
                }
            },
            r"model\.max_input_chars_per_word: ",
        ),
        ({"added_tokens": {}, "normalizer": 7}, "normalizer: must be an object"),
        ({"added_tokens": 7}, "added_tokens: must be a list"),
        ({"added_tokens": [{"id": 1}]}, "added_tokens: must be tokens with a content"),
        ({"normalizer": {"type": "Sequence", "normalizers": 7}}, r"normalizer\.normalizers: must be a list"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Nmt"}] * 100}},
            "normalizer: more than 64 steps",
        ),
        ({"normalizer": nested(100)}, "normalizer: more than 64 steps"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "§"}},
            r"normalizer\.precompiled_charsmap: not base64",
        ),
        ({"normalizer": {"type": "NoSuchThing"}}, "not a tokenizer"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_empty_or_malformed_is_named(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    refused(written(tmp_path, **changes), rf"^tokenizer\.json: {match}")


def test_deeply_nested_and_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"normalizer":' * 100_000)
    refused(path, r"^tokenizer\.json: not a tokenizer")
    path.write_text("[]")
    refused(path, r"^tokenizer\.json: must be an object")
    with path.open("wb") as file:
        file.truncate(2**30)
    refused(path, r"^tokenizer\.json: 1,073,741,824 bytes, more than")
    path.unlink()
    os.mkfifo(path)
    refused(path, r"^tokenizer\.json: not a file")
    monkeypatch.setattr(bounds_module, "MAX_ENTRIES", 100)
    refused(
        written(tmp_path.joinpath("other").mkdir() or tmp_path / "other"), r"model\.vocab: 512 entries, more than 100"
    )


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"\s*\s*\s*\s*[^\s!]", r"(?:1|11)+[^1!]"])
def test_a_pattern_that_nobody_foresaw_is_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    path = written(tmp_path, pre_tokenizer=split(pattern))
    monkeypatch.setattr(bounds_module, "_check_pattern", lambda *_: None)
    refused(path, r"^tokenizer\.json: (breaks down on a text of 4096|a text of 4096 characters takes it longer)")


def test_a_text_that_a_tokenizer_cannot_read_is_the_callers_mistake() -> None:
    """The library panics, or raises a bare Exception."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(ECHO))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    with pytest.raises(InvalidArgument, match=r"cannot read the text: Onig: .* retry-limit"):
        Tokenizer(backend).encode("a" * 40 + "!")
    words = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    assert words.encode("a") == [0]
    with pytest.raises(InvalidArgument, match=r"cannot read the text: .*UNK"):
        words.encode("b")


def test_the_bundled_tokenizer_is_sound() -> None:
    assert Tokenizer.from_file(BUNDLED / "tokenizer.json").encode("def f")
