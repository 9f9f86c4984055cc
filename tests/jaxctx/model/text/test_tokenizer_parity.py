"""Ids and texts are those of `transformers`, for a small tokenizer of each kind: tests/goldens/text.json has them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text import Detokenizer, Tokenizer, load_text
from tests.jaxctx.model.text.tokenizer_kinds import FAST, KINDS, LLAMA, LLAMA_CLASS, TEXTS, Kind, llama2

GOLDENS = json.loads((Path(__file__).parents[3] / "goldens" / "text.json").read_text("utf-8"))["tokenizers"]
kinds = pytest.mark.parametrize("kind", KINDS)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        return load_text(KINDS[kind].write(Path(directory))).tokenizer


@kinds
def test_ids_and_texts(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for golden in GOLDENS[kind]:
        assert tokenizer.encode(golden["text"]) == golden["ids"], golden["text"]
        assert tokenizer.encode(golden["text"], add_special_tokens=False) == golden["plain_ids"], golden["text"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded"]
        assert tokenizer.decode(golden["ids"], skip_special_tokens=False) == golden["decoded_all"]


@kinds
def test_texts_that_stream(kind: str) -> None:
    """Token by token, and never a part of a character."""
    tokenizer = tokenizer_of(kind)
    for golden in GOLDENS[kind]:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push([token]) for token in golden["ids"]]
        assert "".join([*pieces, detokenizer.finish()]) == golden["decoded"], golden["text"]
        assert all("\ufffd" not in piece for piece in pieces)


@kinds
def test_ids_beyond_the_tokenizer_have_no_text(kind: str) -> None:
    """Of a matrix that is padded."""
    tokenizer = tokenizer_of(kind)
    largest, _ = tokenizer.largest_id()
    ids = tokenizer.encode("cat", add_special_tokens=False)
    assert tokenizer.decode([*ids, largest + 1, largest + 60]) == tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([largest + 1, *ids, largest + 60]) + detokenizer.finish() == tokenizer.decode(ids)


def test_the_goldens_are_of_these_kinds_and_texts() -> None:
    assert GOLDENS.keys() == KINDS.keys()
    assert all([golden["text"] for golden in found] == TEXTS for found in GOLDENS.values())
    # What tokenizer_config.json says of `bos` changes nothing beside tokenizer.json; the other kinds differ.
    assert len({json.dumps(found) for found in GOLDENS.values()}) >= 9


def test_the_class_of_llama_decides_only_for_its_own_models(tmp_path: Path) -> None:
    """The same `tokenizer.json`, and other names of classes and models in the files beside it."""
    text = " Hello<s>the"
    ids = {}
    for settings in (LLAMA_CLASS, {**LLAMA_CLASS, "tokenizer_class": "LlamaTokenizerFast"}, FAST):
        found = load_text(Kind(llama2, settings, LLAMA).write(tmp_path)).tokenizer.encode(text)
        ids[settings["tokenizer_class"]] = found
    assert ids["LlamaTokenizer"] == ids["LlamaTokenizerFast"] != ids["PreTrainedTokenizerFast"]
    nameless = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    template = load_text(Kind(llama2, nameless, LLAMA).write(tmp_path)).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"


@pytest.mark.parametrize("key", ["legacy", "add_prefix_space"])
def test_switches_of_the_class_that_are_none(tmp_path: Path, key: str) -> None:
    path = Kind(llama2, {**LLAMA_CLASS, key: "yes"}, LLAMA).write(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^tokenizer_config\.json: {key}: must be true, false or null"):
        load_text(path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_tokenizer_in_another_form_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match=rf"^tokenizer\.json: missing, and {name} is not read: .*save_pretrained"):
        load_text(tmp_path)


@pytest.mark.parity
@kinds
def test_goldens_are_not_stale(kind: str) -> None:
    pytest.importorskip("transformers")
    from scripts.make_text_goldens import tokenizer_goldens

    assert tokenizer_goldens(kind) == GOLDENS[kind]
