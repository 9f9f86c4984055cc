"""Masks of one output: how ends are held back, and that a mask is never empty."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
import pytest

from jaxctx.engine.grammar.compiler import LIMITS
from jaxctx.engine.grammar.matcher import EndRules, OutputMatcher, brief
from jaxctx.engine.grammar.token_rules import TokenRules, token_bits
from jaxctx.errors import FailedPrecondition, Internal, ResourceExhausted
from tests.echo import EOS_ID, VOCAB_SIZE, echo_text

WORDS = VOCAB_SIZE // 32
X, Y = ord("x"), ord("y")  # which are in no other token


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(echo_text().tokenizer.to_json(), eos_token=[EOS_ID])


def anything(words: int = WORDS) -> TokenRules:
    return TokenRules(np.full(words, -1, np.int32))


def matcher_of(
    tokenizer: llguidance.LLTokenizer,
    regex: str,
    *,
    min_tokens: int = 0,
    stops: Sequence[int] = (),
    ignore_eos: bool = False,
    words: int = WORDS,
    tokens: TokenRules | None = None,
    **limits: int,
) -> OutputMatcher:
    rules = EndRules(
        min_tokens=min_tokens,
        stop_bits=token_bits([EOS_ID, *stops], words),
        ignored_bits=token_bits([EOS_ID] if ignore_eos else [], words),
    )
    bounds = llguidance.LLParserLimits(**{**LIMITS, **limits})
    grammar = llguidance.LLMatcher.grammar_from_regex(regex)
    return OutputMatcher(
        llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=bounds), rules, tokens or anything(words)
    )


def allowed(matcher: OutputMatcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist())


def test_an_end_is_allowed_where_the_text_may_end(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "x[xy]?")
    assert allowed(matcher) == {X}
    matcher.take(X)
    assert allowed(matcher) == {X, Y, EOS_ID}
    matcher.take(Y)
    assert allowed(matcher) == {EOS_ID}


def test_before_min_tokens_nothing_ends_it_unless_nothing_else_can_follow(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "x[xy]{0,2}", min_tokens=9, stops=[Y])
    matcher.take(X)
    assert allowed(matcher) == {X}
    matcher.take(X)
    matcher.take(X)
    assert allowed(matcher) == {EOS_ID}
    only_stops = matcher_of(tokenizer, "y", min_tokens=9, stops=[Y])
    assert allowed(only_stops) == {Y}


def test_from_min_tokens_on_ends_are_allowed(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "x*", min_tokens=2)
    for ends in (False, False, True, True):
        assert (EOS_ID in allowed(matcher)) == ends
        matcher.take(X)


def test_an_end_that_is_ignored_comes_only_when_nothing_else_can(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "x?y?", ignore_eos=True)
    assert allowed(matcher) == {X, Y}
    matcher.take(Y)
    assert allowed(matcher) == {EOS_ID}


def test_tokens_of_a_resumed_output_count_for_min_tokens(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "x*", min_tokens=2)
    matcher.resume([X, X])
    assert EOS_ID in allowed(matcher)


def test_a_model_with_more_rows_than_entries_never_gets_the_others(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "(?s:.*)", words=WORDS + 7)
    assert len(matcher.mask()) == WORDS + 7
    assert max(allowed(matcher)) < VOCAB_SIZE


def test_a_vocabulary_without_the_token_that_must_come_is_said(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "z", words=2)  # "z" is no token of the first 64
    with pytest.raises(FailedPrecondition) as refused:
        matcher.mask()
    assert refused.value.reason == "NO_OUTPUT_FORMAT"


def test_a_limit_is_said(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "(x|y)*z(x|y){40}q", step_lexer_fuel=2, max_lexer_states=20)
    with pytest.raises(ResourceExhausted) as refused:
        for token in [X, Y, ord("z")] * 60:
            matcher.mask()
            matcher.take(token)
    assert (refused.value.reason, refused.value.retry_after_s) == ("GRAMMAR_LIMIT", None)


def test_a_token_that_was_not_allowed_fails_only_this_output(tokenizer: llguidance.LLTokenizer) -> None:
    with pytest.raises((Internal, ResourceExhausted)):
        matcher_of(tokenizer, "x").take(Y)


def test_a_format_and_rules_of_tokens_leave_what_both_allow(tokenizer: llguidance.LLTokenizer) -> None:
    only_x = TokenRules(token_bits([X, EOS_ID], WORDS))
    assert allowed(matcher_of(tokenizer, "[xy]+", tokens=only_x)) == {X}
    never_xx = TokenRules(token_bits([X, Y, EOS_ID], WORDS), bad_words=[((X,), X)])
    matcher = matcher_of(tokenizer, "xx|xy", tokens=never_xx)
    assert allowed(matcher) == {X}
    matcher.take(X)
    assert allowed(matcher) == {Y}


def test_rules_of_tokens_that_leave_nothing_are_said(tokenizer: llguidance.LLTokenizer) -> None:
    matcher = matcher_of(tokenizer, "xx", tokens=TokenRules(token_bits([X], WORDS), bad_words=[((X,), X)]))
    assert allowed(matcher) == {X}
    matcher.take(X)
    with pytest.raises(FailedPrecondition, match="leave no token") as raised:
        matcher.mask()
    assert raised.value.reason != "NO_OUTPUT_FORMAT"


def test_a_bad_word_counts_the_tokens_of_a_resumed_output() -> None:
    rules = EndRules(min_tokens=0, stop_bits=token_bits([], WORDS), ignored_bits=token_bits([], WORDS))
    matcher = OutputMatcher(None, rules, TokenRules(token_bits([X, Y], WORDS), bad_words=[((X, Y), X)]))
    matcher.resume([Y, X, Y])
    assert allowed(matcher) == {Y}
    matcher.take(Y)
    assert allowed(matcher) == {X, Y}


def test_without_a_format_an_end_is_held_back_too() -> None:
    rules = EndRules(min_tokens=2, stop_bits=token_bits([Y, EOS_ID], WORDS), ignored_bits=token_bits([], WORDS))
    matcher = OutputMatcher(None, rules, TokenRules(token_bits([X, Y], WORDS), bad_words=[((X,), X)]))
    assert allowed(matcher) == {X}
    matcher.take(X)
    assert allowed(matcher) == {Y}  # nothing else is left
    matcher.take(Y)
    assert allowed(matcher) == {X, Y}


def test_errors_are_one_short_line() -> None:
    assert brief("a\n  b <non-verbose/>") == "a b"
    assert len(brief("x" * 1000)) == 300
