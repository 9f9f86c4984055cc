from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

CODE = ["class A:\n    def f(self, x):\n        return x + 1\n\n    def g(self):\n        return not self\n"] * 8


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("bundled_corpus")


@pytest.fixture
def small(corpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 280)
    return corpus


@pytest.fixture
def tiny(corpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 10)
    return corpus


@pytest.mark.parametrize("context", [[1, 2], [2, 1], [7, 7], [9, 0]], ids=str)
def test_trigram_probabilities_sum_to_one(tiny: ModuleType, context: list[int]) -> None:
    """In contexts seen often, once and never."""
    training = np.random.default_rng(0).integers(0, 8, 300) * np.random.default_rng(1).integers(0, 2, 300)
    p = np.array([np.exp(-tiny.trigram_loss(training, np.array([*context, token]))) for token in range(10)])
    assert p.min() > 0
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-9)


def test_trigram_learns_what_unigram_cannot(tiny: ModuleType) -> None:
    cycle = np.tile(np.arange(10), 100)
    assert tiny.unigram_loss(cycle, cycle) == pytest.approx(np.log(10), rel=1e-3)
    assert tiny.trigram_loss(cycle, cycle) < 0.1


def test_tokenizer_is_the_same_every_time_and_encodes_anything(small: ModuleType) -> None:
    tokenizer = small.train_tokenizer(CODE)
    assert tokenizer.to_str() == small.train_tokenizer(CODE).to_str()
    assert [tokenizer.id_to_token(i) for i in range(3)] == list(small.SPECIAL)
    assert tokenizer.decode(tokenizer.encode("漢字 \x00 é").ids) == "漢字 \x00 é"
    assert tokenizer.encode("x").ids[0] == 0
    ids = small.encode(tokenizer, CODE[:2])
    assert (ids == 0).sum() == 2
    assert tokenizer.decode(ids.tolist()) == CODE[0] * 2


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_split_spaces_keeps_the_text(small: ModuleType, rate: float) -> None:
    tokenizer = small.train_tokenizer(CODE)
    ids = small.encode(tokenizer, CODE)
    split = small.split_spaces(tokenizer, ids, rate, np.random.default_rng(0))
    assert tokenizer.decode(split.tolist()) == "".join(CODE)
    assert (len(split) > len(ids)) == (rate > 0)


def test_hold_out_is_a_twentieth_and_apart(corpus: ModuleType) -> None:
    texts = corpus.standard_library()
    assert 0.02 < len(texts.validation) / len(texts.training) < 0.1
    assert not set(filter(None, texts.validation)) & set(filter(None, texts.training))
    assert texts == corpus.standard_library()
