"""/v1/completions, judged by the official client: what it answers is what contexts give, and none is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from typing import Any

import openai
import pytest

import jaxctx
from tests.readme import commands
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import EXACT, GREEDY, PROMPT, completed_alone


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


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
async def test_the_readmes_line_runs_as_pasted(web: HttpClient) -> None:
    (line,) = [each for each in commands() if "localhost:8000/v1/completions" in each]
    pasted = line.replace("localhost:8000", f"localhost:{web.port}").replace("curl ", "curl -sS --fail ")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    process = await asyncio.create_subprocess_exec(
        "bash", "-e", "-c", pasted, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, error) == (0, b"")
    told = json.loads(output)
    assert told["object"] == "text_completion"
    assert told["choices"][0]["text"]
