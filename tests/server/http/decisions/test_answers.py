"""Answers as JSON: probabilities of options, the choice, and how sure it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.decisions.answering import Answered
from jaxctx_server.http.decisions.answers import agreement, answer_json, mean_level
from jaxctx_server.http.decisions.request import YES_OR_NO, Option, Question
from jaxctx_server.http.decisions.usage import DecisionUsage

USAGE = DecisionUsage(10, 4, 6)


def answered(kind: Any, options: Any, *probabilities: float) -> Answered:
    question = Question(type=kind, name="n", instructions="?", options=options)
    return Answered(question, USAGE, logprobs=[math.log(each) if each else -math.inf for each in probabilities])


def test_a_predicate() -> None:
    answer = answer_json(answered("predicate", YES_OR_NO, 0.3, 0.1))
    assert answer["probability"] == pytest.approx(0.75)
    assert answer["label_mass"] == pytest.approx(0.4)
    assert set(answer) == {"type", "name", "probability", "label_mass", "usage"}


def test_a_choice_is_the_first_of_the_most_probable_ones() -> None:
    options = [Option("a"), Option(False), Option(True)]
    answer = answer_json(answered("choice", options, 0.1, 0.2, 0.2))
    assert answer["choice"] is False
    assert answer["confidence"] == pytest.approx(0.4)
    assert [each["value"] for each in answer["probabilities"]] == ["a", False, True]


def test_options_that_are_impossible() -> None:
    answer = answer_json(answered("choice", [Option("a"), Option("b")], 0.0, 0.0))
    assert (answer["choice"], answer["confidence"], answer["label_mass"]) == ("a", 0.5, 0.0)


def test_a_score_is_the_mean_level() -> None:
    answer = answer_json(answered("score", [Option("low"), Option("mid"), Option("high")], 0.1, 0.2, 0.1))
    assert answer["score"] == pytest.approx(1.0)
    assert [(each["value"], each["label"]) for each in answer["probabilities"]] == [(0, "low"), (1, "mid"), (2, "high")]


def test_confidence_of_a_score_is_that_levels_agree() -> None:
    assert agreement([0, 1, 0]) == 1
    assert agreement([0.5, 0, 0.5]) == 0
    assert agreement([1 / 3, 1 / 3, 1 / 3]) == pytest.approx(1 / 3)
    assert agreement([0.5, 0.5]) == 0
    assert mean_level([0.5, 0, 0.5]) == 1


def test_a_text() -> None:
    question = Question(type="text", name=None, instructions="?")
    answer = answer_json(Answered(question, USAGE, text="So.", finish=FinishReason.FINISH_REASON_STOP))
    assert (answer["name"], answer["text"], answer["finish_reason"]) == (None, "So.", "stop")
    assert set(answer) == {"type", "name", "text", "finish_reason", "usage"}
