"""POST /v1/responses by the official client: the answer, its events, and responses that continue others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient
from tests.server.http.openai.harness import no_context_left

STORY = "Tell a story of a page that is shared by many, and of one that is not. " * 3
GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}


async def test_an_answer(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(input=STORY, instructions="Be brief.", metadata={"a": "b"}, **GREEDY)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.model, response.instructions, response.metadata) == ("echo", "Be brief.", {"a": "b"})
    assert len(response.output) == 1
    assert response.output_text
    usage = response.usage
    assert usage is not None
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (8, 0)
    assert usage.input_tokens_details.cache_write_tokens > 0
    assert usage.total_tokens == usage.input_tokens + 8


async def test_a_search_of_the_web_is_left_out(api: openai.AsyncOpenAI) -> None:
    """Coding agents offer it without being asked to."""
    response = await api.responses.create(input="x", tools=[{"type": "web_search"}], **GREEDY)
    assert response.tools == []


async def test_it_is_the_answer_of_chat(api: openai.AsyncOpenAI) -> None:
    response = await api.responses.create(input=STORY, instructions="Be brief.", **GREEDY)
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    chat = await api.chat.completions.create(
        model="echo", messages=messages, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert response.output_text == chat.choices[0].message.content


async def test_the_events_of_a_stream(api: openai.AsyncOpenAI) -> None:
    kinds: list[str] = []
    text, final = "", None
    async with api.responses.stream(input=STORY, **GREEDY) as stream:
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.incomplete":
                final = event.response
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert final is not None
    assert text == final.output_text == (await api.responses.create(input=STORY, **GREEDY)).output_text


@pytest.mark.parametrize("fields", [{"prompt_cache_options": {"prewarm": True}}, {"generate": False}])
async def test_a_prompt_that_is_only_computed(web: HttpClient, fields: dict[str, Any]) -> None:
    asked = {"model": "echo", "input": STORY, "max_output_tokens": 4, "ignore_eos": True, "store": False}
    whole = (await web("POST", "/v1/responses", asked | fields)).json
    assert (whole["status"], whole["output"], whole["usage"]["output_tokens"]) == ("completed", [], 0)
    streamed = await web("POST", "/v1/responses", asked | fields | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: ")]
    kinds = ["response.created", "response.in_progress", "response.completed"]
    assert [(event["type"], event["sequence_number"]) for event in events] == list(zip(kinds, range(3), strict=True))
    assert events[-1]["response"]["output"] == []
    answered = (await web("POST", "/v1/responses", asked | {"prompt_cache_options": {"prewarm": False}})).json
    assert answered["usage"]["output_tokens"] == 4
    assert answered["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_events_are_numbered(web: HttpClient) -> None:
    body = {"input": "x", "model": "echo", "max_output_tokens": 2, "stream": True, "ignore_eos": True}
    answer = await web("POST", "/v1/responses", body)
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    assert [f'"sequence_number":{number}}}' in line for number, line in enumerate(lines)] == [True] * len(lines)


class TestContinuing:
    async def test_nothing_that_a_response_holds_is_computed_again(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input=STORY, **GREEDY)
        second = await api.responses.create(input="And then?", previous_response_id=first.id, **GREEDY)
        assert first.usage is not None
        assert second.usage is not None
        held = first.usage.total_tokens
        assert second.usage.input_tokens > held
        assert second.usage.input_tokens_details.cached_tokens >= held - 1
        assert second.previous_response_id == first.id

    async def test_one_response_can_be_continued_twice_and_differently(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input=STORY, **GREEDY)
        ways = ("Go on.", "Stop here, please, and begin another one.", "Go on.")
        answers = await asyncio.gather(
            *(api.responses.create(input=way, previous_response_id=first.id, **GREEDY) for way in ways)
        )
        assert answers[0].output_text == answers[2].output_text
        assert len({answer.id for answer in answers}) == 3
        again = await api.responses.create(input="More.", previous_response_id=answers[1].id, **GREEDY)
        assert again.output_text

    async def test_it_has_the_tokens_of_the_whole_conversation(
        self, api: openai.AsyncOpenAI, client: jaxctx.aio.Client
    ) -> None:
        first = await api.responses.create(input="One", instructions="Be brief.", **GREEDY)
        second = await api.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
        async with await client.create(messages=messages, salt="alone") as context:
            assert str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True)) == first.output_text
            await context.fill(messages=[{"role": "user", "content": "Two"}])
            assert str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True)) == second.output_text

    async def test_other_instructions_are_written_anew(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input=STORY, instructions="Be brief.", **GREEDY)
        second = await api.responses.create(
            input="Two", instructions="Be verbose.", previous_response_id=first.id, **GREEDY
        )
        fresh = await api.responses.create(
            input=[
                {"role": "user", "content": STORY},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "Two"},
            ],
            instructions="Be verbose.",
            **GREEDY,
        )
        assert second.output_text == fresh.output_text
        diagnostics = second.prompt_cache_diagnostics
        assert diagnostics is not None
        assert diagnostics.type == "cache_miss"
        assert diagnostics.reason == "input_changed"
        assert diagnostics.cache_missed_tokens > 0
        same = await api.responses.create(
            input="Two", instructions="Be brief.", previous_response_id=first.id, **GREEDY
        )
        assert same.prompt_cache_diagnostics is None

    async def test_a_response_that_is_not_stored(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input="One", store=False, **GREEDY)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as raised:
            await api.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
        assert raised.value.body["param"] == "previous_response_id"  # type: ignore[index]
        stored = await api.responses.create(input="One", **GREEDY)
        branch = await api.responses.create(input="Two", previous_response_id=stored.id, store=False, **GREEDY)
        assert branch.output_text

    async def test_after_the_one_before_was_deleted(self, api: openai.AsyncOpenAI) -> None:
        first = await api.responses.create(input="One", **GREEDY)
        second = await api.responses.create(input="Two", previous_response_id=first.id, **GREEDY)
        await api.responses.delete(first.id)
        third = await api.responses.create(input="Three", previous_response_id=second.id, **GREEDY)
        items = await api.responses.input_items.list(third.id, order="asc")
        assert [item.type for item in items.data] == ["message"] * 5


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({}, "input"),
            ({"input": 5}, "input"),
            ({"input": []}, "input"),
            ({"input": [5]}, "input[0]"),
            ({"input": [{"type": "computer_call"}]}, "input[0].type"),
            ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
            ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
            ({"input": "x", "background": "yes"}, "background"),
            ({"input": "x", "truncation": "auto"}, "truncation"),
            ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
            ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
            ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
            ({"input": "x", "metadata": {"a": 1}}, "metadata"),
            ({"input": "x", "temperature": 1000}, "temperature"),
            ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
            ({"input": "x", "store": "yes"}, "store"),
            ({"input": "x", "previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
            ({"input": "x", "instructions": 5}, "instructions"),
            ({"input": "x", "prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ],
    )
    async def test_the_field_is_named(
        self, web: HttpClient, client: jaxctx.aio.Client, fields: dict[str, Any], field: str
    ) -> None:
        for stream in (False, True):
            answer = await web("POST", "/v1/responses", {"model": "echo", "stream": stream, **fields})
            assert answer.error == (400, "INVALID_FIELD", field)
        await no_context_left(client)

    async def test_an_unknown_model(self, api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as raised:
            await api.responses.create(input="x", model="none")
        assert raised.value.body["param"] == "model"  # type: ignore[index]

    async def test_a_context_of_another_kind_is_no_response(self, web: HttpClient, client: jaxctx.aio.Client) -> None:
        async with await client.create("x") as context:
            await context.save("resp-mine")
        for name in ("resp-mine", "none"):
            body = {"model": "echo", "input": "x", "previous_response_id": name}
            assert (await web("POST", "/v1/responses", body)).error[0] == 404


async def test_who_leaves_leaves_nothing_behind(web: HttpClient, client: jaxctx.aio.Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    body = b'{"model": "echo", "input": "x", "max_output_tokens": 1000, "ignore_eos": true, "stream": true}'
    head = "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    assert b"200" in await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    await no_context_left(client)
    assert [each async for each in client.snapshots()] == []


async def test_only_tokens_that_are_allowed(web: HttpClient, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"input": STORY, "max_output_tokens": 8, "ignore_eos": True, "allowed_token_ids": [97], "store": False}
    answer = await web("POST", "/v1/responses", fields)
    assert answer.json["output"][0]["content"][0]["text"] == "a" * 8
    assert "not known" not in caplog.text


async def test_a_response_that_runs_when_a_drain_begins_is_stored(api: openai.AsyncOpenAI, backend: Backend) -> None:
    """The drain waits for it: an engine that drains would not save it."""
    kinds = []
    async with api.responses.stream(input=STORY, **(GREEDY | {"max_output_tokens": 200})) as stream:
        async for event in stream:
            if event.type == "response.created":
                draining = asyncio.create_task(backend.lifecycle.drain())
                response_id = event.response.id
            kinds.append(event.type)
    assert kinds[-1] == "response.incomplete"
    await draining
    assert (await api.responses.retrieve(response_id)).status == "incomplete"
    with pytest.raises(openai.InternalServerError, match="drain"):
        await api.responses.create(input=STORY, **GREEDY)
