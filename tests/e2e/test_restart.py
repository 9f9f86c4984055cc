"""What was acknowledged survives SIGKILL of the real server, and nothing else is ever read."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxctx
from jaxctx import errors
from tests.e2e.echo_contexts import THOUSAND, greedy, oracle
from tests.e2e.server_processes import ECHO, SMALL, Server
from tests.readme import example

PROMPT = THOUSAND[:200]
ATTACHED = bytes(range(256)) * (16 << 10)  # 4 MiB, the most there may be


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def start(store: Path, compile_cache: Path) -> Iterator:
    servers: list[Server] = []

    def begin(*more: str) -> Server:
        servers.append(Server(*SMALL, "--store", str(store), *more, cache=compile_cache, command=ECHO))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


def killed(server: Server) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.communicate()


async def test_what_was_saved_survives_the_servers_death(start, store) -> None:
    server = start()
    async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
        context = await client.create()
        await context.fill(tokens=PROMPT)
        saved = await context.save("kept", durable=True, labels={"a": "b"}, attachment=ATTACHED)
        assert saved.attachment_bytes == len(ATTACHED)
        await context.save("lost")
    killed(server)

    server = start()
    async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
        assert [each.name async for each in client.snapshots()] == ["kept"]
        assert (await client.snapshot("kept")).labels == saved.labels
        content = await client.snapshot_content("kept", include_tokens=True)
        assert (content.attachment, content.snapshot.labels) == (ATTACHED, saved.labels)
        assert content.tokens is not None
        assert list(content.tokens.ids) == list(PROMPT)
        context = await client.open("kept")
        opened = context.opened
        assert opened is not None
        assert (opened.resident, opened.restored, opened.computed) == (0, 200, 0)
        assert (context.info.committed_pages, context.info.working_tokens) == (12, 8)
        assert await context.tokens() == PROMPT
        assert await greedy(context, 5) == oracle(PROMPT, 5)
        again = await client.open("kept")
        assert again.opened is not None
        assert again.opened.resident == 192
    killed(server)

    (pack,) = (each for each in (store / "packs").iterdir() if each.read_bytes() != ATTACHED)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    server = start()
    async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
        context = await client.open("kept")
        assert context.opened is not None
        assert 0 < context.opened.computed < 200, "the damaged page is rebuilt from its tokens"
        assert await greedy(context, 5) == oracle(PROMPT, 5)
    killed(server)


@pytest.mark.slow
async def test_a_kill_during_saves_leaves_the_old_or_the_new(start) -> None:
    """Saves one version after the other until the server dies, then looks at what there is."""
    acknowledged = 0
    for pause_s in (0.02, 0.05):
        server = start()
        async with jaxctx.aio.Client(server.address, timeout_s=20) as client:
            context = await client.create()
            await context.fill(tokens=PROMPT)

            async def save(context=context) -> None:
                nonlocal acknowledged
                while True:
                    await context.fill(tokens=[acknowledged % 256] * 3)
                    version = await context.save("a", durable=True, overwrite_version=acknowledged or None)
                    acknowledged = version.version

            saving = asyncio.create_task(save())
            while not acknowledged:
                await asyncio.sleep(0.01)
            await asyncio.sleep(pause_s)
            killed(server)
            with pytest.raises(errors.JaxctxError):
                await saving
        server = start()
        async with jaxctx.aio.Client(server.address, timeout_s=60) as client:
            latest = (await client.snapshot("a")).version
            assert latest in (acknowledged, acknowledged + 1)
            for version in await client.history("a"):
                context = await client.open("a", version=version.version)
                assert context.opened is not None
                assert context.opened.computed == 0
                tokens = await context.tokens()
                assert tokens[:200] == PROMPT
                assert await greedy(context, 3) == oracle(tokens, 3)
            acknowledged = latest
        killed(server)


@pytest.mark.slow
def test_the_readmes_save_kill_open_runs_as_pasted(store, compile_cache) -> None:
    said = []
    for name in ("save", "open"):
        server = Server(*SMALL, "--store", str(store), cache=compile_cache)
        try:
            code = example(name).replace("127.0.0.1:50051", server.address)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
        finally:
            killed(server)
    tokens = int(re.search(r"version 1: (\d+) tokens", said[0])[1])
    assert f"{tokens - 1} tokens restored, 0 computed" in said[1]
