"""Requests of the context cache."""

from __future__ import annotations

import json
from typing import Any

from tests.server.http.client import Answer, HttpClient

STORY = "Tell a story of a page that is shared by many, and of one that is not. " * 3
GREEDY: dict[str, Any] = {"model": "echo", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


async def create(
    web: HttpClient, *, ttl: int | None = 600, session_id: str = "", key: str = "", **fields: Any
) -> Answer:
    """POST /v1/context, with STORY as its prompt unless the fields say otherwise."""
    headers = ({} if ttl is None else {"x-session-ttl": str(ttl)}) | (
        {"x-session-id": session_id} if session_id else {}
    )
    content = {} if {"prompt", "messages"} & fields.keys() else {"prompt": STORY}
    return await web("POST", "/v1/context", {**GREEDY, **content, **fields}, headers=headers, key=key)


async def made(web: HttpClient, **fields: Any) -> tuple[str, str]:
    """The session id of a new context, and the text of its output."""
    answer = await create(web, **fields)
    assert answer.status == 200, answer.text
    return answer.headers["x-session-id"], text_of(answer)


async def use(
    web: HttpClient,
    session_id: str,
    *,
    path: str = "/v1/completions",
    mode: str | None = None,
    key: str = "",
    ttl: int | None = None,
    **fields: Any,
) -> Answer:
    """A request that continues a context."""
    headers = {"x-session-id": session_id}
    if mode is not None:
        headers["x-session-mode"] = mode
    if ttl is not None:
        headers["x-session-ttl"] = str(ttl)
    return await web("POST", path, {**GREEDY, **fields}, headers=headers, key=key)


def text_of(answer: Answer) -> str:
    """The text of the one output of completions or chat."""
    assert answer.status == 200, answer.text
    choice = answer.json["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def chunks_of(answer: Answer) -> list[Any]:
    """The events of a stream, which has ended as it should."""
    *events, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def told(web: HttpClient, session_id: str, key: str = "") -> Any:
    """GET /v1/context/{session_id}."""
    answer = await web("GET", f"/v1/context/{session_id}", key=key)
    assert answer.status == 200, answer.text
    return answer.json
