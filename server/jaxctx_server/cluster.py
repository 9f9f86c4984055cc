"""Servers of one cluster: what they know each other by, and the registration of an engine with its router."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from jaxctx.engine.remote import MakeCredentials, authorization_metadata, engine_channel
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx_server.auth import Key, Role

if TYPE_CHECKING:
    from jaxctx.v1.engine_service_pb2_grpc import EngineServiceAsyncStub

log = logging.getLogger("jaxctx.server")
RETRY_S = 0.5  # seconds until an engine registers again


@dataclass(frozen=True, slots=True)
class Cluster:
    """The secret that its servers share ("": none, on one machine only), and what this process is among all.

    `credentials` makes those of a new channel to another server of the cluster. None: without TLS.
    """

    key: str = ""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    credentials: MakeCredentials | None = None

    @property
    def accepted(self) -> Key:
        """The secret as a key that a server accepts."""
        return Key("cluster", hashlib.sha256(self.key.encode()).digest(), "", Role.CLUSTER)


ALONE = Cluster()


async def register_with_router(router: str, cluster: Cluster, port: int) -> None:
    """Keep the engine that listens on this port registered with the router at `router`. Never returns."""
    last_error = None  # a status code that was logged, and is not logged again until the engine has been registered
    while True:
        try:
            async for epoch in _registrations(router, cluster, port):
                last_error = None
                log.info("registered with the router at %s, epoch %d", router, epoch)
        except grpc.aio.AioRpcError as error:
            if error.code() is not last_error:
                log.warning("not with the router at %s: %s", router, error.details())
            last_error = error.code()
        await asyncio.sleep(RETRY_S)


async def leave_router(router: str, cluster: Cluster, port: int, timeout_s: float) -> None:
    """Have the router at `router` move the contexts of this engine to other ones, in that time, as far as it can."""
    try:
        async for _ in _registrations(router, cluster, port, leaving_s=timeout_s):
            pass
    except grpc.aio.AioRpcError as error:
        log.warning("not with the router at %s: %s", router, error.details())


async def _registrations(
    router: str, cluster: Cluster, port: int, *, leaving_s: float | None = None
) -> AsyncIterator[int]:
    """Call Register once: the epoch of the engine when it is registered, and the end when it is registered no more.

    With `leaving_s` the engine leaves within that time: no epoch, and the end when its contexts have moved.
    """
    request = RegisterRequest(port=port, incarnation=cluster.incarnation, leaving=leaving_s is not None)
    credentials = None if cluster.credentials is None else cluster.credentials()
    async with engine_channel(router, credentials) as channel:
        stub = cast("EngineServiceAsyncStub", EngineServiceStub(channel))
        async for response in stub.Register(request, metadata=authorization_metadata(cluster.key), timeout=leaving_s):
            yield response.epoch
