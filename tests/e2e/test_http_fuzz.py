"""Mutated HTTP requests beside a stream: no status 5xx, the stream's text unchanged, and nothing is left over.

500 of them in the quick suite; the campaign sends 100,000, or as many as JAXCTX_FUZZ_REQUESTS says.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.errors import NotFound
from jaxctx.v1.snapshot_service_pb2 import DeleteSnapshotRequest, ListSnapshotsRequest
from jaxctx_server.auth import LOCAL
from jaxctx_server.http.app import make_app
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.services import Backend, make_caller
from tests.engines import Clock
from tests.server.http.client import HttpClient
from tests.server.http.mutated_requests import Sent, mutated, valid_requests

CAMPAIGN = int(os.environ.get("JAXCTX_FUZZ_REQUESTS", "100000"))
CLIENTS = 16
ANSWER_S = 0.25  # to wait for an answer, which a request that does not end never gets
LONG_AFTER_S = 400 * 86400.0  # when everything that has a time to live has ended
STATUS = re.compile(rb"(?:^|\r\n|}|\n)HTTP/1\.1 (\d{3})")
STREAM = {"prompt": "A story of pages", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
MAX_GROWTH_BYTES = 96 << 20


@pytest.fixture
def engine_config() -> EngineConfig:
    return EngineConfig(pages=256, max_batch=16, max_batch_tokens=64, max_context_tokens=1536)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Refusals of what is no HTTP are logged; pytest would keep them all."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


async def send(port: int, sent: Sent) -> list[int]:
    """The statuses of the answers that come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        size = -(-len(sent.data) // sent.pieces) or 1
        for start in range(0, len(sent.data), size):
            writer.write(sent.data[start : start + size])
            if sent.pieces > 1:
                await asyncio.sleep(0)
        async with asyncio.timeout(ANSWER_S if sent.leaves_after is None else sent.leaves_after):
            while data := await reader.read(1 << 16):
                answer += data
    except (TimeoutError, ConnectionError):
        pass  # it waits for more, or has refused what came and closed
    finally:
        writer.transport.abort()
    return [int(status) for status in STATUS.findall(answer)]


class Streams:
    """One stream after the other of the same text, as long as the requests go on."""

    def __init__(self, web: HttpClient) -> None:
        self._web = web
        self.texts: Counter[str] = Counter()

    async def text(self) -> str:
        """The text of one stream, as it comes."""
        answer = await self._web("POST", "/v1/completions", STREAM)
        assert answer.status == 200, answer.text
        *parts, end, _ = answer.text.split("\n\n")
        assert end == "data: [DONE]"
        return "".join(json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts)

    async def run(self) -> None:
        """Stream until cancelled."""
        while True:
            self.texts[await self.text()] += 1


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


async def nothing_is_left(engine: LocalEngine, files: int, tasks: int) -> None:
    """Wait until there are no contexts, no held pages, and no more files and tasks than before."""
    core = engine.core
    left: list[str] = []
    for _ in range(600):
        counts = {
            "contexts": len(core.cache.context_table),
            "pages": core.config.pages - core.cache.block_manager.available,
            "requests": int(core.has_requests()),
            "files": open_files() - files,
            "tasks": len(asyncio.all_tasks()) - tasks,
        }
        left = [f"{count} {name}" for name, count in counts.items() if count > 0]
        if not left:
            return
        await asyncio.sleep(0.05)
    names = sorted(repr(task.get_coro())[:200] for task in asyncio.all_tasks())
    contexts = [f"{context!r:.1000}" for context in core.cache.context_table]
    raise AssertionError(f"{left} left; tasks: {names}; contexts: {contexts[:5]}")


async def delete_snapshots(backend: Backend) -> None:
    """Delete those of stored responses."""
    caller, snapshots = make_caller(LOCAL, backend.clock), backend.services.snapshots
    while listed := (await snapshots.list_snapshots(caller, ListSnapshotsRequest(limit=1000))).snapshots:
        for snapshot in listed:
            with suppress(NotFound):
                await snapshots.delete_snapshot(caller, DeleteSnapshotRequest(name=snapshot.name))


async def fuzz(web: HttpClient, requests: list[bytes], rng: random.Random, count: int, statuses: Counter[int]) -> None:
    """So many mutated requests, by several clients at once. Raises AssertionError for a status 5xx."""
    numbers = iter(range(count))

    async def client() -> None:
        for _ in numbers:
            sent = mutated(rng, requests)
            for status in await send(web.port, sent):
                statuses[status] += 1
                assert status < 500, f"{status} {sent!r:.3000}"

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(client())


@pytest.mark.parametrize(
    "count", [500, pytest.param(CAMPAIGN, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)], id="campaign")]
)
async def test_mutated_requests_beside_a_stream(
    backend: Backend, engine: LocalEngine, clock: Clock, quiet: None, count: int
) -> None:
    app = make_app(backend)
    server = HttpServer(app, bind_tcp("127.0.0.1", 0))
    await server.start()
    web, statuses, rng = HttpClient(server.port), Counter[int](), random.Random(count)
    streams, requests = Streams(web), valid_requests(app)
    alone = await streams.text()
    await fuzz(web, requests, rng, min(count // 5, 5000), statuses)  # what is made once is made now
    gc.collect()
    tasks, files, memory = len(asyncio.all_tasks()), open_files(), resident_bytes()
    streaming = asyncio.create_task(streams.run())
    await fuzz(web, requests, rng, count, statuses)
    streaming.cancel()
    print(f"{sum(statuses.values())} answers: {sorted(statuses.items())}; {streams.texts.total()} streams beside them")
    assert set(streams.texts) <= {alone}
    assert count < 2000 or streams.texts[alone] > 10
    assert {200, 400, 404, 405} <= statuses.keys()
    await delete_snapshots(backend)
    clock.offset += LONG_AFTER_S
    await nothing_is_left(engine, files + 4, tasks + 4)
    gc.collect()
    growth = resident_bytes() - memory
    print(f"memory grew by {growth / 2**20:.1f} MiB from {memory / 2**20:.1f} MiB")
    assert growth < MAX_GROWTH_BYTES
    assert (await web("GET", "/health")).status == 200
    await server.close()
