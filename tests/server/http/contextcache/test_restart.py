"""A kept context in a store: another server finds it, and takes its pages from there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.factory import ServedModel
from tests.e2e.conftest import backend_of
from tests.engines import Clock, MakeEngine
from tests.server.http.client import HttpClient, http_server
from tests.server.http.contextcache.harness import STORY, create, made, text_of, told, use

Start = Callable[[str], AbstractAsyncContextManager[HttpClient]]


@pytest.fixture
def start(
    make_engine: MakeEngine, engine_config: EngineConfig, echo_served: ServedModel, clock: Clock, tmp_path: Path
) -> Start:
    """Servers on one store, one after the other; a device of another name has nothing in its pages."""

    @asynccontextmanager
    async def server(device: str = "", revision: str = "") -> AsyncIterator[HttpClient]:
        served = replace(echo_served, revision=revision) if revision else echo_served
        engine = make_engine(engine_config, served, store=str(tmp_path / "store"), whole=False, device=device)
        async with (
            backend_of(engine, engine_config, clock) as backend,
            http_server(backend, wall_time=clock.wall) as web,
        ):
            yield web

    return server


@pytest.mark.parametrize("mode", ["full", "append"])
async def test_it_is_loaded_from_the_store(start: Start, mode: str) -> None:
    async with start("") as web:
        first = await create(web, session_id="mine", return_token_ids=True)
        forked = await web("POST", "/v1/context/mine/fork", {}, headers={"x-session-id": "other"})
        assert forked.json["durable"]
        held = await told(web, "mine")
        assert (held["durable"], held["tier"]) == (True, "store")
        choice = first.json["choices"][0]
        more = [65, 66, 67]
        prompt = more if mode == "append" else [*choice["prompt_token_ids"], *choice["token_ids"], *more]
        expected = text_of(await use(web, "other", mode=mode, prompt=prompt))
    async with start("second") as web:
        assert await told(web, "mine") | {"remaining_s": 0} == held | {"remaining_s": 0}
        answer = await use(web, "mine", mode=mode, prompt=prompt)
        assert text_of(answer) == expected
        cache = answer.json["cache"]
        assert (cache["status"], cache["reason"], cache["recomputed_tokens"]) == ("hit", None, 0)
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= held["tokens"] - 1
        assert (await told(web, "mine"))["version"] == 2
        assert [each["id"] for each in (await web("GET", "/v1/context")).json["data"]] == ["mine", "other"]


async def test_one_that_expired_before_is_unknown(start: Start, clock: Clock) -> None:
    """It cannot be known any more that it was there."""
    async with start("") as web:
        await made(web, session_id="mine", ttl=100)
    clock.offset += 101
    async with start("") as web:
        assert (await web("GET", "/v1/context/mine")).error == (404, "context_not_found", None)


async def test_another_revision_of_the_model(start: Start) -> None:
    """Its pages mean nothing to this one: a whole prompt is computed, and new turns are refused."""
    async with start("") as web:
        await made(web, session_id="mine")
        held = await told(web, "mine")
    async with start("third", "of tomorrow") as web:
        refused = await use(web, "mine", mode="append", prompt="x")
        assert refused.error == (409, "model_mismatch", None)
        answer = await use(web, "mine", prompt=STORY)
        cache = answer.json["cache"]
        assert (cache["status"], cache["reason"], cache["reused_tokens"]) == (
            "partial",
            "model_revision_changed",
            held["tokens"] - 8,
        )
        assert "partial; reason=model_revision_changed; " in answer.headers["x-session-cache"]
        assert cache["recomputed_tokens"] >= held["tokens"] - 1
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await use(web, "mine", mode="append", prompt="x")).status == 200  # of this revision by now
