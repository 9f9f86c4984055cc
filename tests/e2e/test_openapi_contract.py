"""The OpenAPI document against a real server: schemathesis makes requests of it, valid and not, alone and in sequences.

No response may have a status 5xx, and each must have a status, a type of content, headers and a body that the document
has for it. What the document does not allow must be refused, without a key too. It runs for `JAXCTX_CONTRACT_S` seconds
(90), with the key of one tenant; the seed is new each time, and is printed if something is found.

    .venv/bin/pip install -e '.[contract]' && .venv/bin/python -m pytest -m contract tests/e2e/test_openapi_contract.py
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from jaxctx_server.auth import Key
from jaxctx_server.services import Backend
from tests.e2e.conftest import TENANTS
from tests.server.http.client import HttpClient, http_server

HERE = Path(__file__).parent / "openapi_contract"
SECONDS = int(os.environ.get("JAXCTX_CONTRACT_S", "90"))

pytestmark = pytest.mark.contract
pytest.importorskip("schemathesis")


@pytest.fixture
def keys(two_tenants: list[Key]) -> list[Key]:
    return two_tenants


async def set_all_variables(web: HttpClient) -> None:
    """Set or ask for each variable that a test has made, again and again: others wait for it until they give up."""
    while True:
        await asyncio.sleep(1)
        for session in (await web("GET", "/v1/session", key=TENANTS[0])).json["sessions"]:
            query = f"session_id={session['session_id']}"
            listed = (await web("GET", f"/v1/semantic_var?{query}", key=TENANTS[0])).json
            for variable in listed.get("variables", ()):
                if variable["state"] == "VARIABLE_STATE_UNSET":
                    path = f"/v1/semantic_var/{variable['variable_id']}"
                    body = {"session_id": session["session_id"], "text": "set"}
                    if (await web("PUT", path, body, key=TENANTS[0])).status != 200:  # a call makes it
                        await web("GET", f"{path}?{query}&criterion=CRITERION_LATENCY", key=TENANTS[0])


async def test_every_response_is_as_the_document_says(backend: Backend, tmp_path: Path) -> None:
    async with http_server(backend) as web:
        setting = asyncio.create_task(set_all_variables(web))
        command = [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"http://127.0.0.1:{web.port}/openapi.json"),
            *("--max-time", str(SECONDS)),
        ]
        environment = {**os.environ, "JAXCTX_CONTRACT_KEY": TENANTS[0]}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=tmp_path
        )
        output, _ = await process.communicate()
        setting.cancel()
    print(output.decode())
    assert process.returncode == 0, output.decode()[-20_000:]
