"""Health, readiness, liveness and version, in every state of a server, with and without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version

import pytest

from jaxctx.errors import Unavailable
from jaxctx_server.auth import Key
from jaxctx_server.http.ops.health import check_takes_work
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.echo import echo_text
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.harness import KEYS
from tests.server.http.client import HttpClient, http_server

READINESS = ("/health", "/readyz")


@pytest.fixture
def keys() -> list[Key] | None:
    return None


@pytest.fixture
async def lifecycle() -> AsyncIterator[ServerLifecycle]:
    lifecycle = ServerLifecycle()
    yield lifecycle
    lifecycle.stop()


@pytest.fixture
async def web(lifecycle: ServerLifecycle, keys: list[Key] | None) -> AsyncIterator[HttpClient]:
    """A server that loads."""
    async with http_server(Backend.make(lifecycle, keys, max_calls=4)) as web:
        yield web


def serving() -> ServingState:
    return ServingState.of(FakeEngine(), echo_text(), Limits.of(INFO, queue_limit=64))


async def test_a_server_that_loads_lives_and_takes_no_work(web: HttpClient) -> None:
    assert (await web("GET", "/livez")).json == {"status": "alive", "state": "loading"}
    for path in READINESS:
        answer = await web("GET", path)
        assert answer.error == (503, "NOT_SERVING", None)
        assert answer.headers["retry-after"] == "1"


async def test_a_server_that_is_ready(web: HttpClient, lifecycle: ServerLifecycle) -> None:
    lifecycle.set_ready(serving())
    assert (await web("GET", "/livez")).json == {"status": "alive", "state": "ready"}
    for path in READINESS:
        assert (await web("GET", path)).json == {"status": "ready"}


async def test_a_server_that_drains_and_one_that_has_stopped(web: HttpClient, lifecycle: ServerLifecycle) -> None:
    lifecycle.set_ready(serving())
    await lifecycle.drain()
    assert (await web("GET", "/livez")).json == {"status": "alive", "state": "draining"}
    assert (await web("GET", "/health")).error == (503, "NOT_SERVING", None)
    lifecycle.stop()
    assert (await web("GET", "/livez")).json == {"status": "alive", "state": "stopped"}
    assert (await web("GET", "/readyz")).error == (503, "NOT_SERVING", None)


async def test_a_router_without_engines_takes_no_work(lifecycle: ServerLifecycle) -> None:
    lifecycle.set_ready(ServingState.router(Limits(queue_limit=64)))
    with pytest.raises(Unavailable, match="no engine has registered"):
        check_takes_work(lifecycle)


async def test_the_version_is_that_of_the_package(web: HttpClient) -> None:
    assert (await web("GET", "/version")).json == {"version": version("jaxctx")}


@pytest.mark.parametrize("keys", [KEYS])
@pytest.mark.parametrize("path", ["/livez", "/version", "/openapi.json"])
async def test_no_key_is_needed(web: HttpClient, path: str) -> None:
    assert (await web("GET", path)).status == 200


async def test_head_has_the_headers_of_get_and_no_body(web: HttpClient) -> None:
    got, asked = await web("GET", "/livez"), await web("HEAD", "/livez")
    assert (asked.status, asked.text) == (200, "")
    for name in ("content-type", "content-length"):
        assert asked.headers[name] == got.headers[name]
    assert (await web("HEAD", "/health")).status == 503
