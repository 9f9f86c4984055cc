"""One run of a server: listen, load, serve, drain, stop.

It listens before it loads: a port in use shows at once, and probes see a live server that is not ready yet.
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, TypeVar

import grpc
from starlette.types import ASGIApp

from jaxctx.errors import JaxctxError
from jaxctx.programs.dispatcher import Policy
from jaxctx_server.addresses import (
    address_error,
    check_host,
    is_beyond_loopback,
    tcp_address,
    tcp_text,
    unix_address,
)
from jaxctx_server.auth import Key
from jaxctx_server.banner import banner
from jaxctx_server.cluster import ALONE, Cluster, leave_router, register_with_router
from jaxctx_server.config import ServeConfig
from jaxctx_server.errors import ADDRESS, CUT_OFF, DEFECT, INTERRUPTED, OK, StartError
from jaxctx_server.grpc.server import make_server
from jaxctx_server.http.app import ANY_HOST, LOOPBACK_NAMES, HttpAccess, make_app
from jaxctx_server.http.server import HttpServer, bind_tcp
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ProgramSettings, ServerLifecycle, ServingState
from jaxctx_server.progress import Progress, progress_shown
from jaxctx_server.services import Backend
from jaxctx_server.tls import TlsStore
from jaxctx_server.validate import Limits

if TYPE_CHECKING:
    from jaxctx.engine.engine import LocalEngine
    from jaxctx.model.text import ModelText
    from jaxctx_server.otel import OtelTracer

log = logging.getLogger("jaxctx.server")
LAST_MESSAGES_S = 5.0  # for messages that are on their way when all work is done
LEAVING_SHARE = 0.9  # of the drain's time, for an engine to leave its router
T = TypeVar("T")
Load: TypeAlias = "Callable[[ServeConfig, Progress], tuple[LocalEngine, ModelText]]"


async def serve(
    config: ServeConfig,
    keys: KeyStore | Sequence[Key] | None,
    load: Load,
    stop: asyncio.Event,
    *,
    cluster: Cluster = ALONE,
    tls: TlsStore | None = None,
    out: TextIO = sys.stdout,
    err: TextIO = sys.stderr,
) -> int:
    """Serve until `stop` is set and work is drained; returns the exit status. Raises StartError for what the user can
    correct. `tls` None: without TLS.

    If `stop` is set while loading, returns INTERRUPTED with the loading thread still running: the caller is to end the
    process before the event loop, which would wait for that thread.
    """
    server = Server(config, KeyStore.of(keys), cluster, tls, out, err)
    await server.listen()
    try:
        return await server.run(load, stop)
    finally:
        await server.close()


class Server:
    """One run of a server, on the event loop."""

    def __init__(
        self,
        config: ServeConfig,
        keys: KeyStore,
        cluster: Cluster,
        tls: TlsStore | None,
        out: TextIO,
        err: TextIO,
    ) -> None:
        self._config = config
        self._keys = keys
        self._cluster = cluster
        self._tls = tls
        self._out = out
        self._err = err
        self._started = time.monotonic()
        self._lifecycle = ServerLifecycle()
        self._tracer = make_tracer(config)
        self._backend = Backend.make(
            self._lifecycle,
            keys,
            max_calls=config.max_calls,
            cluster=cluster,
            is_router=config.role == "router",
            role=config.role,
            tracer=self._tracer,
        )
        self._grpc = make_server(self._backend)
        self._http: HttpServer | None = None  # None: not served
        self._addresses: list[str] = []  # of gRPC, with their real ports
        self._watching_keys: asyncio.Task[None] | None = None
        self._watching_tls: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[None] | None = None  # with the router

    async def listen(self) -> None:
        """Accept calls, which are refused until the server is ready. Raises StartError for an address that is taken."""
        has_keys = self._keys.keys is not None
        self._addresses = bind(self._grpc, self._config, keys=has_keys, tls=self._tls)
        if self._config.serves_http:
            access = http_access(self._config, keys=has_keys)
            context = None if self._tls is None else self._tls.ssl_context()
            self._http = HttpServer(self._make_app(access), bind_http(self._config), context)
            await self._http.start()
        await self._grpc.start()
        self._watching_keys = asyncio.create_task(self._keys.watch())
        if self._tls is not None:
            self._watching_tls = asyncio.create_task(self._tls.watch())

    def _make_app(self, access: HttpAccess) -> ASGIApp:
        """The application of HTTP."""
        return make_app(
            self._backend,
            access,
            response_ttl_s=self._config.response_ttl_s,
            conversation_ttl_s=self._config.conversation_ttl_s,
        )

    async def run(self, load: "Load", stop: asyncio.Event) -> int:
        """Load, serve until `stop` is set or the engine fails, drain. Returns the exit status."""
        if self._config.role == "router":
            limits = Limits(queue_limit=self._config.queue_limit)
            self._lifecycle.set_ready(ServingState.router(limits, settings=program_settings(self._config)))
            self._print_banner(None)
            return await self._serve(None, stop)
        with progress_shown(self._err) as progress:
            loaded = await result_unless(stop, asyncio.to_thread(load, self._config, progress))
        if loaded is None:
            return INTERRUPTED
        engine, text = loaded
        self._lifecycle.set_ready(self._state_of(engine, text))
        self._print_banner(engine)
        if self._config.router is not None:
            self._registering = asyncio.create_task(
                register_with_router(self._config.router, self._cluster, self._port())
            )
        status = await self._serve(engine, stop)
        await asyncio.to_thread(engine.stop)
        return status

    async def close(self) -> None:
        """End everything at once; nothing happens to what has ended."""
        for task in (self._watching_keys, self._watching_tls, self._registering):
            if task is not None:
                task.cancel()
        self._lifecycle.stop()
        await self._stop_transports(0)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._config.unix_socket is not None:
            self._config.unix_socket.unlink(missing_ok=True)

    async def _serve(self, engine: "LocalEngine | None", stop: asyncio.Event) -> int:
        """Serve until `stop` is set or the engine fails, then drain and stop. Returns the exit status."""
        failure = None if engine is None else await result_unless(stop, engine.failure())
        if failure is None:
            await stop.wait()
            drained = await drain(self._lifecycle, self._config.drain_timeout_s)
            status = OK if drained else CUT_OFF
        else:
            log.critical("the engine failed: %s", failure)
            status = DEFECT  # a supervisor then restarts the process
        self._lifecycle.stop()
        await self._stop_transports(0 if status == CUT_OFF else LAST_MESSAGES_S)
        return status

    async def _stop_transports(self, grace_s: float) -> None:
        """Accept nothing more; messages that are on their way have this time."""
        await asyncio.gather(self._grpc.stop(grace_s), *([] if self._http is None else [self._http.close(grace_s)]))

    def _state_of(self, engine: "LocalEngine", text: "ModelText") -> ServingState:
        """What a server of this engine serves. An engine of a router that has a store drains by leaving that first."""
        limits = Limits.of(engine.info, queue_limit=self._config.queue_limit)
        settings = program_settings(self._config)
        state = ServingState.of(engine, text, limits, settings=settings)
        if not self._config.router or not self._config.store:
            return state
        return replace(state, drain=partial(self._leave_and_drain, self._config.router, state))

    async def _leave_and_drain(self, router: str, state: ServingState) -> None:
        """Have the router move the contexts to other engines, then drain; what runs here meanwhile has the rest of the
        drain's time, too.
        """
        timeout_s = LEAVING_SHARE * self._config.drain_timeout_s
        await leave_router(router, self._cluster, self._port(), timeout_s)
        await state.drain()

    def _port(self) -> int:
        """The TCP port that it listens on."""
        return int(self._addresses[0].rpartition(":")[2])

    def _print_banner(self, engine: "LocalEngine | None") -> None:
        text = banner(
            None if engine is None else engine.info,
            self._addresses,
            None if self._http is None else http_url(self._config.host, self._http.port, tls=self._tls is not None),
            self._keys.keys,
            time.monotonic() - self._started,
            tls=None if self._tls is None else self._tls.name,
            is_readable=self._tls is None and is_beyond_loopback(self._config.host),
            context_reason="" if engine is None else engine.context_reason,
            weights="" if engine is None else engine.weights_in_words,
            sizes="" if engine is None else engine.sizes_in_words,
            host_tier="" if engine is None else engine.host_tier_in_words,
            adapters="" if engine is None else engine.adapters_in_words,
            draft="" if engine is None else engine.draft_in_words,
            attention=None if engine is None else engine.attention,
        )
        print(text, file=self._out, flush=True)


def make_tracer(config: ServeConfig) -> "OtelTracer | None":
    """What traces calls; None without --otlp-endpoint. Raises StartError for a bad URL or without OpenTelemetry."""
    if config.otlp_endpoint is None:
        return None
    try:
        from jaxctx_server.otel import otlp_tracer
    except ImportError as error:
        raise StartError("--otlp-endpoint: needs OpenTelemetry: pip install 'jaxctx[otel]'") from error
    ports = {"grpc": config.grpc_port, "http": config.http_port_or_default}
    return otlp_tracer(config.otlp_endpoint, config.host, ports)


def program_settings(config: ServeConfig) -> ProgramSettings:
    """The settings of programs."""
    policy = Policy(
        task_groups=config.dispatch_task_groups,
        same_prefix=config.dispatch_same_prefix,
        cached_prefix=config.dispatch_cached_prefix,
        least_impact=config.dispatch_least_impact,
        app_order=config.dispatch_app_order,
    )
    return ProgramSettings(policy=policy, prefix_timeout_s=config.prefix_timeout_s, heartbeat_s=config.heartbeat_s)


def bind(server: grpc.aio.Server, config: ServeConfig, *, keys: bool, tls: TlsStore | None = None) -> list[str]:
    """Give the server its addresses; returns them with their real ports. With `tls` those of TCP use it; a Unix socket
    never does, its file says who may use it.
    """
    check_host(config.host, keys=keys, client_certificates=tls is not None and tls.wants_client_certificates)
    wanted = [tcp_address(config.host, config.grpc_port)]
    if config.unix_socket is not None:
        wanted.append(unix_address(config.unix_socket))
    bound = []
    for address in wanted:
        try:
            if tls is None or address.startswith("unix:"):
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:  # another thread was quicker
            raise StartError(f"cannot listen on {address}", ADDRESS) from error
        bound.append(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
    return bound


def bind_http(config: ServeConfig) -> socket.socket:
    """The bound socket of HTTP. Raises StartError for an address that is taken."""
    try:
        return bind_tcp(config.host, config.http_port_or_default)
    except OSError as error:
        raise address_error("--http-port", tcp_text(config.host, config.http_port_or_default), error) from error


def http_access(config: ServeConfig, *, keys: bool) -> HttpAccess:
    """Which host names and origins browsers may use. With keys a page from elsewhere can do nothing without one; with
    TLS a browser refuses the names that the certificate does not have.
    """
    hosts = config.allowed_hosts or (
        ANY_HOST if keys or config.tls_cert is not None else (*LOOPBACK_NAMES, config.host)
    )
    return HttpAccess(allowed_hosts=hosts, cors_origins=config.cors_origins)


def http_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of the HTTP server, as its user would type it."""
    return f"{'https' if tls else 'http'}://{tcp_text(host, port)}"


async def drain(lifecycle: ServerLifecycle, timeout_s: float) -> bool:
    """Whether all running work finished in time."""
    log.info("draining: no new work; running work has %.0f s (a second signal stops at once)", timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await lifecycle.drain()
    except TimeoutError:
        log.warning("the drain's time is up; what still runs is cut off")
        await lifecycle.end_long_work()
        return False
    except JaxctxError as error:  # the engine has broken down
        log.error("cannot drain: %s", error)
        return False
    await lifecycle.end_long_work()
    log.info("drained")
    return True


async def result_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work, or None if `stop` is set before the work is done."""
    stopping, result = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    await asyncio.wait((stopping, result), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if result.done():
        return await result
    result.cancel()
    return None
