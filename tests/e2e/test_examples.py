"""The examples of programs as their files stand, and the benchmark of programs with small texts."""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp import web

import jaxctx
from jaxctx import Output, Template

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    ("script", "told"), [("map_reduce.py", "in short: "), ("chain.py", ""), ("review.py", "editor: ")]
)
async def test_examples(address: str, script: str, told: str) -> None:
    path = str(SCRIPTS / "examples" / script)
    process = await asyncio.create_subprocess_exec(sys.executable, path, address, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    assert output.decode(errors="replace").startswith(told)
    assert len(output) > 10


async def test_a_program_is_drawn(address: str) -> None:
    async with jaxctx.aio.Client(address) as client, await client.create_session() as session:
        lines = Template(function="split", given={"first line": Output()})
        said = await session.call("Say <{{text}}>: {{said}}", text="more", said=Output(max_tokens=4))
        line = await session.call(lines, text=said)
        await line.output.get()
        command = (sys.executable, "-m", "jaxctx_server.cli", "draw", session.id, "--server", address)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    picture = ElementTree.fromstring(output)
    assert picture.tag.endswith("svg")
    words = ["".join(box.itertext()) for box in picture]
    assert any("said" in box and "call 1, done" in box and "on local: " in box for box in words)
    assert any("first line" in box and "split, done" in box for box in words)


@pytest.mark.parametrize("others", [(), pytest.param(("own", "peer"), marks=pytest.mark.campaign)])
async def test_the_benchmark_of_programs(
    address: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_programs", SCRIPTS / "bench_programs.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    monkeypatch.setattr(bench, "SYSTEM", "Rules.")
    asked: list[dict[str, Any]] = []
    async with openai(asked) as url:
        await bench.measure(address, 1, [0.0], **dict.fromkeys(others, url))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(bench.WORKLOADS) * (1 + len(others))
    assert all(float(line.split()[-3]) > 0 for line in lines[1:])
    assert len(asked) == len(others) * (bench.CHAIN + bench.MAPS + 1 + 2 * bench.TURNS)
    assert all(each["model"] == "m" and each["max_tokens"] == bench.TOKENS for each in asked)
    assert not others or asked[1]["prompt"].endswith("after text: ")


@asynccontextmanager
async def openai(asked: list[dict[str, Any]]) -> AsyncIterator[str]:
    """A server that answers completions, and notes what it was asked."""

    async def models(request: Any) -> Any:
        return web.json_response({"data": [{"id": "m"}]})

    async def complete(request: Any) -> Any:
        asked.append(await request.json())
        await asyncio.sleep(0.05)  # so that no ratio is 0.00, however slow this machine is today
        return web.json_response({"choices": [{"text": "text"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
