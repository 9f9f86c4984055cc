"""An HTTP client of tests, and HTTP servers for it: in the event loop of a test, or as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn

from jaxctx_server.http.app import make_app
from jaxctx_server.http.serve import uvicorn_config

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
async def http_server(server: str) -> AsyncIterator[HttpClient]:
    """An HTTP server in front of a gRPC server, in the event loop of the test."""
    web = uvicorn.Server(uvicorn_config(make_app(server), 0, log_config=None))
    serving = asyncio.create_task(web.serve())
    while not web.started:
        await asyncio.sleep(0.01)
    yield HttpClient(web.servers[0].sockets[0].getsockname()[1])
    web.should_exit = True
    await serving


@asynccontextmanager
async def http_command(server: str) -> AsyncIterator[HttpClient]:
    """`jaxctx-serve http` in front of a gRPC server, as a process."""
    command = (sys.executable, "-m", "jaxctx_server.cli", "http", "--server", server, "--http-port", "0")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while not (found := re.search(rb"http://127\.0\.0\.1:(\d+)", await process.stderr.readline())):
            assert process.returncode is None
        yield HttpClient(int(found[1]))
        process.terminate()
        await process.communicate()
        assert process.returncode == 0
