"""Adapters over gRPC and HTTP, on a small model whose outputs are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx_server.services import Backend
from tests.e2e.conftest import backend_of, grpc_address
from tests.engines import Clock
from tests.jaxctx.engine.adapters.conftest import adapter_dir, dense, shape, small_runner, small_served, start
from tests.jaxctx.engine.adapters.served import CONFIG
from tests.server.http.client import HttpClient, http_server

__all__ = ["adapter_dir", "dense", "shape", "small_runner", "small_served", "start"]

PROMPT = "A prompt of 23 letters."
IDS = list(PROMPT.encode())
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
async def backend(start) -> AsyncIterator[Backend]:
    async with backend_of(start(), CONFIG, Clock()) as backend:
        yield backend


@pytest.fixture
async def web(backend: Backend) -> AsyncIterator[HttpClient]:
    async with http_server(backend) as web:
        yield web


@pytest.fixture
async def client(backend: Backend) -> AsyncIterator[jaxctx.aio.Client]:
    async with grpc_address(backend) as address, jaxctx.aio.Client(address) as client:
        yield client


async def continued(context: jaxctx.aio.Context) -> list[int]:
    return [token async for piece in context.generate(**GREEDY_CALL) for token in piece.token_ids]


GREEDY_CALL = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def test_contexts_of_clients(client: jaxctx.aio.Client, dense, adapter_dir) -> None:
    info = await client.load_adapter("sql", "a1")
    await client.load_adapter("a2")
    assert [(each.name, each.rank) for each in await client.adapters()] == [("a2", 3), ("sql", 2)]
    contexts = [
        await client.create(tokens=IDS, adapter="sql"),
        await client.create(tokens=IDS),
        await client.create(tokens=IDS, model_id="a2"),
    ]
    outputs = await asyncio.gather(*(continued(context) for context in contexts))
    assert outputs == [dense.greedy(each, IDS, 12) for each in (adapter_dir / "a1", None, adapter_dir / "a2")]
    described = await contexts[0].refresh()
    assert (described.adapter, described.adapter_revision) == ("sql", info.revision)
    assert (await client.plan(tokens=IDS, adapter="sql")).resident > 0
    saved = await contexts[0].save("kept")
    assert (saved.adapter, saved.adapter_revision) == ("sql", info.revision)
    await client.unload_adapter("sql")
    with pytest.raises(errors.NotFound) as raised:
        await client.create(adapter="sql")
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    opened = await client.open("kept")
    before = await contexts[0].refresh()
    assert (opened.info.adapter, opened.info.adapter_revision) == ("sql", before.adapter_revision)
    (engine,) = await client.engines()
    assert (engine.info.adapter_slots, engine.info.adapter_rank, engine.stats.adapters) == (2, 4, 2)
    assert dict(engine.adapters) == {"a2": (await client.adapters())[0].revision}
    with pytest.raises(errors.ResourceExhausted) as full:
        await client.load_adapter("a3")
    assert full.value.reason == "ADAPTER_SLOTS"


async def test_a_context_switches(client: jaxctx.aio.Client, web: HttpClient, dense, adapter_dir) -> None:
    await client.load_adapter("sql", "a1")
    await client.load_adapter("fr", "a2")
    context = await client.create(tokens=IDS, adapter="sql")
    info = await context.switch_adapter("fr")
    assert (info.seq_len, info.adapter) == (len(IDS), "fr")
    more = IDS[:5]
    assert (await context.fill(tokens=more)).computed == len(more)
    await context.switch_adapter(None)
    adapters = [adapter_dir / "a1"] * len(IDS) + [adapter_dir / "a2"] * len(more)
    expected = dense.greedy_switching(adapters, None, IDS + more, 12)
    assert await continued(context) == expected
    spans = [(span.start, span.adapter) for span in (await context.refresh()).adapter_spans]
    assert spans == [(0, "sql"), (len(IDS), "fr"), (len(IDS + more), "")]
    shown = (await web("GET", f"/page/context/{context.id}")).json["context"]
    assert [(span["start"], span["adapter"]) for span in shown["adapter_spans"]] == spans
    await context.rewind(len(IDS))
    saved = await context.save("kept")
    assert [(span.start, span.adapter) for span in saved.adapter_spans] == spans[:2]
    opened = await client.take("kept")
    await opened.fill(tokens=more)
    assert await continued(opened) == dense.greedy_switching(adapters, adapter_dir / "a2", IDS + more, 12)
    with pytest.raises(errors.NotFound) as raised:
        await context.switch_adapter("nobody")
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    with pytest.raises(errors.InvalidArgument, match="adapter"):
        await context.switch_adapter("x" * 257)
    # What is asked for over HTTP finds nothing of a switched context, and is what it was.
    answer = await web("POST", "/v1/completions", {"prompt": IDS + more, **GREEDY, "model": "sql"})
    assert answer.json["choices"][0]["token_ids"] == dense.greedy(adapter_dir / "a1", IDS + more, 12)
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] <= len(IDS)


async def test_the_model_of_a_request_names_an_adapter(web: HttpClient, client, dense, adapter_dir) -> None:
    base = (await client.models())[0].model_id
    body = {"prompt": IDS, **GREEDY}
    answer = await web("POST", "/v1/completions", {**body, "model": "sql"})
    assert answer.error == (404, "MODEL_NOT_FOUND", "model") or answer.status == 404
    await client.load_adapter("sql", "a1")
    listed = (await web("GET", "/v1/models")).json["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [(base, None), ("sql", base)]
    assert (await web("GET", "/v1/models/sql")).json["root"] == "sql"
    for model, directory in (("sql", adapter_dir / "a1"), (base, None)):
        answer = await web("POST", "/v1/completions", {**body, "model": model})
        assert answer.status == 200, answer.text
        assert answer.json["model"] == model
        assert answer.json["choices"][0]["token_ids"] == dense.greedy(directory, IDS, 12)
    again = (await web("POST", "/v1/completions", {**body, "model": "sql"})).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "sql"}
    assert (await web("POST", "/v1/chat/completions", chat)).json["model"] == "sql"
    await client.load_adapter("sql", "a2")
    answer = await web("POST", "/v1/completions", {**body, "model": "sql"})
    assert answer.json["choices"][0]["token_ids"] == dense.greedy(adapter_dir / "a2", IDS, 12)
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await client.unload_adapter("sql")
    assert (await web("POST", "/v1/completions", {**body, "model": "sql"})).status == 404


async def test_a_response_is_of_the_model_that_it_names_whatever_made_the_one_before(web: HttpClient, client) -> None:
    """With another model the conversation is computed anew; without one it stays that of before."""
    base = (await client.models())[0].model_id
    await client.load_adapter("sql", "a1")

    async def respond(**fields: object) -> dict[str, Any]:
        body = {"input": "a", "max_output_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        answer = await web("POST", "/v1/responses", body)
        assert answer.status == 200, answer.text
        return answer.json

    def texts(response: dict[str, Any]) -> list[str]:
        return [item["content"][0]["text"] for item in response["output"]]

    def cached(response: dict[str, Any]) -> int:
        return response["usage"]["input_tokens_details"]["cached_tokens"]

    first = await respond(model=base)
    second = await respond(model="sql", input="b", previous_response_id=first["id"])
    assert (second["model"], cached(second)) == ("sql", 0)
    third = await respond(input="c", previous_response_id=second["id"])
    assert third["model"] == "sql"
    assert cached(third) >= second["usage"]["total_tokens"] - 1

    items = [{"role": "user", "content": content} for content in ("a", "b")]
    conversation = (await web("POST", "/v1/conversations", {"items": items[:1]})).json[
        "id"
    ]  # the default model reads it
    answer = await respond(model="sql", conversation=conversation, input="b")
    assert answer["model"] == "sql"
    assert texts(answer) == texts(await respond(model="sql", input=items))
    assert texts(answer) != texts(await respond(model=base, input=items))
    listed = (await web("GET", f"/v1/conversations/{conversation}/items?order=asc")).json["data"]
    removed = await web("DELETE", f"/v1/conversations/{conversation}/items/{listed[0]['id']}")
    assert removed.status == 200, removed.text
    assert (await respond(conversation=conversation, input="c"))["model"] == "sql"


async def test_a_program_names_an_adapter(client: jaxctx.aio.Client, web: HttpClient, dense, adapter_dir) -> None:
    await client.load_adapter("sql", "a1")
    session = (await web("POST", "/v1/session", {"ttl": "60s"})).json["session"]["session_id"]
    texts = []
    for model in ("sql", ""):
        output = {"max_tokens": 8, "sampling": {"temperature": 0}, "ignore_eos": True}
        request = {
            "session_id": session,
            "model_id": model,
            "template": PROMPT + "{{o}}",
            "parameters": [{"name": "o", "output": output}],
        }
        answer = await web("POST", "/v1/semantic_call", request)
        assert answer.status == 200, answer.text
        variable = answer.json["outputs"][0]["variable_id"]
        path = f"/v1/semantic_var/{variable}?session_id={session}&criterion=CRITERION_LATENCY&wait=true"
        texts.append((await web("GET", path)).json["variable"]["text"])
    assert texts[0] != texts[1]
