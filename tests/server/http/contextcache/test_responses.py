"""/v1/responses in a kept context, which is then its only state."""

from __future__ import annotations

from typing import Any

import pytest

import jaxctx
from tests.server.http.client import Answer, HttpClient
from tests.server.http.contextcache.harness import STORY, made, told, use

ASKED: dict[str, Any] = {"model": "echo", "temperature": 0, "max_output_tokens": 8, "ignore_eos": True}


def output_text(answer: Answer) -> str:
    assert answer.status == 200, answer.text
    return str(answer.json["output"][0]["content"][0]["text"])


async def respond(web: HttpClient, headers: dict[str, str], **fields: Any) -> Answer:
    return await web("POST", "/v1/responses", {**ASKED, "input": STORY, **fields}, headers=headers)


async def test_new_input_is_appended(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    first = await respond(kept, {"x-session-ttl": "60"}, instructions="Be brief.")
    session_id = first.headers["x-session-id"]
    second = await respond(kept, {"x-session-id": session_id, "x-session-mode": "append"}, input="And then?")
    async with await client.create(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}], salt="alone"
    ) as context:
        texts = [str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True))]
        await context.fill(messages=[{"role": "user", "content": "And then?"}])
        texts.append(str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True)))
    assert [output_text(first), output_text(second)] == texts
    assert (first.json["cache"]["status"], second.json["cache"]["status"]) == ("created", "hit")
    held = first.json["usage"]["total_tokens"]
    assert second.json["usage"]["input_tokens_details"]["cached_tokens"] >= held - 1
    assert (await told(kept, session_id))["tokens"] == second.json["usage"]["total_tokens"]
    assert (second.json["store"], second.json["session_id"]) == (False, session_id)
    assert (await kept("GET", f"/v1/responses/{second.json['id']}")).status == 404


async def test_the_whole_input(kept: HttpClient) -> None:
    session_id, _ = await made(kept, messages=[{"role": "user", "content": STORY}])
    turns = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "y"},
    ]
    answer = await respond(kept, {"x-session-id": session_id}, input=turns)
    assert output_text(answer) == output_text(await respond(kept, {}, input=turns, store=False))
    cache = answer.json["cache"]
    assert (cache["status"], cache["reason"]) == ("partial", "prompt_changed")
    assert cache["first_difference"] == cache["reused_tokens"] == cache["stored_tokens"] - 8  # all but the output


@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_says_what_the_body_does(kept: HttpClient, stream: bool) -> None:
    session_id, _ = await made(kept, messages=[{"role": "user", "content": STORY}])
    added = {"x-session-id": session_id, "x-session-mode": "append"}
    answer = await respond(kept, added, input="And then?", stream=stream)
    assert answer.headers["x-session-cache"].startswith("hit")
    assert '"status":"hit"' in answer.text
    answer = await respond(kept, {"x-session-id": session_id}, input=f"{STORY} changed", stream=stream)
    assert answer.headers["x-session-cache"].startswith("partial")
    assert '"status":"partial"' in answer.text


async def test_a_stream(kept: HttpClient) -> None:
    answer = await respond(kept, {"x-session-ttl": "60"}, stream=True)
    session_id = answer.headers["x-session-id"]
    assert f'"session_id":"{session_id}"' in answer.text
    assert "response.incomplete" in answer.text
    assert (await told(kept, session_id))["version"] == 1
    then = await use(kept, session_id, mode="append", prompt="x")
    assert then.json["cache"]["status"] == "hit"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"instructions": "Be brief."}, "instructions"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_a_field_that_is_refused(kept: HttpClient, fields: dict[str, Any], field: str) -> None:
    session_id, _ = await made(kept)
    refused = await respond(kept, {"x-session-id": session_id, "x-session-mode": "append"}, **fields)
    assert refused.error == (400, "INVALID_FIELD", field)
    assert (await told(kept, session_id))["version"] == 1
    assert (await use(kept, session_id, mode="append", prompt="x")).status == 200


async def test_an_unknown_id(kept: HttpClient) -> None:
    assert (await respond(kept, {"x-session-id": "none"})).error == (404, "context_not_found", None)
