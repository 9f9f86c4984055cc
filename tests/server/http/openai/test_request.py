"""Bodies of the OpenAI API: which fields arrive, and which are refused by their names, with nothing made."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import GenerateRequest
from jaxctx_server.http.openai.completions import parse_completion
from jaxctx_server.http.openai.request import StreamOptions, parse_shared
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, completed_alone, no_context_left


def test_every_field_arrives() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}
    sampling |= {
        "top_k": 40,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
    }
    generation = {"n": 2, "max_tokens": 30, "min_tokens": 20, "stop_token_ids": [300, 301], "ignore_eos": True}
    told = {**sampling, **generation, "logit_bias": {"65": 5}, "stop": ["a", "b"], "include_stop_str_in_output": True}
    told |= {
        "model": "m",
        "cache_salt": "s",
        "priority": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "x",
    }
    for first in (told, {**told, "max_tokens": 7, "max_completion_tokens": 30}):
        asked = parse_completion(json.dumps(first).encode())
        shared = asked.shared
        assert shared.generate == GenerateRequest(
            sampling={**sampling, "logit_bias": {65: 5.0}}, **generation, stop=["a", "b"], include_stop=True
        )
        assert (shared.create.model_id, shared.create.salt, shared.create.priority) == ("m", "s", -3)
        assert [fill.text for fill in asked.fills] == ["x"]
        assert shared.streaming == StreamOptions(stream=True, include_usage=True, continuous_usage=False)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"temperature": 300}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "temperature": 300}, "temperature"),
        ({"max_tokens": 0, "n": 129}, "n"),
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
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": ["x", 5]}, "prompt"),
        ({"prompt": ["x", {}]}, "prompt[1]"),
        ({"prompt": [[65], [1, "x"]]}, "prompt[1]"),
        ({"prompt": [[65], [1, 2**31]]}, "prompt[1]"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 1024, "n": 3}, "n"),
        ({"prompt": "~" * 2000, "echo": True, "logprobs": 1}, "prompt"),
        ({"prompt": [1, 512]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [1, 2**31]}, "prompt"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"tag": 1}}, "structured_outputs.tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"echo": "yes"}, "echo"),
        ({"seed": -2}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": "all"}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "allowed_token_ids"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        # Numbers must be numbers: JSON of protobuf takes texts too.
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": "5"}, "seed"),
        ({"n": "1"}, "n"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"ebnf": "x"}, "ebnf"),
        ({"suffix": "end"}, "suffix"),
        ({"priority": 101}, "priority"),
        ({"priority": True}, "priority"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"instructions": "Be brief."}, "instructions"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "endless"}, "verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"return_token_ids": 1}, "return_token_ids"),
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
async def test_a_field_that_is_refused(
    web: HttpClient, client: jaxctx.aio.Client, asked: dict[str, Any], field: str | None, streams: bool
) -> None:
    body = {"model": "echo", "prompt": "Tell: ", "max_tokens": 2, "stream": streams, **asked}
    assert (await web("POST", "/v1/completions", body)).error == (400, "INVALID_FIELD", field)
    await no_context_left(client)


async def test_usage_of_a_stream_without_one(web: HttpClient) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    assert (await web("POST", "/v1/completions", body)).error == (400, "INVALID_FIELD", "stream_options")


def test_a_seed_that_is_left_to_the_server() -> None:
    asked = parse_completion(b'{"prompt": "x", "seed": -1}')
    assert not asked.shared.generate.sampling.HasField("seed")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_what_is_no_object(web: HttpClient, body: bytes) -> None:
    asked = await web("POST", "/v1/completions", body, headers={"content-type": "application/json"})
    assert asked.error == (400, "INVALID_FIELD", None)


@pytest.mark.parametrize("name", ["x-session-id", "x-session-ttl", "x-session-mode"])
async def test_a_header_of_kept_contexts(web: HttpClient, name: str) -> None:
    """Where it means nothing; tests/server/http/contextcache has the paths that read it."""
    assert (await web("GET", "/v1/models", headers={name: "60"})).error == (400, "INVALID_FIELD", name)


async def test_fields_that_ask_for_nothing_or_that_nobody_knows(
    api: openai.AsyncOpenAI, client: jaxctx.aio.Client
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
        "service_tier": "flex",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "skip_special_tokens": True,
        "add_special_tokens": True,
        "stream_options": {"include_obfuscation": False},
        "top_k": -1,
        "of_tomorrow": {"a": 1},
    }
    asked = {**GREEDY, "extra_body": {"ignore_eos": True, **nothing}}
    answer = await api.completions.create(prompt="Tell: ", max_tokens=5, **asked)
    assert answer.choices[0].text == await completed_alone(client, 5, "Tell: ")


async def test_what_nobody_knows_is_told_once(web: HttpClient, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for name in ("of_tomorrow", "user", "x" * 1000, "a\nb"):
            asked = {"model": "echo", "prompt": "x", "max_tokens": 2, name: 1}
            assert (await web("POST", "/v1/completions", asked)).status == 200
    told = [each.getMessage() for each in caplog.records if each.name == "jaxctx.http"]
    assert [each.rpartition(": ")[2] for each in told] == ["'of_tomorrow'", "'" + "x" * 63, r"'a\nb'"]


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "n", "max_tokens", "min_p"])
def test_a_truth_value_is_no_number(name: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_shared({name: True})
    assert raised.value.violations[0].field == name
