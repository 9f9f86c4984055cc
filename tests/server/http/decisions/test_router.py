"""The same on a router, whose engines have the forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.router.conftest import cluster, router_cluster
from tests.e2e.router_cluster import RouterCluster, wait_until_nothing_is_held
from tests.server.http.client import Answer, HttpClient, http_server
from tests.server.http.contextcache.harness import chunks_of
from tests.server.http.decisions.harness import COLOUR, DEPTH, WHY, WIDE, answers_of, body, without_usage

__all__ = ["cluster", "router_cluster"]
PATH = "/v1/decisions"


@pytest.fixture
async def routed(router_cluster: RouterCluster) -> AsyncIterator[HttpClient]:
    async with http_server(router_cluster.backend) as web:
        yield web
    await wait_until_nothing_is_held(router_cluster)


async def ask(routed: HttpClient, asked: dict[str, Any]) -> Answer:
    """The answer, once an engine can be reached: a step that is compiled holds up heartbeats, all in this process."""
    while True:
        answer = await routed("POST", PATH, asked)
        if answer.status != 503:
            return answer


async def test_a_router_answers_as_an_engine_does(routed: HttpClient, web: HttpClient) -> None:
    asked = body(WIDE, COLOUR, DEPTH, WHY, {**WHY, "regex": "[ab]{3}"})
    alone = await web("POST", PATH, asked)
    answer = await ask(routed, asked)
    assert without_usage(answers_of(answer)) == without_usage(answers_of(alone))
    assert answer.json["usage"]["input_tokens"] == alone.json["usage"]["input_tokens"]
    *events, last = chunks_of(await ask(routed, {**asked, "stream": True}))
    told = [each["answer"] for each in sorted(events, key=lambda each: each["index"])]
    assert without_usage(told) == without_usage(answers_of(alone))
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_errors_name_the_question(routed: HttpClient) -> None:
    wrong = body(WIDE, {**WHY, "regex": "[ab"})
    assert (await ask(routed, wrong)).error == (400, "INVALID_FIELD", "questions[1].regex")
    too_long = body(WIDE, {**WIDE, "instructions": "~" * 7000})
    assert (await ask(routed, too_long)).error == (400, "INVALID_FIELD", "questions[1].instructions")


async def test_who_leaves_a_router_leaves_nothing(routed: HttpClient) -> None:
    """Once the first answer has come, and while texts still do."""
    endless = {**WHY, "max_tokens": 1000, "logit_bias": {"256": -100}}
    await ask(routed, body(WIDE, {**WHY, "max_tokens": 2}))
    data = json.dumps(body(*[endless] * 6, WIDE, stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", routed.port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%b" % (len(data), data))
    event = (await reader.readuntil(b"}}\n\n")).decode()
    assert '"index":6' in event
    writer.close()
