"""/v1/completions, judged by the official client: what it answers is what contexts give, and none is left."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import jaxctx
from tests.readme import commands
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import EXACT, GREEDY, PROMPT, completed_alone
from tests.server.http.pasted import needs_curl, run_pasted


async def test_a_completion(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    answer = await api.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY)
    (choice,) = answer.choices
    ids = await client.tokenize(PROMPT)
    assert (choice.text, choice.finish_reason) == (await completed_alone(client, 20, PROMPT), "length")
    assert (answer.object, answer.model) == ("text_completion", "echo")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 20)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = await api.completions.create(prompt=ids, max_tokens=20, **GREEDY)
    assert again.choices[0].text == choice.text
    assert again.id != answer.id
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 16 * 16
    apart = await api.completions.create(
        prompt=[PROMPT], max_tokens=20, **GREEDY | {"extra_body": {"cache_salt": "mine", "ignore_eos": True}}
    )
    assert apart.choices[0].text == choice.text
    assert apart.usage is not None
    assert apart.usage.prompt_tokens_details is not None
    assert apart.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("tells_usage", [False, True])
async def test_a_completion_in_parts(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, tells_usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if tells_usage else {}
    parts = [
        each
        async for each in await api.completions.create(prompt="Tell: ", max_tokens=50, stream=True, **GREEDY, **options)
    ]
    if tells_usage:
        last = parts.pop()
        assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 50)
    assert len(parts) > 1
    assert len({each.id for each in parts}) == 1
    assert "".join(each.choices[0].text for each in parts) == await completed_alone(client, 50, "Tell: ")
    assert [each.choices[0].finish_reason for each in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(each.usage is None for each in parts)


@pytest.mark.parametrize("streams", [False, True])
async def test_several_outputs(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, streams: bool) -> None:
    """Each is what contexts give for the same seed; their prompt is counted once."""
    prompt = await client.tokenize(PROMPT)
    async with await client.create(PROMPT, salt="alone") as context:
        outputs = await context.completions(3, max_tokens=20, seed=7)
        expected = [each.text for each in outputs]
        for each in outputs:
            await each.context.close()
    asked: Any = {"model": "echo", "prompt": prompt, "n": 3, "seed": 7, "max_tokens": 20}
    if streams:
        texts, usage = [""] * 3, None
        async for part in await api.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
            usage = part.usage
            for choice in part.choices:
                texts[choice.index] += choice.text
    else:
        answer = await api.completions.create(**asked)
        texts, usage = [each.text for each in answer.choices], answer.usage
    assert texts == expected
    assert len(set(texts)) == 3
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 60)
    assert usage.prompt_tokens_details.cached_tokens == 0
    again = (await api.completions.create(**asked)).usage
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16


async def test_only_filling(api: openai.AsyncOpenAI) -> None:
    """`max_tokens` 0: the prompt is computed, for the next request to find."""
    for streams in (False, True):
        prompt = f"{streams} {PROMPT}"
        asked: Any = {**GREEDY, "prompt": prompt, "max_tokens": 0, "n": 2}
        if streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            parts = [each async for each in await api.completions.create(**asked)]
            told = [choice for each in parts for choice in each.choices]
            usage = parts[-1].usage
        else:
            answer = await api.completions.create(**asked)
            told, usage = list(answer.choices), answer.usage
        assert [(each.index, each.text, each.finish_reason) for each in told] == [(0, "", "length"), (1, "", "length")]
        assert usage is not None
        assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 0
        written = usage.prompt_tokens_details.cache_write_tokens
        assert written == usage.prompt_tokens // 16 * 16
        again = (await api.completions.create(prompt=prompt, max_tokens=1, **GREEDY)).usage
        assert again is not None
        assert again.prompt_tokens_details is not None
        assert again.prompt_tokens_details.cached_tokens == min(written, again.prompt_tokens - 1)


async def test_the_prompt_comes_first_if_it_is_wanted(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    expected = PROMPT + await completed_alone(client, 5, PROMPT)
    ids = list(await client.tokenize(PROMPT))
    for prompt in (PROMPT, ids):
        asked: Any = {**GREEDY, "prompt": prompt, "max_tokens": 5, "echo": True}
        assert (await api.completions.create(**asked)).choices[0].text == expected
        stream = await api.completions.create(stream=True, **asked)
        assert "".join([each.choices[0].text async for each in stream]) == expected
        assert (await api.completions.create(**{**asked, "max_tokens": 0})).choices[0].text == PROMPT


async def test_several_prompts(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    prompts = [f"{number}: {PROMPT}" for number in range(20)]
    expected = [await completed_alone(client, 4, prompt) for prompt in prompts]
    answer = await api.completions.create(prompt=prompts, max_tokens=4, **GREEDY)
    assert [each.index for each in answer.choices] == list(range(20))
    assert [each.text for each in answer.choices] == expected
    counts = [len(await client.tokenize(prompt)) for prompt in prompts]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(counts), 80)
    texts = [""] * 40
    asked: Any = {**GREEDY, "prompt": [list(await client.tokenize(each)) for each in prompts], "n": 2}
    async for part in await api.completions.create(stream=True, max_tokens=4, **asked):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [text for text in expected for _ in range(2)]


async def test_an_error_in_one_of_several_prompts(api: openai.AsyncOpenAI) -> None:
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(prompt=["~" * 2000, "fine"], max_tokens=400, stream=streams, **GREEDY)
        assert refused.value.param == "prompt"


async def test_the_best_of_several(api: openai.AsyncOpenAI) -> None:
    """Those with the highest mean log probability, the best one first."""
    asked: Any = {"model": "echo", "prompt": "Tell: ", "max_tokens": 8, "seed": 5, "logprobs": 0}
    everything = (await api.completions.create(n=6, **asked)).choices

    def mean(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    best = sorted(everything, key=mean, reverse=True)[:2]
    answer = await api.completions.create(n=2, best_of=6, **asked)
    assert [(each.index, each.text) for each in answer.choices] == list(enumerate(each.text for each in best))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 48
    plain = await api.completions.create(n=1, best_of=6, **{**asked, "logprobs": None})
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (best[0].text, None)
    with pytest.raises(openai.BadRequestError) as refused:
        await api.completions.create(n=1, best_of=2, stream=True, **asked)
    assert refused.value.param == "best_of"


async def test_the_usage_in_every_chunk(api: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {**GREEDY, "prompt": PROMPT, "max_tokens": 30}
    parts = [each async for each in await api.completions.create(stream=True, stream_options=options, **asked)]
    counts = [each.usage.completion_tokens for each in parts if each.usage]
    assert len(counts) == len(parts)
    assert counts == sorted(counts)
    assert counts[-1] == 30
    assert {each.usage.prompt_tokens for each in parts if each.usage} == {
        parts[-1].usage and parts[-1].usage.prompt_tokens
    }


async def test_ids_of_tokens(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    ids = list(await client.tokenize(PROMPT))
    asked: Any = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}, "max_tokens": 5}
    (choice,) = (await api.completions.create(prompt=PROMPT, **asked)).choices
    told: Any = choice.model_extra
    assert told["prompt_token_ids"] == ids
    assert len(told["token_ids"]) == 5
    parts = [
        each.choices[0].model_extra async for each in await api.completions.create(prompt=PROMPT, stream=True, **asked)
    ]
    assert [token for each in parts for token in (each or {})["token_ids"]] == told["token_ids"]
    assert (parts[0] or {})["prompt_token_ids"] == ids


async def test_special_tokens_that_are_shown(api: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "echo", "prompt": "x", "max_tokens": 2, "logit_bias": {"258": 100}, "temperature": 0}
    hidden = await api.completions.create(**asked)
    shown = await api.completions.create(extra_body={"skip_special_tokens": False}, **asked)
    assert (hidden.choices[0].text, shown.choices[0].text) == ("", "<|im_start|>" * 2)


async def test_the_fingerprint_is_that_of_the_model(api: openai.AsyncOpenAI) -> None:
    answers = [await api.completions.create(prompt="x", max_tokens=1, **GREEDY) for _ in range(2)]
    (fingerprint,) = {each.system_fingerprint for each in answers}
    assert fingerprint is not None
    assert fingerprint.startswith("fp_")


async def test_where_it_stops(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    text = await completed_alone(client, 40, "Tell: ")
    stop = text[20:23]
    (choice,) = (await api.completions.create(prompt="Tell: ", max_tokens=40, stop=stop, **GREEDY)).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    kept = {**GREEDY, "extra_body": {"ignore_eos": True, "include_stop_str_in_output": True}}
    (choice,) = (await api.completions.create(prompt="Tell: ", max_tokens=40, stop=["\0", stop], **kept)).choices
    assert choice.text == text[: text.index(stop)] + stop


async def test_how_it_is_drawn(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    """As contexts do with the same settings."""
    asked = {"temperature": 1.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}
    beyond = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 20}
    beyond["stop_token_ids"] = [300]
    async with await client.create("Tell: ", salt="alone") as context:
        settings: Any = {**asked, **beyond, "logit_bias": {65: 5.0}, "max_tokens": 30}
        expected = await context.complete(**settings)
    fields: Any = {**asked, "logit_bias": {"65": 5}, "max_tokens": 30}
    answer = await api.completions.create(model="echo", prompt="Tell: ", extra_body=beyond, **fields)
    assert answer.choices[0].text == expected.text
    greedy = await api.completions.create(prompt="Tell: ", max_tokens=30, **GREEDY)
    assert greedy.choices[0].text != expected.text


async def test_a_prompt_that_is_too_long(api: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.completions.create(model="echo", prompt="~" * 2000)
    assert (refused.value.param, "1 to 1536 tokens" in refused.value.message) == ("prompt", True)


async def test_a_large_body(web: HttpClient, client: jaxctx.aio.Client) -> None:
    """Of texts full of what parts values in JSON, and of very many ids: refused for what the model takes alone."""
    for prompt in ('{"a": [1, 2]}, ' * 100_000, [65] * 500_000):
        asked = await web("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert asked.error[2] == "prompt"
    text = '{"a": [1, "\\"]}, ' * 60
    answer = await web("POST", "/v1/completions", {"prompt": text, "max_tokens": 2, **EXACT})
    assert answer.json["choices"][0]["text"] == await completed_alone(client, 2, text)


@needs_curl
async def test_the_readmes_line_runs_as_pasted(web: HttpClient) -> None:
    (line,) = [each for each in commands() if "localhost:8000/v1/completions" in each and "x-session" not in each]
    (output,) = await run_pasted(web, [line])
    told = json.loads(output)
    assert told["object"] == "text_completion"
    assert told["choices"][0]["text"]
