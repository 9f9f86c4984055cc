"""`jaxctx-serve http` as a process."""

from __future__ import annotations

import asyncio
import sys

from jaxctx_server.errors import ADDRESS
from tests.server.http.client import http_command


async def test_the_command(address: str) -> None:
    async with http_command(address) as web:
        assert (await web("GET", "/v1/session")).json == {"sessions": [], "next_page_token": ""}
        assert (await web("GET", "/v1/models")).json["data"][0]["id"] == "echo"
        assert (await web("GET", "/")).headers["content-type"].startswith("text/html")


async def test_a_port_that_is_in_use(address: str) -> None:
    port = address.rpartition(":")[2]
    command = (sys.executable, "-m", "jaxctx_server.cli", "http", "--server", address, "--http-port", port)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        _, error = await process.communicate()
    assert process.returncode == ADDRESS
    assert error.decode().splitlines()[-1] == f"jaxctx-serve: --http-port: cannot listen on 127.0.0.1:{port}"
