"""Commands of the documents, run as a reader would paste them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence

import pytest

from tests.server.http.client import HttpClient

needs_curl = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")


async def run_pasted(web: HttpClient, lines: Sequence[str]) -> list[str]:
    """What lines with curl write, each a line of its own; they run in one shell against this server, in their order."""
    pasted = "; echo\n".join([*lines, ""]).replace("localhost:8000", f"localhost:{web.port}")
    process = await asyncio.create_subprocess_exec(
        *("bash", "-e", "-c", pasted.replace("curl ", "curl -sS --fail ")),
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, error) == (0, b"")
    return output.decode().splitlines()
