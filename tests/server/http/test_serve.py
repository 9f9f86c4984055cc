"""`jaxctx-serve http` as a process."""

from __future__ import annotations

from tests.server.http.client import http_command


async def test_the_command(address: str) -> None:
    async with http_command(address) as web:
        assert (await web("GET", "/v1/session")).json == {"sessions": [], "next_page_token": ""}
        assert (await web("GET", "/v1/models")).json["data"][0]["id"] == "echo"
        assert (await web("GET", "/")).headers["content-type"].startswith("text/html")
