"""Choices as a tree of tokens: what has to be computed, and probabilities that exclude each other."""

from __future__ import annotations

import math

import pytest

from jaxctx_server.http.decisions.choice_tree import (
    NextLogprobs,
    Tokens,
    choice_logprobs,
    make_choice_tree,
    normalised,
    without,
)

CHOICES: list[Tokens] = [(1,), (2,), (2, 3, 4), (2, 3, 5), (6, 7), (2, 8)]


def test_only_beginnings_that_go_on_are_nodes_each_behind_its_ancestors() -> None:
    tree = make_choice_tree(CHOICES)
    assert tree.first_tokens == (1, 2, 6)
    assert [(node.tokens, node.ancestors, node.next_tokens) for node in tree.nodes] == [
        ((2,), (), (3, 8)),
        ((2, 3), (0,), (4, 5)),
        ((6,), (), (7,)),
    ]


def test_choices_of_one_token_need_no_nodes() -> None:
    tree = make_choice_tree([(1,), (2,)])
    assert (tree.first_tokens, tree.nodes) == ((1, 2), ())


def even(choices: list[Tokens], vocabulary: int) -> NextLogprobs:
    """A model to which all tokens are equally likely."""
    lengths = {choice[:length] for choice in choices for length in range(len(choice))}
    return {tokens: dict.fromkeys(range(vocabulary), -math.log(vocabulary)) for tokens in lengths}


def test_a_choice_has_what_longer_choices_leave_of_it() -> None:
    found = [math.exp(each) for each in choice_logprobs(CHOICES, even(CHOICES, 10))]
    expected = [0.1, 0.1 - 0.001 - 0.001 - 0.01, 0.001, 0.001, 0.01, 0.01]
    assert found == pytest.approx(expected)


def test_only_the_next_longer_choice_is_taken_away() -> None:
    choices: list[Tokens] = [(1, 2, 3), (1,), (1, 2)]
    found = [math.exp(each) for each in choice_logprobs(choices, even(choices, 4))]
    assert found == pytest.approx([1 / 64, 1 / 4 - 1 / 16, 1 / 16 - 1 / 64])
    assert sum(found) == pytest.approx(1 / 4)


def test_nothing_is_left_where_longer_choices_have_all() -> None:
    assert without(-1.0, [-1.0]) == -math.inf
    assert without(-1.0, [-1.0 + 1e-9]) == -math.inf
    assert without(-math.inf, [-1.0]) == -math.inf
    assert without(-1.0, []) == -1.0


def test_probabilities_are_one_in_all() -> None:
    assert normalised([-1000.0, -1000.0 + math.log(3)]) == pytest.approx([0.25, 0.75])
    assert normalised([-math.inf, -5.0]) == [0.0, 1.0]
    assert normalised([-math.inf, -math.inf]) == [0.5, 0.5]
