"""The HTTP server: the application on one address, in the event loop of the process."""

import asyncio
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from jaxctx_server.http.limits import KEEP_ALIVE_S, MAX_HEADER_BYTES, LimitedProtocol
from jaxctx_server.http.request_body import MAX_BODY_BYTES

HANDSHAKE_TIMEOUT_S = 10.0  # from the start of a connection to the end of its TLS handshake
SHUTDOWN_TIMEOUT_S = 5.0  # for answers that are on their way when all work is done
TICK_S = 1.0  # between two updates of the date that answers have
POLL_S = 0.005  # between two looks at whether connections have ended


class HttpServer:
    """Serves an ASGI application on a bound socket until it is closed."""

    def __init__(self, app: ASGIApp, bound: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """`bound` is a socket that has its address; this server closes it."""
        self._bound = bound
        self._server = QuietServer(uvicorn_config(app, tls))
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return int(self._bound.getsockname()[1])

    async def start(self) -> None:
        """Accept connections. Returns once requests are answered."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._bound]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server ended before it had started")
            await asyncio.sleep(POLL_S)

    async def close(self, grace_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Accept nothing more, and end; answers that are on their way have this time. Nothing happens twice."""
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        self._server.exit_soon()
        if self._serving is None:
            self._bound.close()
            return
        await self._serving


class QuietServer(uvicorn.Server):
    """Uvicorn's server, but signals are left to the process, and a TLS handshake has a limit of time.

    It ends as soon as there is nothing to wait for; uvicorn's would sleep for up to 0.2 seconds.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exiting = asyncio.Event()

    def exit_soon(self) -> None:
        """Begin to shut down."""
        self.should_exit = True
        self._exiting.set()

    async def main_loop(self) -> None:
        """Update the date until the server is to end."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._exiting.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let connections end what they are at, and cancel what has not ended in time."""
        for server in self.servers:
            server.close()
        for each in sockets or ():
            each.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel("the server ends")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on bound sockets."""
        await self.lifespan.startup()
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        self.servers = [
            await loop.create_server(
                self._make_protocol,
                sock=each,
                backlog=self.config.backlog,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
            )
            for each in sockets or ()
        ]
        self.started = True

    def _make_protocol(self) -> LimitedProtocol:
        """The protocol of a new connection."""
        return LimitedProtocol(self.config, self.server_state, self.lifespan.state)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(app: ASGIApp, tls: ssl.SSLContext | None = None) -> uvicorn.Config:
    """How uvicorn serves the application."""
    config = uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="websockets-sansio",
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,  # a few bytes could become many
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    if tls is not None:
        config.ssl = tls  # made by us, so that it can follow changes of its files
    return config


def bind_tcp(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address (port 0: a free one), and not listening yet. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
