"""Why a prompt did not reuse the pages of the last one with its `prompt_cache_key`."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import jaxctx
from jaxctx_server.auth import Key
from jaxctx_server.http.openai import diagnosis
from jaxctx_server.http.openai.diagnosis import compare
from jaxctx_server.http.prompt_memory import PromptMemory, RememberedPrompt
from tests.e2e.conftest import TENANTS
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import GREEDY, PROMPT, no_context_left, openai_client
from tests.server.http.scripted import scripted_server

PAGE = 16
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def told(api: openai.AsyncOpenAI, prompt: Any, key: str = "k", **fields: Any) -> tuple[str, Any, Any]:
    """The id of a completion, what it says of an earlier one, and its usage."""
    extra = {"ignore_eos": True, "prompt_cache_key": key, **fields.pop("extra", {})}
    asked: Any = {**GREEDY, "prompt": prompt, "max_tokens": 2, "extra_body": extra, **fields}
    if not fields.get("stream"):
        answer = await api.completions.create(**asked)
        return answer.id, (answer.model_extra or {}).get("prompt_cache_diagnostics"), answer.usage
    parts = [part async for part in await api.completions.create(**asked)]
    found = [(part.model_extra or {}).get("prompt_cache_diagnostics") for part in parts]
    assert not any(found[1:])
    return parts[0].id, found[0], None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_goes_on(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, stream: bool) -> None:
    first, said, _ = await told(api, PROMPT, stream=stream)
    assert said == {"type": "unavailable"}
    second, said, _ = await told(api, PROMPT + " And on.", stream=stream)
    assert said == {"type": "cache_hit", "comparison_response_id": first}
    _, said, _ = await told(api, PROMPT, stream=stream)  # which is shorter
    assert said == {"type": "cache_hit", "comparison_response_id": second}
    await no_context_left(client)


async def test_a_prompt_that_changed_and_what_that_cost(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    first, _, _ = await told(api, PROMPT)
    changed = PROMPT[:70] + "X" + PROMPT[71:]
    _, said, usage = await told(api, changed)
    before, now = [list(await client.tokenize(text)) for text in (PROMPT, changed)]
    differs = next(place for place in range(len(before)) if before[place] != now[place])
    assert said == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens,
        "comparison_reusable_tokens": differs // PAGE * PAGE,
        "comparison_response_id": first,
    }
    assert usage.prompt_tokens_details.cached_tokens == differs // PAGE * PAGE > 0


async def test_another_salt(api: openai.AsyncOpenAI) -> None:
    await told(api, PROMPT)
    _, said, usage = await told(api, PROMPT, extra={"cache_salt": "pepper"})
    assert (said["reason"], said["comparison_reusable_tokens"]) == ("salt_changed", 0)
    assert said["cache_missed_tokens"] == usage.prompt_tokens


@pytest.mark.parametrize("ids", [False, True])
async def test_other_tools(ids: bool) -> None:
    asked: Any = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 2,
        "prompt_cache_key": "k",
        "return_token_ids": ids,
    }
    async with scripted_server("x") as scripted:
        said = []
        for tools in ([TOOL], [TOOL], [{**TOOL, "function": {**TOOL["function"], "name": "seek"}}]):
            answer = await scripted.web("POST", "/v1/chat/completions", {**asked, "tools": tools})
            said.append(answer.json["prompt_cache_diagnostics"])
    assert said[0] == {"type": "unavailable"}
    assert said[2]["reason"] == "tools_changed"


async def test_a_chat(api: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "hi"}]
    asked: Any = {**GREEDY, "max_tokens": 2, "prompt_cache_key": "chat"}
    first = await api.chat.completions.create(messages=messages, **asked)
    messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go on."}]
    second = await api.chat.completions.create(messages=messages, **asked)
    said: Any = (second.model_extra or {})["prompt_cache_diagnostics"]
    assert said == {"type": "cache_hit", "comparison_response_id": first.id}
    messages[0]["content"] = "Now: " + PROMPT
    third = await api.chat.completions.create(messages=messages, **asked)
    said = (third.model_extra or {})["prompt_cache_diagnostics"]
    assert (said["reason"], said["comparison_response_id"]) == ("input_changed", second.id)


async def test_a_prompt_that_is_only_computed_is_remembered(api: openai.AsyncOpenAI) -> None:
    first, said, _ = await told(api, PROMPT, max_tokens=0)
    assert said == {"type": "unavailable"}
    assert (await told(api, PROMPT))[1] == {"type": "cache_hit", "comparison_response_id": first}


async def test_several_outputs_are_of_one_prompt(api: openai.AsyncOpenAI) -> None:
    first, _, _ = await told(api, PROMPT, n=3)
    assert (await told(api, PROMPT, n=2))[1] == {"type": "cache_hit", "comparison_response_id": first}


async def test_where_nothing_is_said(web: HttpClient, api: openai.AsyncOpenAI) -> None:
    assert (await told(api, PROMPT, key=""))[1] is None
    assert (await told(api, [PROMPT, "x"]))[1] is None
    assert (await told(api, PROMPT, extra={"prompt_logprobs": 1}))[1] is None
    asked = {"prompt": PROMPT, "max_tokens": 2, "prompt_cache_key": "k"}
    kept = await web("POST", "/v1/completions", asked, headers={"x-session-ttl": "60"})
    assert "prompt_cache_diagnostics" not in kept.json
    assert "cache" in kept.json
    assert (await told(api, PROMPT))[1] == {"type": "unavailable"}  # so they are not remembered either


async def test_a_key_that_is_no_text(web: HttpClient) -> None:
    answer = await web("POST", "/v1/completions", {"prompt": "x", "prompt_cache_key": 5})
    assert answer.error == (400, "INVALID_FIELD", "prompt_cache_key")


async def test_digests_of_a_long_prompt_are_made_beside_the_loop(
    api: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "MAX_INLINE_TOKENS", 3)
    first, _, _ = await told(api, PROMPT)
    assert (await told(api, PROMPT))[1] == {"type": "cache_hit", "comparison_response_id": first}


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_nobody_is_compared_with_another_tenant(self, web: HttpClient) -> None:
        async with openai_client(web, TENANTS[0]) as alice, openai_client(web, TENANTS[1]) as bob:
            first, _, _ = await told(alice, PROMPT)
            assert (await told(bob, PROMPT))[1] == {"type": "unavailable"}
            assert (await told(alice, PROMPT))[1] == {"type": "cache_hit", "comparison_response_id": first}


MEMORY = PromptMemory()


def remembered(tokens: list[int], **fields: Any) -> RememberedPrompt:
    span, beginnings = MEMORY.digests_of(tokens, PAGE)
    defaults: Any = {"answer_id": "a", "model": "m", "salt": b"s", "tools": b"t"}
    return RememberedPrompt(span=span, beginnings=beginnings, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("fields", "cached", "expected"),
    [
        ({}, 64, (None, 64)),
        ({}, 48, (None, 64)),  # the page of the last token is computed
        ({}, 32, ("not_in_cache", 64)),
        ({}, 0, ("not_in_cache", 64)),
        ({"model": "other", "salt": b"", "tools": b""}, 0, ("model_changed", 0)),
        ({"salt": b"", "tools": b""}, 64, ("salt_changed", 0)),
        ({"tools": b""}, 64, (None, 64)),  # which changed no token
    ],
)
def test_equal_prompts(fields: Any, cached: int, expected: tuple[str | None, int]) -> None:
    tokens = list(range(64))
    assert compare(remembered(tokens, **fields), remembered(tokens), cached=cached, page_size=PAGE) == expected


@pytest.mark.parametrize(("tools", "reason"), [(b"t", "input_changed"), (b"", "tools_changed")])
def test_other_prompts(tools: bytes, reason: str) -> None:
    earlier, now = remembered(list(range(64)), tools=tools), remembered([*range(40), *range(24)])
    assert compare(earlier, now, cached=32, page_size=PAGE) == (reason, 32)
