"""Special tokens that stand beside `tokenizer.json`. test_load.py has them in directories, with ids of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import models

from jaxctx.model.config_reader import CheckpointError, Reader
from jaxctx.model.text.special import MAX_TOKEN, add_tokens, named_tokens, without_tokens_beyond

SETTINGS, OLDER, OLDEST = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def make_backend() -> tokenizers.Tokenizer:
    """A tokenizer of three letters, whose ids are 0 to 2."""
    return tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))


def named(settings: dict[str, Any], older: dict[str, Any] | None = None) -> dict[str, tokenizers.AddedToken]:
    return named_tokens(Reader(settings, SETTINGS), Reader(older or {}, OLDER))


def add(
    settings: dict[str, Any],
    older: dict[str, Any] | None = None,
    oldest: dict[str, Any] | None = None,
    *,
    backend: tokenizers.Tokenizer | None = None,
    vocab_size: int | None = 100,
) -> tokenizers.Tokenizer:
    """The tokenizer of three letters, or another one, with what these files add to it."""
    backend = backend or make_backend()
    readers = Reader(settings, SETTINGS), Reader(older or {}, OLDER), Reader(oldest or {}, OLDEST)
    add_tokens(backend, named_tokens(*readers[:2]), *readers, vocab_size=vocab_size)
    return backend


def added(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """The texts of the added tokens, by id."""
    return {number: token.content for number, token in backend.get_added_tokens_decoder().items()}


# --- Named tokens


def test_named_tokens_are_special_strings_or_objects() -> None:
    found = named({"eos_token": "<e>", "bos_token": {"content": "<b>", "lstrip": True}})
    assert {name: token.content for name, token in found.items()} == {"bos_token": "<b>", "eos_token": "<e>"}
    assert all(token.special for token in found.values())
    assert (found["bos_token"].lstrip, found["eos_token"].lstrip) == (True, False)


def test_known_names_come_before_others_that_end_in_token() -> None:
    found = named({"image_token": "<i>", "unk_token": "<u>", "audio_token": {"content": "<a>"}})
    assert list(found) == ["unk_token", "image_token", "audio_token"]


@pytest.mark.parametrize("value", [True, 7, ["<i>"], None])
def test_other_keys_that_end_in_token_are_no_tokens_if_they_are_no_texts(value: Any) -> None:
    assert named({"add_bos_token": value}) == {}


def test_the_older_file_goes_before_the_settings() -> None:
    assert named({"eos_token": "<new>"}, {"eos_token": "<old>"})["eos_token"].content == "<old>"


def test_a_name_without_a_token_is_left_out() -> None:
    assert named({"pad_token": None}) == {}


@pytest.mark.parametrize(
    "value", [7, True, ["<e>"], "", "x" * (MAX_TOKEN + 1), {}, {"content": 7}, {"content": ""}], ids=repr
)
def test_a_known_name_with_something_else_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^tokenizer_config\.json: eos_token: .*up to {MAX_TOKEN:,} characters"):
        named({"eos_token": value})


def test_a_malformed_flag_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^special_tokens_map\.json: eos_token: single_word, .* true or false"):
        named({}, {"eos_token": {"content": "<e>", "lstrip": "yes"}})


# --- Tokens that are added


def test_declared_tokens_get_the_ids_that_are_declared() -> None:
    declared = {"4": {"content": "<y>"}, "3": {"content": "<x>"}}
    assert added(add({"added_tokens_decoder": declared})) == {3: "<x>", 4: "<y>"}


def test_a_declared_token_is_special_only_if_it_says_so_or_has_a_name() -> None:
    declared = {"3": {"content": "<x>"}, "4": {"content": "<y>", "special": True}, "5": {"content": "<z>"}}
    backend = add({"added_tokens_decoder": declared, "pad_token": "<z>"})
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    assert special == {4, 5}


def test_an_id_that_another_token_has_is_refused() -> None:
    match = r"^tokenizer_config\.json: added_tokens_decoder\.7: '<x>' is to have id 7, but in tokenizer\.json it has 3$"
    with pytest.raises(CheckpointError, match=match):
        add({"added_tokens_decoder": {"7": {"content": "<x>"}}})
    match = r"^added_tokens\.json: <x>: '<x>' is to have id 9, but in tokenizer\.json it has 3$"
    with pytest.raises(CheckpointError, match=match):
        add({}, oldest={"<x>": 9})


@pytest.mark.parametrize("key", ["", "x", "-1", "1.5", "²", "1234567890"])
def test_a_declared_id_that_is_no_number_is_refused(key: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"^tokenizer_config\.json: added_tokens_decoder\..*: must be a token id$"
    ):
        add({"added_tokens_decoder": {key: {"content": "<x>"}}})


@pytest.mark.parametrize("value", ["<x>", 7, None, ["<x>"]])
def test_a_declared_token_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder\.3: must be an object with content$"):
        add({"added_tokens_decoder": {"3": value}})


def test_the_oldest_file_has_ids_by_text() -> None:
    backend = add({"eos_token": "<y>"}, oldest={"<x>": 3, "<y>": 4})
    tokens = backend.get_added_tokens_decoder()
    assert added(backend) == {3: "<x>", 4: "<y>"}
    assert [(tokens[number].special, tokens[number].normalized) for number in (3, 4)] == [(False, True), (True, False)]


@pytest.mark.parametrize("number", [-1, 2**31, True, "3", None, 3.0])
def test_an_oldest_id_that_is_no_token_id_is_refused(number: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^added_tokens\.json: <x>: must be a token id, not "):
        add({}, oldest={"<x>": number})


def test_tokens_without_names_are_added_behind_the_named_ones() -> None:
    backend = add({"extra_special_tokens": ["<x>"], "eos_token": "<e>"}, {"additional_special_tokens": ["<y>"]})
    assert added(backend) == {3: "<e>", 4: "<x>", 5: "<y>"}


def test_the_newer_key_of_tokens_without_names_goes_before_the_older() -> None:
    both = {"extra_special_tokens": ["<new>"], "additional_special_tokens": ["<old>"]}
    assert added(add(both)) == {3: "<new>"}
    assert added(add(both | {"extra_special_tokens": []})) == {3: "<old>"}


def test_tokens_without_names_may_have_names_all_the_same() -> None:
    assert added(add({"extra_special_tokens": {"image_token": "<i>"}})) == {3: "<i>"}


def test_tokens_without_names_that_are_no_list_are_refused() -> None:
    match = r"^tokenizer_config\.json: extra_special_tokens: must be a list of tokens$"
    with pytest.raises(CheckpointError, match=match):
        add({"extra_special_tokens": "<x>"})


def test_a_token_of_several_files_is_added_once() -> None:
    backend = add(
        {"added_tokens_decoder": {"3": {"content": "<x>"}}, "pad_token": "<x>", "extra_special_tokens": ["<x>"]}
    )
    assert added(backend) == {3: "<x>"}


def test_a_declared_token_keeps_its_flags_if_it_is_named_too() -> None:
    backend = add({"added_tokens_decoder": {"3": {"content": "<x>", "lstrip": True}}, "pad_token": "<x>"})
    assert backend.get_added_tokens_decoder()[3].lstrip


def test_a_named_token_that_is_an_entry_becomes_special_in_its_place() -> None:
    backend = add({"eos_token": "b"}, vocab_size=3)
    assert added(backend) == {1: "b"}
    assert backend.get_added_tokens_decoder()[1].special


@pytest.mark.parametrize(("vocab_size", "expected"), [(3, {}), (4, {3: "<p>"}), (None, {})])
def test_a_token_that_is_only_named_needs_a_row_of_the_model(vocab_size: int | None, expected: dict[int, str]) -> None:
    assert added(add({"pad_token": "<p>"}, vocab_size=vocab_size)) == expected


def test_a_token_that_is_known_with_other_flags_gets_those_of_the_file() -> None:
    backend = make_backend()
    backend.add_tokens([tokenizers.AddedToken("<x>", lstrip=False)])
    declared = {"3": {"content": "<x>", "lstrip": True, "normalized": False}}
    add({"added_tokens_decoder": declared}, backend=backend)
    token = backend.get_added_tokens_decoder()[3]
    assert (token.content, token.lstrip, token.normalized) == ("<x>", True, False)


# --- Tokens that the model has no row for


def test_added_tokens_beyond_the_rows_of_the_model_are_left_out_but_for_what_is_kept() -> None:
    backend = make_backend()
    backend.add_special_tokens(["<x>", "<y>"])
    assert without_tokens_beyond(backend, 5, keep=()) is backend
    assert added(without_tokens_beyond(backend, 4, keep=())) == {3: "<x>"}
    assert [*added(without_tokens_beyond(backend, 3, keep=["<y>"])).values()] == ["<y>"]


@pytest.mark.parametrize(("text", "merges"), [("ab", [("a", "b")]), ("c", [("c", "a")])])
def test_a_token_that_merges_of_the_vocabulary_need_cannot_be_left_out(
    text: str, merges: list[tuple[str, str]]
) -> None:
    """The library panics for the first, with what is no Exception."""
    vocabulary = {"a": 0, "b": 1, "ab": 2} if text == "ab" else {"a": 0, "b": 1, "ca": 2, "c": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.add_tokens([text])
    rows = backend.token_to_id(text)
    assert rows is not None
    match = rf"^tokenizer\.json: it needs '{text}', but config\.json: vocab_size is {rows}: "
    with pytest.raises(CheckpointError, match=match):
        without_tokens_beyond(backend, rows, keep=())
