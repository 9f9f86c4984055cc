"""Kinds of tokenizer, built here: byte-level BPE as in Qwen and Llama 3; metaspace with byte fallback as in Mistral."""

from __future__ import annotations

import itertools
import random

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxctx.model.text import Detokenizer, Tokenizer
from tests.echo import echo_text

ECHO = echo_text().tokenizer


def mistral_like(*, prepend: bool = True, new_style: bool = False) -> Tokenizer:
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,!?"]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("h", "e"), ("l", "l")]
    entries += [first + second for first, second in merges]
    vocab = {entry: i for i, entry in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse()]
    if new_style:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.Metaspace("▁", prepend_scheme="first"), *parts])
    else:
        steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prepend else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prepend else []
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts, *strip])
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in entries[:3]]
    backend.add_special_tokens(special)
    return Tokenizer(backend)


TOKENIZERS = {
    "byte-level": ECHO,
    "metaspace": mistral_like(),
    "metaspace, no prefix": mistral_like(prepend=False),
    "metaspace decoder": mistral_like(new_style=True),
}
TEXTS = [
    "the cat, and the dog!",
    "  leading and  double   spaces ",
    "é👍漢字 mixed with the text",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "नमस्ते שלום مرحبا",
    "a literal \ufffd stays, and \ufffd",
    "line\nline\r\n\ttab",
    "",
]


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    out = [detokenizer.push(ids[start:end]) for start, end in itertools.pairwise([0, *cuts, len(ids)])]
    return [*out, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_one_by_one_equals_all_at_once(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    out = pieces(tokenizer, ids, list(range(1, len(ids))))
    assert "".join(out) == tokenizer.decode(ids)
    assert name == "metaspace decoder" or tokenizer.decode(ids) == text  # that one drops all leading spaces
    # Nothing in pieces that is not in the text: no character came out in parts.
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in out)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_split_of_a_short_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(" é👍 the")
    assert 8 <= len(ids) <= 14
    for count in range(len(ids)):
        for cuts in itertools.combinations(range(1, len(ids)), min(count, 3)):
            assert "".join(pieces(tokenizer, ids, list(cuts))) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_after_a_prompt_only_what_the_output_adds(name: str) -> None:
    """The leading space of a word in the middle of a text survives, also right after a special token."""
    tokenizer = TOKENIZERS[name]
    for text in TEXTS[:5]:
        ids = tokenizer.encode(text)
        for at in range(1, len(ids)):
            if tokenizer.decode(ids[:at]).endswith("\ufffd"):
                continue  # inside a character
            prompt = [*ids[:at], *sorted(tokenizer.special_ids)[:2]]
            out = "".join(pieces(tokenizer, ids[at:], list(range(1, len(ids) - at)), prompt))
            assert tokenizer.decode(ids[:at]) + out == tokenizer.decode(ids), (text, at)


def test_random_ids_of_a_byte_level_tokenizer() -> None:
    """Mostly broken UTF-8, from lone bytes to long runs of them, in random batches."""
    rng = random.Random(5)
    fragments = [0xF0, 0x9F, 0x91, 0x8D, 0xC3, 0xA9, 0xE2, 0x82, 65, 300, 256]
    for trial in range(3000):
        draw = [lambda: rng.randrange(512), lambda: rng.randrange(128, 256), lambda: rng.choice(fragments)][trial % 3]
        ids = [draw() for _ in range(rng.randrange(1, 60))]
        cuts = sorted(rng.sample(range(len(ids)), rng.randrange(len(ids))))
        assert "".join(pieces(ECHO, ids, cuts)) == ECHO.decode(ids), ids


@pytest.mark.parametrize("name", ["metaspace", "metaspace decoder"])
def test_broken_byte_fallback_loses_only_the_broken_characters(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    byte = {value: tokenizer.token_id(f"<0x{value:02X}>") or 0 for value in range(256)}
    the, a = tokenizer.token_id("▁the") or 0, tokenizer.token_id("a") or 0
    ids = [the, byte[0xC3], byte[0xA9], byte[0xF0], byte[0x9F], a, the, byte[0x82]]
    out = "".join(pieces(tokenizer, ids, list(range(1, len(ids)))))
    assert out.replace("\ufffd", "") == "theéa the"
    assert out.startswith("theé\ufffd")
    assert out.endswith(" the\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_ids_give_text_and_bounded_delay(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(9)
    for _ in range(300):
        ids = [rng.randrange(tokenizer._backend.get_vocab_size()) for _ in range(40)]
        detokenizer = Detokenizer(tokenizer)
        for token in ids:
            detokenizer.push([token]).encode()
            assert len(detokenizer._pending) <= 8
        detokenizer.finish().encode()


def test_special_tokens_are_not_shown() -> None:
    assert Detokenizer(ECHO).push([72, 256, 105]) == "Hi"


def test_an_unfinished_character_waits_and_breaks_only_at_the_end() -> None:
    detokenizer = Detokenizer(ECHO)
    assert [detokenizer.push([byte]) for byte in "👍".encode()] == ["", "", "", "👍"]
    assert detokenizer.push("漢".encode()[:2]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_prompt_that_ends_inside_a_character() -> None:
    detokenizer = Detokenizer(ECHO, list("漢".encode()[:2]))
    assert detokenizer.push([65]) == "A"
    detokenizer = Detokenizer(ECHO, list("漢".encode()[:2]))
    assert detokenizer.push([*"漢".encode()[2:], 65]).endswith("A")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_how_many_ids_come_at_once_makes_no_difference(name: str) -> None:
    """Whole characters and broken ones: the decoder replaces a run of bytes as a whole if any of it is broken, so that
    of one that sees all at once whole characters would be lost too.
    """
    tokenizer, rng = TOKENIZERS[name], random.Random(7)
    first = tokenizer.token_id("<0x00>") or 0
    whole = [tokenizer.encode(text, add_special_tokens=False) for text in ("é", "👍", "the", " ", "漢字")]
    parts = (b"\xc3", b"\xff", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xa9")
    broken = [[first + value for value in part] for part in parts]
    for _ in range(300):
        ids = [each for _ in range(rng.randint(1, 8)) for each in rng.choice(rng.choice([whole, broken]))]
        one_by_one = "".join(pieces(tokenizer, ids, list(range(1, len(ids)))))
        cuts = sorted(rng.sample(range(len(ids) + 1), rng.randint(0, min(3, len(ids)))))
        assert "".join(pieces(tokenizer, ids, cuts)) == one_by_one, (ids, cuts)
