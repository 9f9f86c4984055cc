"""The paths below /v1/context: list, get, change, delete and fork; what ends by its time."""

from __future__ import annotations

import json
from typing import Any

import pytest

import jaxctx
from tests.engines import Clock
from tests.readme import commands
from tests.server.http.client import HttpClient
from tests.server.http.contextcache.harness import STORY, create, made, text_of, told, use
from tests.server.http.pasted import needs_curl, run_pasted


async def test_what_is_told_of_one(kept: HttpClient) -> None:
    answer = await create(kept, ttl=600)
    session_id = answer.json["session_id"]
    context = await told(kept, session_id)
    assert context["id"] == context["session_id"] == session_id
    assert (context["object"], context["model"], context["version"]) == ("context", "echo", 1)
    assert (context["ttl_s"], context["sliding"], context["forked_from"]) == (600, True, None)
    assert 590 < context["remaining_s"] <= 600
    assert context["tokens"] == answer.json["usage"]["total_tokens"]
    assert (context["durable"], context["tier"]) == (False, "memory")
    assert context["bytes"] > 0
    assert context["pages"] > 0
    assert 0 <= context["used_at"] - context["created_at"] <= 60
    assert 0 <= context["expires_at"] - context["used_at"] - 600 <= 2


async def test_without_a_time_to_live_it_is_an_hour(kept: HttpClient) -> None:
    session_id, _ = await made(kept, ttl=None)
    assert (await told(kept, session_id))["ttl_s"] == 3600


async def test_a_list_in_pages(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    async with await client.create("x") as context:
        await context.save("another")
        await context.save("ctx:not of this API")
    for name in ("c", "a", "b"):
        await made(kept, session_id=name, max_tokens=0)
    first = (await kept("GET", "/v1/context?limit=2")).json
    assert ([each["id"] for each in first["data"]], first["object"], first["has_more"]) == (["a", "b"], "list", True)
    rest = (await kept("GET", f"/v1/context?limit=2&page_token={first['next_page_token']}")).json
    assert ([each["id"] for each in rest["data"]], rest["has_more"], rest["next_page_token"]) == (["c"], False, "")
    assert first["data"][0] | {"remaining_s": 0} == await told(kept, "a") | {"remaining_s": 0}
    for limit in ("0", "101", "x", ""):
        assert (await kept("GET", f"/v1/context?limit={limit}")).error == (400, "INVALID_FIELD", "limit")
    assert (await kept("GET", "/v1/context/not%20of%20this%20API")).error == (404, "context_not_found", None)


async def test_delete(kept: HttpClient) -> None:
    session_id, _ = await made(kept)
    deleted = await kept("DELETE", f"/v1/context/{session_id}")
    assert (deleted.status, deleted.json["deleted"], deleted.json["id"]) == (200, True, session_id)
    for refused in (
        await kept("GET", f"/v1/context/{session_id}"),
        await kept("DELETE", f"/v1/context/{session_id}"),
        await kept("POST", f"/v1/context/{session_id}/fork", {}),
        await kept("PATCH", f"/v1/context/{session_id}", {"permanent": True}),
        await use(kept, session_id, prompt=STORY),
    ):
        assert refused.error == (404, "context_not_found", None)
    assert (await kept("GET", "/v1/context")).json["data"] == []


async def test_a_fork_goes_its_own_way(kept: HttpClient) -> None:
    session_id, _ = await made(kept)
    forked = await kept("POST", f"/v1/context/{session_id}/fork", {}, headers={"x-session-ttl": "60"})
    before = await told(kept, session_id)
    assert forked.json["forked_from"] == session_id != forked.json["id"]
    assert (forked.json["tokens"], forked.json["version"], forked.json["ttl_s"]) == (before["tokens"], 1, 60)
    one = await use(kept, session_id, mode="append", prompt=" And")
    other = await use(kept, forked.json["id"], mode="append", prompt=" And")
    assert text_of(one) == text_of(other)
    assert other.json["cache"]["status"] == "hit"
    await kept("DELETE", f"/v1/context/{session_id}")
    assert (await use(kept, forked.json["id"], mode="append", prompt=" And")).status == 200
    named = await kept("POST", f"/v1/context/{forked.json['id']}/fork", {}, headers={"x-session-id": "named"})
    assert (named.json["id"], named.json["ttl_s"]) == ("named", 60)
    again = await kept("POST", f"/v1/context/{forked.json['id']}/fork", {}, headers={"x-session-id": "named"})
    assert again.error == (409, "context_exists", "x-session-id")


class TestTime:
    """By the engine's clock, which the tests move."""

    async def test_it_ends(self, kept: HttpClient, clock: Clock) -> None:
        session_id, _ = await made(kept, ttl=100)
        clock.offset += 101
        for refused in (
            await kept("GET", f"/v1/context/{session_id}"),
            await use(kept, session_id, prompt=STORY),
            await use(kept, session_id, mode="append", prompt=STORY),
            await kept("DELETE", f"/v1/context/{session_id}"),
            await kept("PATCH", f"/v1/context/{session_id}", {"ttl_s": 60}),
            await kept("POST", f"/v1/context/{session_id}/fork", {}),
        ):
            assert refused.error == (404, "context_expired", None)
        assert (await kept("GET", "/v1/context")).json["data"] == []
        assert (await made(kept, session_id=session_id))[0] == session_id  # the id is free again

    @pytest.mark.parametrize("mode", ["full", "append"])
    async def test_every_use_starts_it_again(self, kept: HttpClient, clock: Clock, mode: str) -> None:
        session_id, _ = await made(kept, ttl=100)
        clock.offset += 60
        assert (await told(kept, session_id))["remaining_s"] < 41
        assert (await use(kept, session_id, mode=mode, prompt=STORY)).status == 200
        assert (await told(kept, session_id))["remaining_s"] > 99
        clock.offset += 60
        assert (await told(kept, session_id))["remaining_s"] < 41  # to look at it is no use
        clock.offset += 41
        assert (await kept("GET", f"/v1/context/{session_id}")).error == (404, "context_expired", None)

    async def test_a_use_may_change_it(self, kept: HttpClient) -> None:
        session_id, _ = await made(kept, ttl=100)
        await use(kept, session_id, ttl=1000, mode="append", prompt="x")
        assert (await told(kept, session_id))["ttl_s"] == 1000

    async def test_extend(self, kept: HttpClient, clock: Clock) -> None:
        session_id, _ = await made(kept, ttl=100)
        extended = await kept("PATCH", f"/v1/context/{session_id}", {"ttl_s": 1000})
        assert (extended.status, extended.json["ttl_s"], extended.json["version"]) == (200, 1000, 1)
        clock.offset += 500
        assert (await use(kept, session_id, mode="append", prompt="x")).status == 200
        clock.offset += 1001
        assert (await kept("GET", f"/v1/context/{session_id}")).error == (404, "context_expired", None)

    async def test_for_ever(self, kept: HttpClient, clock: Clock) -> None:
        session_id, _ = await made(kept, ttl=100)
        changed = (await kept("PATCH", f"/v1/context/{session_id}", {"permanent": True})).json
        assert (changed["ttl_s"], changed["expires_at"], changed["remaining_s"]) == (None, None, None)
        clock.offset += 1e6
        assert (await use(kept, session_id, mode="append", prompt="x")).status == 200
        assert (await told(kept, session_id))["ttl_s"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "ttl_s"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 1.5}, "ttl_s"),
        ({"ttl_s": True}, "ttl_s"),
        ({"ttl_s": 10**9}, "ttl_s"),
        ({"ttl_s": 60, "permanent": True}, "ttl_s"),
        ({"permanent": False}, "permanent"),
        ({"permanent": 1}, "permanent"),
        ({"pinned": True}, "pinned"),
        ({"model": "x"}, "model"),
        ([], None),
    ],
)
async def test_a_change_that_is_refused(kept: HttpClient, body: Any, field: str | None) -> None:
    session_id, _ = await made(kept, max_tokens=0)
    assert (await kept("PATCH", f"/v1/context/{session_id}", body)).error == (400, "INVALID_FIELD", field)


async def test_paths_on_which_the_headers_mean_nothing(kept: HttpClient) -> None:
    session_id, _ = await made(kept, max_tokens=0)
    for method, path, body, name in (
        ("GET", "/v1/context", None, "x-session-id"),
        ("GET", f"/v1/context/{session_id}", None, "x-session-ttl"),
        ("PATCH", f"/v1/context/{session_id}", {"ttl_s": 60}, "x-session-ttl"),
        ("DELETE", f"/v1/context/{session_id}", None, "x-session-id"),
        ("POST", f"/v1/context/{session_id}/fork", {}, "x-session-mode"),
        ("POST", "/v1/context", {"prompt": "x"}, "x-session-mode"),
        ("POST", "/v1/messages", {}, "x-session-id"),
    ):
        refused = await kept(method, path, body, headers={name: "60"})
        assert refused.status == 400, path
        assert name in refused.text


async def test_prompt_and_messages_at_once(kept: HttpClient) -> None:
    refused = await create(kept, prompt="x", messages=[{"role": "user", "content": "x"}])
    assert refused.error == (400, "INVALID_FIELD", "prompt")
    refused = await kept("POST", "/v1/context", {"model": "echo"})
    assert refused.error == (400, "INVALID_FIELD", "prompt")


@needs_curl
async def test_the_lines_of_the_docs_run_as_pasted(kept: HttpClient) -> None:
    """In one shell, in their order."""
    lines = [each for each in commands() if "localhost:8000/v1/context" in each or "x-session-id" in each]
    assert len(lines) == 9
    answers = [json.loads(line) for line in await run_pasted(kept, lines)]
    assert [each["object"] for each in answers] == [
        *("text_completion", "text_completion", "text_completion", "context", "context", "context", "list"),
        *("context.deleted", "context.deleted"),
    ]
    assert [each["cache"]["status"] for each in answers[:3]] == ["created", "hit", "hit"]
    assert (answers[3]["version"], answers[4]["forked_from"], answers[5]["ttl_s"]) == (3, "session-01", 7200)
