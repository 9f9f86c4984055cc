"""Connections that can be cut off, as a network that goes silent."""

from __future__ import annotations

import asyncio
from typing import Any


class ConnectionForwarder:
    """Forwards connections to a port while `open` is set. While it is not, nothing arrives on either side."""

    def __init__(self, port: int) -> None:
        """`port` on loopback is where connections are forwarded to."""
        self._target_port = port
        self.port = 0  # where it listens, once it has begun
        self.open = asyncio.Event()
        self.open.set()

    async def begin(self) -> int:
        """Listen on a free port of loopback, and return it."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def end(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def _connected(self, reader: Any, writer: Any) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)

        async def forward(source: Any, sink: Any) -> None:
            while data := await source.read(1 << 16):
                await self.open.wait()
                sink.write(data)
                await sink.drain()

        tasks = [asyncio.create_task(forward(*each)) for each in ((reader, far_writer), (far_reader, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, far_writer):
            each.close()
