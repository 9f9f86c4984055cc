"""Rules of tokens: what a request's allowed tokens and bad words forbid, by the tokens that its output has."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxctx.engine.grammar.token_rules import (
    TokenRules,
    bad_token_sequences,
    has_token_rules,
    make_token_rules,
    token_bits,
)
from jaxctx.types import GenerateRequest, OutputFormat, SamplingParams
from tests.echo import EOS_ID, VOCAB_SIZE, echo_text, pairs_text

A, B, C = ord("x"), ord("y"), ord("q")  # which are in no other token


def rules_of(**sampling: Any) -> TokenRules:
    return make_token_rules(request_of(**sampling), echo_text(), VOCAB_SIZE)


def request_of(output_format: OutputFormat | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(context_id="c", sampling=SamplingParams(**sampling), output_format=output_format)


def allowed(rules: TokenRules, last: Sequence[int] = ()) -> set[int]:
    bits = np.unpackbits(rules.allowed_after(last).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_request_without_rules_is_known_by_that() -> None:
    assert not has_token_rules(request_of(logit_bias={5: 1.0}))
    assert has_token_rules(request_of(allowed_token_ids=[5]))
    assert has_token_rules(request_of(bad_words=["x"]))


def test_only_allowed_tokens_may_come_and_no_end_of_sequence() -> None:
    rules = rules_of(allowed_token_ids=[A, B, VOCAB_SIZE + 5])
    assert (allowed(rules), rules.history) == ({A, B}, 0)


def test_a_format_may_always_end() -> None:
    request = request_of(OutputFormat(regex="x"), allowed_token_ids=[A])
    assert allowed(make_token_rules(request, echo_text(), VOCAB_SIZE)) == {A, EOS_ID}


def test_tokens_beyond_the_vocabulary_never_come() -> None:
    rules = make_token_rules(request_of(bad_words=["x"]), echo_text(), VOCAB_SIZE - 5)
    assert allowed(rules) == set(range(VOCAB_SIZE - 5)) - {A}


def test_a_word_of_several_tokens_is_forbidden_behind_its_beginning() -> None:
    rules = rules_of(allowed_token_ids=[A, B, C], bad_words=["xyq", "q"])
    assert rules.history == 2
    assert allowed(rules) == allowed(rules, [B]) == {A, B}
    assert allowed(rules_of(allowed_token_ids=[A, B, C], bad_words=["xyq"]), [A, B]) == {A, B}
    assert allowed(rules_of(allowed_token_ids=[A, B, C], bad_words=["xyq"]), [B, B]) == {A, B, C}


def test_two_words_with_the_same_beginning() -> None:
    rules = rules_of(allowed_token_ids=[A, B, C], bad_words=["xy", "xq", "xy"])
    assert allowed(rules, [A]) == {A}
    assert allowed(rules, [C]) == {A, B, C}


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ({"x": [7], " x": [8]}, [(7,), (8,)]),  # the space is a part of the token
        ({"x": [7], " x": [32, 7]}, [(7,)]),  # the space is a token of its own: the word follows it anyway
        ({"x": [7, 9], " x": [8, 9]}, [(7, 9), (8, 9)]),
        ({"x": [7, 9], " x": [7, 5]}, [(7, 9)]),
        ({"x": [], " x": [5]}, []),
    ],
)
def test_a_word_is_read_with_and_without_a_space_before_it(
    tokens: dict[str, list[int]], found: list[tuple[int, ...]]
) -> None:
    encode = SimpleNamespace(encode=lambda text, add_special_tokens: tokens[text])
    text: Any = SimpleNamespace(tokenizer=encode)
    assert bad_token_sequences("x", text) == bad_token_sequences("  x", text) == found


def test_a_word_is_what_the_tokenizer_makes_of_it() -> None:
    text = pairs_text()
    [word] = bad_token_sequences("the", text)
    assert list(word) == text.tokenizer.encode("the", add_special_tokens=False)


def test_token_bits() -> None:
    assert token_bits([0, 33, -1, 64, 1000], 2).tolist() == [1, 2]
    assert token_bits([31], 1).tolist() == [-(2**31)]
