"""An HTTP client of tests, and HTTP servers for it: in the event loop of a test, or as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from jaxctx_server.http.app import HttpAccess, make_app
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.services import Backend

JSON_HEADERS = {"content-type": "application/json"}
GREEDY = {"sampling": {"temperature": 0}, "ignore_eos": True}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> tuple[int, str, str | None]:
        """Status, code and field of a request that was refused."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json["error"]) == {"message", "type", "code", "param"}
        return self.status, self.json["error"]["code"], self.json["error"]["param"]


class HttpClient:
    """Makes requests of a server on loopback."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __call__(
        self, method: str, path: str, body: Any = None, *, key: str = "", headers: dict[str, str] | None = None
    ) -> Answer:
        sent = dict(JSON_HEADERS) if body is not None else {}
        if key:
            sent["authorization"] = f"Bearer {key}"
        sent.update(headers or {})
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()

        def ask() -> Answer:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                connection.request(method, path, data, sent)
                response = connection.getresponse()
                received = {name.lower(): value for name, value in response.getheaders()}
                return Answer(response.status, received, response.read().decode())
            finally:
                connection.close()

        return await asyncio.to_thread(ask)

    async def call(self, session: str, template: str, **parameters: Any) -> dict[str, str]:
        """Ids of the outputs of a semantic call, by name."""
        values = [{"name": name, **value} for name, value in parameters.items()]
        body = {"session_id": session, "template": template, "parameters": values}
        answer = await self("POST", "/v1/semantic_call", body)
        assert answer.status == 200, answer.text
        return {each["name"]: each["variable_id"] for each in answer.json["outputs"]}


def output_of(tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A parameter that is an output of a semantic call."""
    return {"output": {"max_tokens": tokens, **GREEDY, **fields}}


@asynccontextmanager
async def http_server(
    backend: Backend, access: HttpAccess | None = None, wall_time: Callable[[], float] = time.time
) -> AsyncIterator[HttpClient]:
    """An HTTP server of a backend, in the event loop of the test."""
    app = make_app(backend, access, wall_time=wall_time)
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    try:
        yield HttpClient(server.port)
    finally:
        await app.state.frontend.end()
        await server.close()
