"""Contexts that are kept between requests: whole prompts and new turns, what is told of the cache, and who may use one.

Whole prompts go on with token ids where the outputs of the echo model are no text that tokenizes to the same again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import jaxctx
from jaxctx_server.auth import Key
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient
from tests.server.http.contextcache.harness import GREEDY, STORY, chunks_of, create, made, text_of, told, use
from tests.server.http.openai.harness import completed_alone

QUESTION = {"role": "user", "content": "Which page is shared?"}
FURTHER = {"role": "user", "content": "And which one is not?"}


async def test_a_whole_prompt_that_goes_on(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    first = await create(kept, return_token_ids=True)
    session_id, choice = first.json["session_id"], first.json["choices"][0]
    held = (await told(kept, session_id))["tokens"]
    prompt = [*choice["prompt_token_ids"], *choice["token_ids"], 65, 66, 67]
    answer = await use(kept, session_id, prompt=prompt)
    assert text_of(answer) == await completed_tokens(client, prompt)
    assert answer.headers["x-session-id"] == answer.json["session_id"] == session_id
    cache = answer.json["cache"]
    assert (cache["status"], cache["reason"], cache["missed_tokens"]) == ("hit", None, 0)
    assert cache["stored_tokens"] == cache["reused_tokens"] == held
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - 1
    assert answer.headers["x-session-cache"] == f"hit; stored={held}; reused={held}; missed=0"
    assert (await told(kept, session_id))["tokens"] == answer.json["usage"]["total_tokens"]


async def test_the_same_prompt_again(kept: HttpClient) -> None:
    """As the seed's example asks: the output that is kept is cut off."""
    session_id, first = await made(kept)
    answer = await use(kept, session_id, prompt=STORY)
    assert text_of(answer) == first
    usage = answer.json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert answer.json["cache"]["status"] == "hit"
    assert (await told(kept, session_id))["tokens"] == usage["total_tokens"]


async def test_a_prompt_that_changed_in_the_middle(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    session_id, _ = await made(kept)
    held = (await told(kept, session_id))["tokens"]
    prompt = STORY[:50] + "#" + STORY[51:] + STORY
    answer = await use(kept, session_id, prompt=prompt)
    assert text_of(answer) == await completed_alone(client, 8, prompt)
    cache = answer.json["cache"]
    assert (cache["status"], cache["reason"]) == ("partial", "prompt_changed")
    assert cache["first_difference"] == cache["reused_tokens"]
    changed_at = len((await kept("POST", "/tokenize", {"prompt": STORY[:50]})).json["tokens"])
    assert cache["first_difference"] == changed_at
    assert cache["missed_tokens"] == held - changed_at
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == changed_at
    assert f"reason=prompt_changed; stored={held}; reused={changed_at}" in answer.headers["x-session-cache"]
    assert answer.headers["x-session-cache"].endswith(f"first-difference={changed_at}")


async def test_a_prompt_that_has_nothing_in_common(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    session_id, _ = await made(kept, prompt=[5, 6, 7, 8, 9, 10])
    answer = await use(kept, session_id, prompt=[20, 21, 22])
    assert (answer.status, answer.json["cache"]["status"]) == (200, "miss")
    assert (answer.json["cache"]["reused_tokens"], answer.json["cache"]["missed_tokens"]) == (0, 3)
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await told(kept, session_id))["tokens"] == 3 + 8
    assert text_of(answer) == await completed_tokens(client, [20, 21, 22])


async def completed_tokens(client: jaxctx.aio.Client, tokens: list[int]) -> str:
    """What a context gives."""
    async with await client.create(tokens=tokens, salt="alone") as context:
        return str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True))


async def test_text_that_is_appended(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    session_id, first = await made(kept)
    held = (await told(kept, session_id))["tokens"]
    second = await use(kept, session_id, mode="append", prompt=" And then")
    third = await use(kept, session_id, mode="append", prompt=" In the end")
    async with await client.create(STORY, salt="alone") as context:
        texts = [str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True))]
        for text in (" And then", " In the end"):
            await context.fill(text)
            texts.append(str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True)))
    assert [first, text_of(second), text_of(third)] == texts
    assert second.json["cache"]["reused_tokens"] == held
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - 1
    assert (await told(kept, session_id))["version"] == 3


async def test_messages_that_are_appended(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    session_id, first = await made(kept, messages=[QUESTION])
    second = await use(kept, session_id, path="/v1/chat/completions", mode="append", messages=[FURTHER])
    async with await client.create(messages=[QUESTION], salt="alone") as context:
        texts = [str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True))]
        await context.fill(messages=[FURTHER])
        texts.append(str(await context.complete(max_tokens=8, temperature=0, ignore_eos=True)))
    assert [first, text_of(second)] == texts
    assert second.json["object"] == "chat.completion"


async def test_whole_messages(kept: HttpClient) -> None:
    session_id, first = await made(kept, messages=[QUESTION])
    messages = [QUESTION, {"role": "assistant", "content": first}, FURTHER]
    answer = await use(kept, session_id, path="/v1/chat/completions", messages=messages)
    alone = await kept("POST", "/v1/chat/completions", {**GREEDY, "messages": messages})
    assert text_of(answer) == text_of(alone)
    cache = answer.json["cache"]
    assert cache["reused_tokens"] >= cache["stored_tokens"] - 8 > 0  # the first answer may tokenize otherwise
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= cache["reused_tokens"]


async def test_only_the_prompt(kept: HttpClient) -> None:
    answer = await create(kept, max_tokens=0)
    assert answer.json["usage"]["completion_tokens"] == 0
    assert (answer.json["object"], text_of(answer)) == ("text_completion", "")
    assert answer.json["cache"]["status"] == "created"
    prompt_tokens = answer.json["usage"]["prompt_tokens"]
    session_id = answer.headers["x-session-id"]
    assert (await told(kept, session_id))["tokens"] == prompt_tokens
    then = await use(kept, session_id, mode="append", prompt=" And", max_tokens=0)
    assert (await told(kept, session_id))["tokens"] == then.json["usage"]["prompt_tokens"] > prompt_tokens


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_time_to_live_makes_one(kept: HttpClient, path: str) -> None:
    fields = {**GREEDY, "prompt": STORY} if path == "/v1/completions" else {**GREEDY, "messages": [QUESTION]}
    answer = await kept("POST", path, fields, headers={"x-session-ttl": "60"})
    context = await told(kept, answer.headers["x-session-id"])
    assert (context["ttl_s"], context["tokens"]) == (60, answer.json["usage"]["total_tokens"])
    assert answer.headers["x-session-cache"] == "created"
    plain = await kept("POST", path, fields)
    assert "session_id" not in plain.json
    assert "x-session-id" not in plain.headers


@pytest.mark.parametrize("max_tokens", [8, 0])
async def test_a_stream(kept: HttpClient, max_tokens: int) -> None:
    """The first chunk has the fields; the context is saved before the last one."""
    answer = await create(kept, stream=True, max_tokens=max_tokens)
    first, *others = chunks_of(answer)
    assert answer.headers["x-session-id"] == first["session_id"]
    assert first["cache"]["status"] == "created"
    assert all("cache" not in each for each in others)
    plain = await create(kept, max_tokens=max_tokens)
    text = "".join(each["choices"][0]["text"] for each in (first, *others))
    assert text == text_of(plain)
    session_id = first["session_id"]
    assert (await told(kept, session_id))["tokens"] == plain.json["usage"]["total_tokens"]
    streamed = await use(kept, session_id, mode="append", prompt=" And", stream=True)
    assert chunks_of(streamed)[0]["cache"]["status"] == "hit"
    assert streamed.headers["x-session-cache"].startswith("hit; ")


async def test_another_salt(kept: HttpClient) -> None:
    session_id, _ = await made(kept, cache_salt="a")
    cache = (await use(kept, session_id, prompt=STORY, cache_salt="b")).json["cache"]
    assert (cache["status"], cache["reason"], cache["reused_tokens"]) == ("miss", "salt_changed", 0)
    refused = await use(kept, session_id, mode="append", prompt="x", cache_salt="c")
    assert refused.error == (400, "INVALID_FIELD", "cache_salt")


class TestRefused:
    """And the context stays as it was."""

    @pytest.mark.parametrize(
        ("headers", "field"),
        [
            ({"x-session-id": ""}, "x-session-id"),
            ({"x-session-id": "a/b"}, "x-session-id"),
            ({"x-session-id": "a" * 65}, "x-session-id"),
            ({"x-session-ttl": "0"}, "x-session-ttl"),
            ({"x-session-ttl": "-1"}, "x-session-ttl"),
            ({"x-session-ttl": "1.5"}, "x-session-ttl"),
            ({"x-session-ttl": "soon"}, "x-session-ttl"),
            ({"x-session-ttl": "315576001"}, "x-session-ttl"),
            ({"x-session-mode": "append"}, "x-session-mode"),
            ({"x-session-id": "a", "x-session-mode": "delta"}, "x-session-mode"),
        ],
    )
    async def test_a_header(self, kept: HttpClient, headers: dict[str, str], field: str) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            content = {"completions": {"prompt": STORY}, "responses": {"input": "x"}}
            body = {"model": "echo", **content.get(path.rpartition("/v1/")[2], {"messages": [QUESTION]})}
            refused = await kept("POST", path, body, headers=headers)
            assert refused.error == (400, "INVALID_FIELD", field), path

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"n": 2}, "n"),
            ({"best_of": 2}, "best_of"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"echo": True, "logprobs": 1}, "echo"),
            ({"temperature": -1}, "temperature"),
            ({"prompt": ""}, "prompt"),
        ],
    )
    async def test_a_field(self, kept: HttpClient, fields: dict[str, Any], field: str) -> None:
        session_id, _ = await made(kept)
        before = await told(kept, session_id)
        refused = await use(kept, session_id, **{"prompt": STORY, **fields})
        assert refused.error == (400, "INVALID_FIELD", field)
        refused = await create(kept, **fields)
        assert refused.error == (400, "INVALID_FIELD", field)
        after = await told(kept, session_id)
        assert (after["version"], after["tokens"]) == (before["version"], before["tokens"])
        assert len((await kept("GET", "/v1/context")).json["data"]) == 1
        assert (await use(kept, session_id, prompt=STORY)).status == 200  # it is not in use

    async def test_an_unknown_id(self, kept: HttpClient) -> None:
        for mode in (None, "full", "append"):
            refused = await use(kept, "nobody", mode=mode, prompt=STORY)
            assert refused.error == (404, "context_not_found", None)

    async def test_a_session_of_the_client_is_no_context(self, kept: HttpClient) -> None:
        """opencode names its session in every request, two at a time, and asks for the title of the session first."""
        headers = {"x-session-id": "ses_decbd2a7effe", "x-session-affinity": "ses_decbd2a7effe"}
        body = {**GREEDY, "messages": [QUESTION]}
        answers = await asyncio.gather(
            *(kept("POST", "/v1/chat/completions", body, headers=headers) for _ in range(2)),
            kept("POST", "/v1/completions", {**GREEDY, "prompt": STORY}, headers=headers),
            kept("POST", "/v1/responses", {"model": "echo", "input": STORY, "max_output_tokens": 4}, headers=headers),
        )
        assert [answer.status for answer in answers] == [200] * 4
        assert not any("session_id" in answer.json for answer in answers)
        assert (await kept("GET", "/v1/context")).json["data"] == []
        meant = await kept("POST", "/v1/chat/completions", body, headers={**headers, "x-session-mode": "append"})
        assert meant.error == (404, "context_not_found", None)

    async def test_another_model(self, kept: HttpClient) -> None:
        session_id, _ = await made(kept)
        refused = await use(kept, session_id, prompt=STORY, model="other")
        assert refused.error == (409, "model_mismatch", "model")
        assert (await use(kept, session_id, prompt=STORY, model="")).json["model"] == "echo"

    async def test_an_id_that_is_taken(self, kept: HttpClient) -> None:
        assert (await made(kept, session_id="mine"))[0] == "mine"
        again = await create(kept, session_id="mine")
        assert again.error == (409, "context_exists", "x-session-id")
        assert (await told(kept, "mine"))["version"] == 1


async def test_a_second_use_at_the_same_time(kept: HttpClient) -> None:
    session_id, _ = await made(kept)
    reader, writer = await begin_long_stream(kept, session_id)
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [QUESTION]})):
        refused = await use(kept, session_id, path=path, **fields)
        assert refused.error == (409, "context_busy", None)
        assert int(refused.headers["retry-after"]) >= 1
    assert (await kept("DELETE", f"/v1/context/{session_id}")).error == (409, "context_busy", None)
    forked = await kept("POST", f"/v1/context/{session_id}/fork", {})
    assert forked.status == 200  # of what it was before
    assert (await use(kept, forked.json["id"], mode="append", prompt="x")).status == 200
    writer.close()
    del reader


async def test_a_client_that_leaves(kept: HttpClient) -> None:
    """The context is as it was, and free."""
    session_id, _ = await made(kept)
    before = await told(kept, session_id)
    _, writer = await begin_long_stream(kept, session_id)
    writer.close()
    async with asyncio.timeout(60):
        while (answer := await use(kept, session_id, mode="append", prompt="x", max_tokens=0)).status == 409:
            await asyncio.sleep(0.01)
    assert answer.json["cache"]["stored_tokens"] == before["tokens"]
    assert (await told(kept, session_id))["version"] == before["version"] + 1


async def test_a_client_that_leaves_while_one_is_made(kept: HttpClient) -> None:
    _, writer = await begin_long_stream(kept, "new", path="/v1/context", mode=None)
    writer.close()
    async with asyncio.timeout(60):
        while (answer := await create(kept, session_id="new")).status == 409:
            await asyncio.sleep(0.01)
    assert answer.status == 200
    assert (await told(kept, "new"))["version"] == 1


async def begin_long_stream(
    web: HttpClient, session_id: str, path: str = "/v1/completions", mode: str | None = "append"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has begun and is not read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    body = b'{"prompt": "Tell: ", "max_tokens": 1000, "ignore_eos": true, "temperature": 0, "stream": true}'
    headers = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    headers += f"content-length: {len(body)}\r\nx-session-id: {session_id}\r\n"
    headers += "" if mode is None else f"x-session-mode: {mode}\r\n"
    writer.write(headers.encode() + b"\r\n" + body)
    await reader.readuntil(b"data: ")
    return reader, writer


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants: list[Key]) -> list[Key]:
        return two_tenants

    async def test_another_tenants_is_unknown(self, web: HttpClient) -> None:
        session_id, _ = await made(web, session_id="mine", key="alice")
        for method, path, body in (
            ("GET", "/v1/context/mine", None),
            ("PATCH", "/v1/context/mine", {"ttl_s": 60}),
            ("DELETE", "/v1/context/mine", None),
            ("POST", "/v1/context/mine/fork", {}),
        ):
            of_other = await web(method, path, body, key="bob")
            assert of_other.error == (404, "context_not_found", None)
            unknown = await web(method, path.replace("mine", "none"), body, key="bob")
            assert of_other.text == unknown.text.replace("none", "mine")
        of_other = await use(web, "mine", key="bob", prompt=STORY)
        unknown = await use(web, "none", key="bob", prompt=STORY)
        assert of_other.error == (404, "context_not_found", None)
        assert of_other.text == unknown.text.replace("none", "mine")
        assert (await web("GET", "/v1/context", key="bob")).json["data"] == []
        assert (await made(web, session_id="mine", key="bob"))[0] == "mine"  # names are each tenant's own
        assert (await told(web, session_id, key="alice"))["version"] == 1
        assert (await web("GET", "/v1/context")).status == 401


async def test_another_server_that_used_it_meanwhile(kept: HttpClient, client: jaxctx.aio.Client) -> None:
    """This one finds out when it saves: the other's version stays."""
    session_id, _ = await made(kept)
    reader, writer = await begin_long_stream(kept, session_id)
    async with await client.create("x") as context:  # as the other server would, whose claims this one does not see
        await context.save(f"ctx:{session_id}", overwrite_version=1, labels={"model": "echo", "created_at": "1"})
    rest = ""
    async with asyncio.timeout(60):
        while '"error"' not in rest and "[DONE]" not in rest:
            rest = rest[-100:] + (await reader.read(1 << 16)).decode(errors="replace")
    assert '"code":"context_busy"' in rest
    assert "[DONE]" not in rest
    writer.close()
    assert (await told(kept, session_id))["version"] == 2
    answer = await use(kept, session_id, mode="append", prompt="x")
    assert answer.json["cache"]["stored_tokens"] < 5


async def test_a_context_in_use_when_a_drain_begins_is_saved(kept: HttpClient, backend: Backend) -> None:
    """The drain waits for it: an engine that drains would not save it."""
    session_id, _ = await made(kept)
    held = (await told(kept, session_id))["tokens"]
    using = asyncio.create_task(use(kept, session_id, prompt=STORY, max_tokens=200))
    while not backend.lifecycle.long_work[0].is_unfinished:
        await asyncio.sleep(0)
    await backend.lifecycle.drain()
    assert (await using).status == 200
    assert (await told(kept, session_id))["tokens"] == held - 8 + 200
