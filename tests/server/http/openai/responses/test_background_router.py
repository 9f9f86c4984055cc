"""Responses in the background on a router, whose engines have the contexts and what is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.router.conftest import cluster, router_cluster
from tests.e2e.router_cluster import RouterCluster, wait_until_nothing_is_held
from tests.server.http.client import http_server
from tests.server.http.openai.harness import openai_client
from tests.server.http.openai.responses.test_background import dicts, finished, followed

__all__ = ["cluster", "router_cluster"]
GREEDY: Any = {"model": "echo", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
LONG: Any = GREEDY | {"max_output_tokens": 1000}


@pytest.fixture
async def routed(router_cluster: RouterCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with http_server(router_cluster.backend) as web, openai_client(web) as api:
        yield api
    await wait_until_nothing_is_held(router_cluster)


async def test_they_are_made_on_any_engine(routed: openai.AsyncOpenAI) -> None:
    for text in ("One", "Two"):
        each = await routed.responses.create(input=text, background=True, **GREEDY)
        ended = await finished(routed, each.id)
        assert (ended.status, ended.usage.output_tokens) == ("incomplete", 8)
        events = await followed(routed, each.id, -1)
        assert dicts(events)[-1]["response"] == ended.to_dict()
        more = await routed.responses.create(input="And?", previous_response_id=each.id, background=True, **GREEDY)
        more = await finished(routed, more.id)
        assert more.usage is not None
        assert more.usage.input_tokens_details.cached_tokens >= ended.usage.total_tokens - 1


async def test_one_that_is_cancelled(routed: openai.AsyncOpenAI) -> None:
    begun = await routed.responses.create(input="One", background=True, **LONG)
    cancelled = await routed.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert (await routed.responses.retrieve(begun.id)).to_dict() == cancelled.to_dict()


async def test_a_drain_waits_for_it(routed: openai.AsyncOpenAI, router_cluster: RouterCluster) -> None:
    begun = await routed.responses.create(input="One", background=True, **(GREEDY | {"max_output_tokens": 200}))
    await router_cluster.lifecycle.drain()
    ended = await routed.responses.retrieve(begun.id)
    assert (ended.status, ended.usage and ended.usage.output_tokens) == ("incomplete", 200)
