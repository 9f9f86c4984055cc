"""EngineService: engines register with a router, and leave it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from jaxctx.engine.remote import MakeCredentials, RemoteEngine
from jaxctx.errors import FailedPrecondition
from jaxctx.types import Attention
from jaxctx.v1.engine_service_pb2 import RegisterRequest, RegisterResponse
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.router.migration import Migrator

log = logging.getLogger("jaxctx.server")
LOOPBACK = "127.0.0.1"  # the host of an engine that registers by a Unix socket


class EngineRegistration:
    """Implements `jaxctx_server.service.interface.EngineService`."""

    def __init__(
        self,
        lifecycle: ServerLifecycle,
        migrator: Migrator,
        clock: Callable[[], float],
        cluster_key: str,
        credentials: MakeCredentials | None = None,
    ) -> None:
        """`clock` is that of deadlines; `cluster_key` the secret that engines accept ("": none); `credentials` makes
        those of a channel to an engine (None: without TLS).
        """
        self._lifecycle = lifecycle
        self._migrator = migrator
        self._clock = clock
        self._cluster_key = cluster_key
        self._credentials = credentials

    async def register(self, peer_host: str, request: RegisterRequest) -> AsyncGenerator[RegisterResponse, None]:
        state = self._lifecycle.served()
        if state.model is not None:
            raise FailedPrecondition("this server is no router", reason="WRONG_ROLE")
        address = f"{peer_host or LOOPBACK}:{request.port}"
        if request.leaving:
            handle = state.engines.handles.get(address)
            if handle is not None:
                await self._migrator.evacuate(handle)
            return
        remote = RemoteEngine(
            address,
            request.incarnation,
            self._cluster_key,
            self._clock,
            state.engines.silence_s,
            self._credentials,
        )
        async with aclosing(remote) as engine:
            await engine.stats()  # Unavailable if it cannot be reached there
            watch = asyncio.create_task(state.engines.watch(address, engine, engine.encode, end_calls=engine.end_calls))
            before = state.programs.watching.get(address)
            state.programs.watching[address] = watch
            try:
                if before is not None:
                    before.cancel()  # its call may have ended unnoticed
                await asyncio.sleep(0)  # the watch begins by registering
                log_attention(address, engine.attention_status)
                yield RegisterResponse(epoch=state.engines.handles[address].epoch)
                await asyncio.wait([watch])
            finally:
                watch.cancel()
                await asyncio.wait([watch])


def log_attention(address: str, attention: Attention | None) -> None:
    """Say what computes attention of an engine that registers, as its own banner does."""
    if attention is None:
        return
    if attention.why_no_kernel:
        log.warning(
            "engine %s: attention is computed by plain JAX, which is slower than a kernel: %s",
            address,
            attention.why_no_kernel,
        )
    else:
        log.info("engine %s: attention %s (%s)", address, attention.implementation, attention.reason)
