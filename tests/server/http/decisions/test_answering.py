"""The passes that score choices: which tokens are computed, where they stand, and what they see."""

from __future__ import annotations

from jaxctx_server.http.decisions.answering import bounds_of, scoring_passes
from jaxctx_server.http.decisions.choice_tree import Tokens, make_choice_tree
from jaxctx_server.http.decisions.prompt import QuestionPrompt
from jaxctx_server.http.decisions.request import Option, Question


def prompt_of(choices: list[Tokens]) -> QuestionPrompt:
    options = [Option(str(place)) for place in range(len(choices))]
    question = Question(type="choice", name=None, instructions="?", options=options)
    return QuestionPrompt(question, [91, 92], choices, make_choice_tree(choices))


def test_choices_of_one_token_are_in_an_ordinary_pass() -> None:
    (only,) = scoring_passes("c", 10, prompt_of([(1,), (2,)]))
    assert list(only.request.tokens) == [91, 92]
    assert not only.request.masks
    assert not only.request.positions
    assert [(each.index, list(each.logprob_ids)) for each in only.request.outputs] == [(1, [1, 2])]
    assert list(only.beginnings) == [()]


def test_a_token_sees_the_question_and_the_beginning_of_its_own_choice() -> None:
    (only,) = scoring_passes("c", 10, prompt_of([(1, 2, 3), (1, 4, 5), (6, 7)]))
    request = only.request
    assert list(request.tokens) == [91, 92, 1, 2, 4, 6]
    assert list(request.positions) == [10, 11, 12, 13, 13, 12]
    masks = [list(mask.bounds) for mask in request.masks]
    assert masks == [[], [], [0, 13], [0, 14], [0, 13, 14, 15], [0, 12, 15, 16]]
    asked = [(each.index, list(each.logprob_ids)) for each in request.outputs]
    assert asked == [(1, [1, 6]), (2, [2, 4]), (3, [3]), (4, [5]), (5, [7])]
    assert list(only.beginnings) == [(), (1,), (1, 2), (1, 4), (6,)]


def test_many_tokens_take_several_passes() -> None:
    passes = scoring_passes("c", 10, prompt_of([(place, 1, 2) for place in range(300)]))
    counts = [(len(each.request.tokens), len(each.request.outputs), len(each.request.masks)) for each in passes]
    assert counts == [(257, 256, 257), (256, 256, 256), (89, 89, 89)]
    assert sum(len(each.beginnings) for each in passes) == 601
    last = passes[2].request
    assert [(each.index) for each in last.outputs] == list(range(89))
    assert list(last.masks[-1].bounds) == [0, 12, 12 + 598, 12 + 600]


def test_ranges_that_touch_are_one() -> None:
    assert bounds_of(5, [5, 6, 9]) == [0, 7, 9, 10]
    assert bounds_of(5, [7]) == [0, 5, 7, 8]
