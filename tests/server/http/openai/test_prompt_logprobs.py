"""`prompt_logprobs`: how likely each token of a prompt was, as clients of vLLM read it."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

import jaxctx
from tests.echo import VOCAB_SIZE, echo_logprobs, echo_text
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, PROMPT, no_context_left

CHAT: Any = [{"role": "user", "content": "Who shares pages?"}]


def check(told: Any, tokens: list[int], top: int) -> None:
    """The entries are those of the model itself."""
    assert told[0] is None
    assert len(told) == len(tokens)
    for place in range(1, len(tokens)):
        expected = echo_logprobs(tokens[:place])
        best = np.argsort(-expected, kind="stable")[:top].tolist()
        entry = told[place]
        assert next(iter(entry)) == str(tokens[place])
        assert set(entry) == {str(token) for token in [tokens[place], *best]}
        for token, each in entry.items():
            assert each["logprob"] == pytest.approx(float(expected[int(token)]), abs=1e-3)
            assert each["decoded_token"] == text_of(int(token))
        assert [entry[str(token)]["rank"] for token in best] == list(range(1, len(best) + 1))
        if tokens[place] not in best:
            assert entry[str(tokens[place])]["rank"] is None


def text_of(token: int) -> str:
    return echo_text().tokenizer.piece(token).decode(errors="replace")


@pytest.mark.parametrize("top", [0, 3])
async def test_of_a_completion(api: openai.AsyncOpenAI, top: int) -> None:
    body = {"prompt_logprobs": top, "ignore_eos": True, "return_token_ids": True}
    asked: Any = {**GREEDY, "prompt": PROMPT[:40], "max_tokens": 4, "extra_body": body}
    answer = await api.completions.create(**asked, n=2)
    for choice in answer.choices:
        extra: Any = choice.model_extra
        check(extra["prompt_logprobs"], extra["prompt_token_ids"], top)
        assert choice.logprobs is None
    plain = await api.completions.create(**{**GREEDY, "prompt": PROMPT[:40], "max_tokens": 4})
    assert [choice.text for choice in answer.choices] == [plain.choices[0].text] * 2


async def test_of_several_prompts_and_beside_the_log_probabilities_of_outputs(api: openai.AsyncOpenAI) -> None:
    """Each has as many likely tokens as were asked for it."""
    prompts = [[65, 66, 67, 68], [300, 301, 5]]
    body = {"prompt_logprobs": 4, "ignore_eos": True}
    asked: Any = {**GREEDY, "prompt": prompts, "max_tokens": 2, "echo": True, "logprobs": 1, "extra_body": body}
    answer = await api.completions.create(**asked)
    for choice, tokens in zip(answer.choices, prompts, strict=True):
        extra: Any = choice.model_extra
        check(extra["prompt_logprobs"], tokens, 4)
        assert choice.logprobs is not None
        lists = choice.logprobs
        assert len(lists.token_logprobs or ()) == len(tokens) + 2
        assert all(len(each) <= 2 for each in (lists.top_logprobs or ())[1:])
    without_echo = await api.completions.create(**{**asked, "echo": False})
    assert [len((choice.logprobs and choice.logprobs.tokens) or ()) for choice in without_echo.choices] == [2, 2]
    asked["extra_body"] = {"prompt_logprobs": 1, "ignore_eos": True}
    asked["logprobs"] = 5
    for choice, tokens in zip((await api.completions.create(**asked)).choices, prompts, strict=True):
        extra = choice.model_extra
        check(extra["prompt_logprobs"], tokens, 1)
        assert choice.logprobs is not None
        assert len((choice.logprobs.top_logprobs or ())[-1]) == 5


async def test_without_an_output(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(prompt=[65], max_tokens=0, **GREEDY | {"extra_body": {"prompt_logprobs": 2}})
    assert (answer.choices[0].model_extra or {})["prompt_logprobs"] == [None]
    answer = await api.completions.create(
        prompt=[65, 66], max_tokens=0, **GREEDY | {"extra_body": {"prompt_logprobs": 2}}
    )
    check((answer.choices[0].model_extra or {})["prompt_logprobs"], [65, 66], 2)


@pytest.mark.parametrize("tells", [False, True])
async def test_of_a_chat(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, tells: bool) -> None:
    tokens = list((await client.apply_chat_template(CHAT)).tokens)
    body = {"prompt_logprobs": 2, "ignore_eos": True}
    asked: Any = {**GREEDY, "messages": CHAT, "max_tokens": 4, "logprobs": tells, "extra_body": body}
    answer = await api.chat.completions.create(**asked)
    check((answer.model_extra or {})["prompt_logprobs"], tokens, 2)
    plain = await api.chat.completions.create(**{**GREEDY, "messages": CHAT, "max_tokens": 4})
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert (answer.choices[0].logprobs is None) != tells


async def test_tokens_by_their_ids(web: HttpClient) -> None:
    asked = {"prompt": [65, 66], "max_tokens": 1, "prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    answer = await web("POST", "/v1/completions", asked)
    assert answer.json["choices"][0]["prompt_logprobs"][1]["66"]["decoded_token"] == "token_id:66"


async def test_more_than_one_pass(api: openai.AsyncOpenAI) -> None:
    tokens = [place % VOCAB_SIZE for place in range(7, 607)]
    answer = await api.completions.create(
        prompt=tokens, max_tokens=1, **GREEDY | {"extra_body": {"prompt_logprobs": 0}}
    )
    check((answer.choices[0].model_extra or {})["prompt_logprobs"], tokens, 0)


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("completions", {"prompt": "~" * 2000}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "~" * 2000}]}, "messages"),
    ],
)
async def test_a_prompt_that_is_too_long_is_not_computed(
    web: HttpClient, client: jaxctx.aio.Client, path: str, asked: dict[str, Any], field: str
) -> None:
    answer = await web("POST", f"/v1/{path}", {**asked, "max_tokens": 2, "prompt_logprobs": 1})
    assert answer.error == (400, "INVALID_FIELD", field)
    await no_context_left(client)


async def test_tokens_that_are_kept_have_none(web: HttpClient) -> None:
    asked = {"prompt": "x", "max_tokens": 2, "prompt_logprobs": 1}
    answer = await web("POST", "/v1/completions", asked, headers={"x-session-ttl": "60"})
    assert answer.error == (400, "INVALID_FIELD", "prompt_logprobs")
