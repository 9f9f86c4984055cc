"""The text of a context, and its end."""

from __future__ import annotations

import hashlib

import pytest

import jaxctx
from jaxctx_server.auth import Key, Role
from jaxctx_server.http.page.context import MAX_SHOWN_TOKENS
from tests.server.http.client import HttpClient

HOSTILE = "<img src=x onerror=alert(1)> & <script>alert(2)</script> 字"


async def test_the_text_of_a_context(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with await client.create(HOSTILE) as context:
        answer = await web("GET", f"/page/context/{context.id}")
        assert answer.status == 200
        assert (answer.json["text"], answer.json["skipped"]) == (HOSTILE, 0)
        assert answer.json["context"]["context_id"] == context.id
        assert answer.headers["content-type"] == "application/json"


async def test_an_empty_context_has_no_text(web: HttpClient, client: jaxctx.aio.Client) -> None:
    async with await client.create() as context:
        assert (await web("GET", f"/page/context/{context.id}")).json["text"] == ""


async def test_of_a_long_context_the_end_is_shown(
    web: HttpClient, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_SHOWN_TOKENS == 2048
    monkeypatch.setattr("jaxctx_server.http.page.context.MAX_SHOWN_TOKENS", 10)
    async with await client.create("1" * 25) as context:
        answer = (await web("GET", f"/page/context/{context.id}")).json
        assert (answer["text"], answer["skipped"]) == ("1" * 10, 15)


async def test_a_context_is_closed(web: HttpClient, client: jaxctx.aio.Client) -> None:
    context = await client.create("a")
    assert (await web("DELETE", f"/page/context/{context.id}")).status == 200
    assert (await web("DELETE", f"/page/context/{context.id}")).status == 404
    assert (await web("GET", f"/page/context/{context.id}")).status == 404


async def test_an_id_that_is_none(web: HttpClient) -> None:
    assert (await web("GET", "/page/context/-a")).error == (400, "INVALID_FIELD", "context_id")


class TestWithKeys:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]

    async def test_other_tenants_know_nothing_of_it(self, web: HttpClient, address: str) -> None:
        async with (
            jaxctx.aio.Client(address, api_key="alice", timeout_s=60) as client,
            await client.create("secret") as context,
        ):
            path = f"/page/context/{context.id}"
            assert (await web("GET", path, key="alice")).json["text"] == "secret"
            unknown = await web("GET", "/page/context/unknown", key="bob")
            for method in ("GET", "DELETE"):
                answer = await web(method, path, key="bob")
                assert answer.status == 404
                assert answer.text.replace(context.id, "unknown") == unknown.text
            assert (await web("GET", path, key="alice")).status == 200
