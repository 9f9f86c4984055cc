"""`jaxctx-serve http`: the HTTP application on a port of this machine, until a signal."""

import signal
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxctx_server.config import HttpConfig
from jaxctx_server.errors import ADDRESS, OK, StartError
from jaxctx_server.http.app import make_app
from jaxctx_server.http.limits import KEEP_ALIVE_S, MAX_HEADER_BYTES, LimitedProtocol

HOST = "127.0.0.1"
SHUTDOWN_TIMEOUT_S = 5  # for streams that are being read when a signal ends the process


def serve_http(config: HttpConfig) -> int:
    """Serve until a signal; returns the exit status. Raises StartError if the port cannot be listened on."""
    server = uvicorn.Server(uvicorn_config(make_app(config.server), config.http_port))
    # When it has shut down, uvicorn raises the signal that it got once more. As KeyboardInterrupt it ends here.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            server.run()
    except SystemExit as error:  # uvicorn's, after it has logged why
        raise StartError(f"--http-port: cannot listen on {HOST}:{config.http_port}", ADDRESS) from error
    if not server.started:
        raise StartError("the HTTP server could not be started", ADDRESS)
    return OK


def uvicorn_config(app: ASGIApp, port: int, **settings: Any) -> uvicorn.Config:
    """How uvicorn serves the application; port 0 picks a free one, which uvicorn logs."""
    return uvicorn.Config(
        app,
        host=HOST,
        port=port,
        http=LimitedProtocol,
        ws="none",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **settings,
    )
