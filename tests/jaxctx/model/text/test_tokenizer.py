from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import Tokenizer
from tests.echo import echo_text
from tests.jaxctx.model.text.tokenizer_kinds import LLAMA3_SPLIT, byte_level, gemma

ECHO = echo_text().tokenizer


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert ECHO.decode(ECHO.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["", "\x00", "a\u0000b", "\U0010ffff", "\ufeff", "👩‍👩‍👧‍👦", "漢字" * 5000, "\r\n\t "])
def test_odd_texts(text: str) -> None:
    assert ECHO.decode(ECHO.encode(text)) == text


def test_special_tokens_in_text_are_parsed() -> None:
    assert ECHO.encode("a<|endoftext|>") == [97, 256]


def test_decoding_skips_special_tokens_by_option() -> None:
    assert ECHO.decode([72, 256, 105]) == "Hi"
    assert ECHO.decode([72, 256, 105], skip_special_tokens=False) == "H<|endoftext|>i"


def test_ids_without_an_entry_have_no_text() -> None:
    assert ECHO.decode([72, 512, 105, 2**31 - 1]) == "Hi"


def test_entries_are_written_as_the_vocabulary_has_them() -> None:
    tokenizer = echo_text().tokenizer
    ids = tokenizer.encode("a é<|im_end|>")
    assert "".join(tokenizer.entries(ids)) == "aĠÃ©<|im_end|>"
    assert tokenizer.entries([ids[0], 10**6]) == ["a", ""]


def test_the_longest_entry_bounds_the_tokens_of_a_text() -> None:
    assert ECHO.max_token_bytes == len("<|startoftext|>")
    assert with_backend(lambda backend: backend.add_tokens(["é" * 20])).max_token_bytes == 40


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.NFC()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)]),
        ),
        lambda backend: backend.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)]),
        lambda backend: setattr(backend, "model", models.BPE(vocab={"a": 0}, merges=[])),
        lambda backend: setattr(backend, "model", models.WordLevel({"a": 0}, unk_token="a")),
    ],
    ids=["normalizer", "no bytes", "removes", "swallows", "not all bytes", "words"],
)
def test_where_texts_may_shrink_nothing_is_certain(change: Any) -> None:
    assert with_backend(change).max_token_bytes is None


def with_backend(change: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(ECHO._backend.to_str())
    change(backend)
    return Tokenizer(backend)


def test_every_id_of_the_echo_vocabulary_is_something() -> None:
    assert ECHO._backend.get_vocab_size() == 512
    assert all(ECHO.decode([token], skip_special_tokens=False) for token in range(512))
    assert [ECHO.decode([token]) for token in range(32, 127)] == [chr(code) for code in range(32, 127)]


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}', "\ud800"])
def test_bad_files_are_refused_by_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, "utf-8", errors="surrogatepass")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    backend = ECHO._backend.from_str(ECHO._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    assert len(Tokenizer(backend).encode("12345678")) == 8


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_the_plain_way_through_the_library(special: bool) -> None:
    """The one taken lets other threads run meanwhile."""
    text = "def f(x):\n    return '🎉 日本語' + x  # and so on\n" * 600
    backend = ECHO._backend.encode(text, add_special_tokens=special)
    assert ECHO.encode(text, add_special_tokens=special) == backend.ids


def test_pieces_make_up_a_text() -> None:
    text = "Hello, wörld: 5 €, 日本."
    ids = ECHO.encode(text)
    assert b"".join(map(ECHO.piece, ids)) == text.encode()
    assert ECHO.piece(258) == b"<|im_start|>"
    assert ECHO.piece(10_000) == b""


def test_pieces_of_sentencepiece() -> None:
    """Bytes by themselves, and words with the space before them, also the first one of a text."""
    vocab = {"<unk>": 0, "<0xE2>": 1, "<0x82>": 2, "\u2581Hello": 3, "\u2581": 4, "lo": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert [tokenizer.piece(token) for token in range(1, 6)] == [b"\xe2", b"\x82", b" Hello", b" ", b"lo"]


def test_pieces_of_spaces_that_were_added() -> None:
    """Gemma has runs of spaces among its added tokens, some of which are entries of the vocabulary too."""
    backend = gemma()
    runs = ["\u2581\u2581", "\u2581" * 3, "\u2581\u2581the", "\n\n"]
    backend.add_tokens([AddedToken(run, special=False, normalized=False) for run in runs])
    backend.add_tokens([AddedToken("<\u2581>", special=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    around = tokenizer.token_id("ing")
    assert around is not None
    for entry in (*runs, "<\u2581>", "<z>"):
        token, piece = tokenizer.token_id(entry), entry.replace("\u2581", " ")
        assert token is not None
        assert tokenizer.piece(token) == piece.encode()
        assert tokenizer.decode([around, token, around], skip_special_tokens=False) == f"ing{piece}ing"
    letters = Tokenizer(byte_level(LLAMA3_SPLIT, bos=False))
    assert letters.piece(letters.token_id("<z>") or 0) == b"<z>"
