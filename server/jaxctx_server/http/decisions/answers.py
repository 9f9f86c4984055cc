"""Answers as the API has them.

    predicate   `probability`, that it is true
    choice      `choice`, the most probable one; `probabilities`, of each `value`; `confidence`, that of the choice
    score       `score`, the mean level by its number, from 0; `probabilities`, of each level; `confidence`, 1 if one
                level has all, 0 if the lowest and the highest have half each
    text        `text`, `finish_reason`

Probabilities are those of the model, normalised over the options. `label_mass` is what the options have of the model's
own distribution: little of it says that the model would rather have said something else.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxctx_server.http.decisions.answering import Answered
from jaxctx_server.http.decisions.choice_tree import normalised
from jaxctx_server.http.openai.outputs import FINISH_REASONS

Json = dict[str, Any]


def answer_json(answered: Answered) -> Json:
    """The answer to one question, with what it has cost."""
    question = answered.question
    answer: Json = {"type": question.type, "name": question.name}
    if question.type == "text":
        answer |= {"text": answered.text, "finish_reason": FINISH_REASONS[answered.finish]}
    else:
        answer |= options_json(answered)
        answer["label_mass"] = min(sum(map(math.exp, answered.logprobs)), 1.0)
    return {**answer, "usage": answered.usage.json()}


def options_json(answered: Answered) -> Json:
    """What is told of the options of a question."""
    question, probabilities = answered.question, normalised(answered.logprobs)
    match question.type:
        case "predicate":
            return {"probability": probabilities[0]}
        case "choice":
            highest = max(probabilities)
            told = [
                {"value": option.value, "probability": probability}
                for option, probability in zip(question.options, probabilities, strict=True)
            ]
            best = question.options[probabilities.index(highest)]
            return {"choice": best.value, "confidence": highest, "probabilities": told}
    levels = [
        {"value": level, "label": option.text, "probability": probability}
        for level, (option, probability) in enumerate(zip(question.options, probabilities, strict=True))
    ]
    return {"score": mean_level(probabilities), "confidence": agreement(probabilities), "probabilities": levels}


def mean_level(probabilities: Sequence[float]) -> float:
    """The mean number of a level, from 0."""
    return sum(level * probability for level, probability in enumerate(probabilities))


def agreement(probabilities: Sequence[float]) -> float:
    """How little the levels spread: 1 less the variance, as a share of the greatest one there can be."""
    mean, span = mean_level(probabilities), len(probabilities) - 1
    variance = sum((level - mean) ** 2 * probability for level, probability in enumerate(probabilities))
    return min(max(1 - 4 * variance / span**2, 0.0), 1.0)
