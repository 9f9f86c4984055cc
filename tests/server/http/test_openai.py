"""The OpenAI API, judged by the official client: what it answers is what contexts give, and none is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.v1.context_service_pb2 import GenerateRequest
from jaxctx_server.auth import Key
from jaxctx_server.cluster import ALONE
from jaxctx_server.http.openai.completions import CompletionsForm
from jaxctx_server.http.openai.request import parse_request
from tests.e2e.conftest import TENANTS
from tests.e2e.test_cluster import RouterCluster, router_of
from tests.engines import Clock
from tests.readme import commands
from tests.server.http.client import HttpClient, http_server

PROMPT = "Tell a story of a page that is shared by many, and of one that is not. " * 2
EXACT = {"temperature": 0, "ignore_eos": True}
GREEDY: Any = {"model": "echo", "temperature": 0, "extra_body": {"ignore_eos": True}}


def asking(web: HttpClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{web.port}/v1", api_key=key, max_retries=0, timeout=120)


@pytest.fixture
async def api(web: HttpClient, client: jaxctx.aio.Client) -> AsyncIterator[openai.AsyncOpenAI]:
    """And whatever was asked, no context is left."""
    async with asking(web) as api:
        yield api
    await nothing_left(client)


async def nothing_left(client: jaxctx.aio.Client) -> None:
    async with asyncio.timeout(120):
        while [each.id async for each in client.contexts()]:
            await asyncio.sleep(0.01)


async def alone(client: jaxctx.aio.Client, tokens: int, text: str | None = None, **content: Any) -> str:
    """What a context gives."""
    async with await client.create(text, salt="alone", **content) as context:
        return str(await context.complete(max_tokens=tokens, **EXACT))


async def test_a_completion(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    answer = await api.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY)
    (choice,) = answer.choices
    ids = await client.tokenize(PROMPT)
    assert (choice.text, choice.finish_reason) == (await alone(client, 20, PROMPT), "length")
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
    assert "".join(each.choices[0].text for each in parts) == await alone(client, 50, "Tell: ")
    assert [each.choices[0].finish_reason for each in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(each.usage is None for each in parts)


async def test_a_chat(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who shares pages?"}]
    expected = await alone(client, 20, messages=messages)
    answer = await api.chat.completions.create(messages=messages, max_tokens=20, **GREEDY)
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", expected)
    messages[1]["content"] = [{"type": "text", "text": "Who shares "}, {"type": "text", "text": "pages?"}]
    stream = await api.chat.completions.create(messages=messages, max_completion_tokens=20, stream=True, **GREEDY)
    parts = [each.choices[0] async for each in stream]
    assert [each.delta.role for each in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert "".join(each.delta.content or "" for each in parts) == expected
    assert [each.finish_reason for each in parts if each.finish_reason] == ["length"]


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
    text = await alone(client, 40, "Tell: ")
    stop = text[20:23]
    (choice,) = (await api.completions.create(prompt="Tell: ", max_tokens=40, stop=stop, **GREEDY)).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    kept = {**GREEDY, "extra_body": {"ignore_eos": True, "include_stop_str_in_output": True}}
    (choice,) = (await api.completions.create(prompt="Tell: ", max_tokens=40, stop=["\0", stop], **kept)).choices
    assert choice.text == text[: text.index(stop)] + stop


def test_every_field_arrives() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}
    sampling |= {"top_k": 40, "min_p": 0.25, "repetition_penalty": 1.5}
    generation = {"n": 2, "max_tokens": 30, "min_tokens": 20, "stop_token_ids": [300, 301], "ignore_eos": True}
    told = {**sampling, **generation, "logit_bias": {"65": 5}, "stop": ["a", "b"], "include_stop_str_in_output": True}
    told |= {"model": "m", "cache_salt": "s", "stream": True, "stream_options": {"include_usage": True}, "prompt": "x"}
    for first in (told, {**told, "max_tokens": 7, "max_completion_tokens": 30}):
        asked = parse_request(CompletionsForm(), json.dumps(first).encode())
        assert asked.generate == GenerateRequest(
            sampling={**sampling, "logit_bias": {65: 5.0}}, **generation, stop=["a", "b"], include_stop=True
        )
        assert (asked.create.model_id, asked.create.salt, asked.fill.text) == ("m", "s", "x")
        assert (asked.stream, asked.include_usage) == (True, True)


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


class TestRefused:
    """With the name of the field in this API; and nothing is made."""

    @pytest.mark.parametrize(
        ("asked", "field"),
        [
            ({"temperature": 300}, "temperature"),
            ({"temperature": "warm"}, "temperature"),
            ({"temperature": 10**400}, "temperature"),
            ({"logit_bias": {"5": 10**400}}, "logit_bias"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"max_tokens": 2, "max_completion_tokens": -1}, "max_completion_tokens"),
            ({"max_tokens": 2.5}, "max_tokens"),
            ({"n": 129}, "n"),
            ({"logit_bias": {"512": 1}}, "logit_bias[512]"),
            ({"logit_bias": {"word": 1}}, "logit_bias"),
            ({"stop": [""]}, "stop[0]"),
            ({"stop": 5}, "stop"),
            ({"cache_salt": "x" * 257}, "cache_salt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ["two", "texts"]}, "prompt"),
            ({"prompt": [1, 512]}, "prompt"),
            ({"prompt": [1, "x"]}, "prompt"),
            ({"prompt": [1, 2**31]}, "prompt"),
            ({"guided_json": {"type": "object"}}, "guided_json"),
            ({"prompt": "\ud800"}, "prompt"),
            ({"stream": "yes"}, "stream"),
            ({"stream_options": True}, "stream_options"),
            ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"echo": True}, "echo"),
            ({"logprobs": 0}, "logprobs"),
            ({"best_of": 2}, "best_of"),
            ({"suffix": "end"}, "suffix"),
            ({"priority": 1}, "priority"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
                "response_format",
            ),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"instructions": "Be brief."}, "instructions"),
            ({"store": True}, "store"),
            ({"service_tier": "flex"}, "service_tier"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"verbosity": "low"}, "verbosity"),
            ({"truncation": "auto"}, "truncation"),
            ({"background": True}, "background"),
            ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
            ({"modalities": ["audio"]}, "modalities"),
            ({"top_logprobs": 5}, "top_logprobs"),
            ({"skip_special_tokens": False}, "skip_special_tokens"),
            ({"add_special_tokens": False}, "add_special_tokens"),
            ({"length_penalty": 2}, "length_penalty"),
            ({"session_id": "x"}, "session_id"),
            ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
            ({"stop": ["x"] * 20_000}, "stop"),
            ({"stop_token_ids": [5] * 500_000}, "stop_token_ids"),
            ({"logit_bias": {str(each): 1 for each in range(10_000)}}, "logit_bias"),
            ({"prompt": [[]] * 100_000}, None),
            ({"prompt": [1] * 1_100_000}, None),
            ({"stop": [""] * 100_000}, None),
        ],
    )
    @pytest.mark.parametrize("streams", [False, True])
    async def test_a_completion(
        self, web: HttpClient, client: jaxctx.aio.Client, asked: dict[str, Any], field: str | None, streams: bool
    ) -> None:
        body = {"model": "echo", "prompt": "Tell: ", "max_tokens": 2, "stream": streams, **asked}
        assert (await web("POST", "/v1/completions", body)).error == (400, "INVALID_FIELD", field)
        await nothing_left(client)

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            (None, "messages"),
            ([], "messages"),
            ({}, "messages"),
            (["hello"], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "", "content": "x"}], "messages[0].role"),
            ([{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], "messages[1].role"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
            ([{"role": "user", "content": "x", "name": "alice"}], "messages[0].name"),
            ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
            ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
            ([{"role": "user", "content": "x"}] * 1025, "messages"),
        ],
    )
    async def test_a_chat(self, web: HttpClient, messages: Any, field: str) -> None:
        asked = await web("POST", "/v1/chat/completions", {"messages": messages})
        assert asked.error == (400, "INVALID_FIELD", field)

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
    async def test_what_is_no_object(self, web: HttpClient, body: bytes) -> None:
        asked = await web("POST", "/v1/completions", body, headers={"content-type": "application/json"})
        assert asked.error == (400, "INVALID_FIELD", None)

    @pytest.mark.parametrize("name", ["x-session-id", "x-session-ttl", "x-session-mode"])
    async def test_a_header_of_kept_contexts(self, web: HttpClient, name: str) -> None:
        asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await web("POST", path, asked, headers={name: "60"})).error == (400, "INVALID_FIELD", name)
        assert (await web("GET", "/v1/models", headers={name: "60"})).error == (400, "INVALID_FIELD", name)

    async def test_a_message_says_it_in_the_same_words(self, api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model="echo", prompt="x", top_p=7, temperature=300)
        assert refused.value.param == "temperature"
        assert "sampling" not in refused.value.message
        assert "top_p: must be" in refused.value.message

    async def test_another_model(self, api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as refused:
            await api.completions.create(model="none", prompt="x")
        assert refused.value.code == "MODEL_NOT_FOUND"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("none")
        with pytest.raises(openai.BadRequestError) as refused_too:
            await api.models.retrieve("x" * 300)
        assert refused_too.value.param == "model"

    async def test_a_prompt_that_is_too_long(self, api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model="echo", prompt="~" * 2000)
        assert (refused.value.param, "1 to 1536 tokens" in refused.value.message) == ("prompt", True)

    async def test_fields_that_ask_for_nothing_or_that_nobody_knows(
        self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client
    ) -> None:
        nothing = {"echo": False, "logprobs": None, "tools": [], "best_of": 1, "suffix": "", "tool_choice": "auto"}
        nothing |= {
            "response_format": {"type": "text"},
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "safety_identifier": "me",
            "prompt_cache_key": "x",
            "parallel_tool_calls": True,
            "service_tier": "auto",
            "verbosity": "medium",
            "skip_special_tokens": True,
            "add_special_tokens": True,
            "stream_options": {"include_obfuscation": False},
            "top_k": -1,
            "of_tomorrow": {"a": 1},
        }
        asked = {**GREEDY, "extra_body": {"ignore_eos": True, **nothing}}
        answer = await api.completions.create(prompt="Tell: ", max_tokens=5, **asked)
        assert answer.choices[0].text == await alone(client, 5, "Tell: ")


async def test_what_nobody_knows_is_told_once(web: HttpClient, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for name in ("of_tomorrow", "user", "x" * 1000, "a\nb"):
            asked = {"model": "echo", "prompt": "x", "max_tokens": 2, name: 1}
            assert (await web("POST", "/v1/completions", asked)).status == 200
    told = [each.getMessage() for each in caplog.records if each.name == "jaxctx.http"]
    assert [each.rpartition(": ")[2] for each in told] == ["'of_tomorrow'", "'" + "x" * 63, r"'a\nb'"]


async def test_a_large_body(web: HttpClient, client: jaxctx.aio.Client) -> None:
    """Of texts full of what parts values in JSON, and of very many ids: refused for what the model takes alone."""
    for prompt in ('{"a": [1, 2]}, ' * 100_000, [65] * 500_000):
        asked = await web("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert asked.error[2] == "prompt"
    text = '{"a": [1, "\\"]}, ' * 60
    answer = await web("POST", "/v1/completions", {"prompt": text, "max_tokens": 2, **EXACT})
    assert answer.json["choices"][0]["text"] == await alone(client, 2, text)


async def test_models(api: openai.AsyncOpenAI, web: HttpClient) -> None:
    (found,) = (await api.models.list()).data
    assert (found.id, found.object) == ("echo", "model")
    retrieved = await api.models.retrieve("echo")
    assert retrieved.model_dump(exclude={"model"}) == found.model_dump()  # which the contract adds
    for path in ("/v1/models", "/v1/models/"):
        assert [each["id"] for each in (await web("GET", path)).json["data"]] == ["echo"]


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


async def test_models_of_a_core_without_engines(clock: Clock) -> None:
    """They are unknown, and not none."""
    router_cluster = RouterCluster(clock, None, ALONE)
    async with router_of(router_cluster), http_server(router_cluster.router) as web:
        for path in ("/v1/models", "/v1/models/echo"):
            answer = await web("GET", path)
            assert answer.error == (503, "ENGINE_LOST", None)
            assert answer.json["error"]["message"] == "no engine has come yet"
            assert int(answer.headers["retry-after"]) >= 1


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_each_needs_its_key(self, web: HttpClient, address: str) -> None:
        async with asking(web, "carol") as nobody, asking(web, TENANTS[0]) as alice:
            for asked in (nobody.completions.create(prompt="x", **GREEDY), nobody.models.list()):
                with pytest.raises(openai.AuthenticationError):
                    await asked
            assert (await alice.completions.create(prompt="x", max_tokens=3, **GREEDY)).choices[0].text
        async with jaxctx.aio.Client(address, api_key=TENANTS[0]) as client:
            await nothing_left(client)


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"stream": True, "n": 4}])
async def test_a_request_ends_with_who_made_it(
    web: HttpClient, client: jaxctx.aio.Client, asked: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "Tell: ", "max_tokens": 1400, **asked, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    if asked:
        await reader.readuntil(b"data: ")
    async with asyncio.timeout(120):
        while not (found := [each async for each in client.contexts()]):
            await asyncio.sleep(0.005)
    expiry = (await found[0].refresh()).expiry
    assert expiry is not None  # if the gateway dies, nobody closes it
    assert (expiry.seconds, expiry.sliding) == (60.0, True)
    writer.close()
    await nothing_left(client)
    assert (await client.stats()).running == 0


async def test_an_error_on_the_way(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    """A stream that has begun ends with it, and not as if it were whole."""
    texts = []
    with pytest.raises(openai.APIError, match=r"cancelled|closed"):
        async for part in await api.completions.create(prompt="Tell: ", max_tokens=1400, stream=True, **GREEDY):
            if not texts:
                (context,) = [each async for each in client.contexts()]
                await context.close()
            texts.append(part.choices[0].text)
    assert texts
