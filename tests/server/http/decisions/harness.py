"""Questions, and what the echo model says to them: out of whole prompts, written here by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jaxctx
from tests.server.http.client import Answer

INPUT = "The sea is wide, and nobody has seen the other side of it. " * 4
WIDE: dict[str, Any] = {"type": "predicate", "name": "wide", "instructions": "The sea is wide."}
COLOUR: dict[str, Any] = {
    "type": "choice",
    "name": "colour",
    "instructions": "Which colour has it?",
    "choices": [
        {"value": "blue"},
        {"value": "blue-green", "description": "between the two"},
        {"value": "black"},
        {"value": True},
    ],
}
DEPTH: dict[str, Any] = {
    "type": "score",
    "name": "depth",
    "instructions": "How deep is it?",
    "levels": [{"label": "not"}, {"label": "not very", "description": "to the knee"}, {"label": "very"}],
}
WHY: dict[str, Any] = {"type": "text", "name": "why", "instructions": "Why?", "max_tokens": 6}
WIDE_TEXT = "The sea is wide.\n\nIs this true? Answer with yes or no only."
COLOUR_TEXT = (
    "Which colour has it?\n\nChoices:\n- blue\n- blue-green: between the two\n- black\n- true\n\n"
    "Answer with one of the choices only."
)
DEPTH_TEXT = (
    "How deep is it?\n\nLevels, the lowest one first:\n- not\n- not very: to the knee\n- very\n\n"
    "Answer with one of the levels only."
)


def body(*questions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "input": INPUT, "questions": list(questions), **fields}


def chat_prompt(question: str, text: str = INPUT) -> str:
    """What the model reads of a text and a question."""
    return f"<|im_start|>user\n{text}\n\nQuestion: {question}<|im_end|>\n<|im_start|>assistant\n"


async def logprob_behind(client: jaxctx.aio.Client, prompt: str, choice: str) -> float:
    """The log probability of a choice behind a prompt, by one Forward over all of their tokens."""
    before = list(await client.tokenize(prompt, add_special_tokens=False))
    own = list(await client.tokenize(choice, add_special_tokens=False))
    async with await client.create(salt="alone") as context:
        asked = [
            jaxctx.ForwardOutputOptions(index=len(before) - 1 + place, logprob_ids=[token])
            for place, token in enumerate(own)
        ]
        told = await context.forward([*before, *own], outputs=asked)
    return sum(each.logprobs[0] for each in told.outputs)


def shares(logprobs: Sequence[float]) -> list[float]:
    """Probabilities in these proportions."""
    weights = [math.exp(each - max(logprobs)) for each in logprobs]
    return [weight / sum(weights) for weight in weights]


def answers_of(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.text
    found: list[Any] = answer.json["answers"]
    return found


def without_usage(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers without what they cost, which depends on what was cached."""
    return [{name: value for name, value in each.items() if name != "usage"} for each in answers]
