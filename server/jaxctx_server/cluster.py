"""Servers of one cluster: what they know each other by, and an engine's place with its router."""

import asyncio
import hashlib
import logging
import secrets
from dataclasses import dataclass, field

import grpc
import grpc.aio

from jaxctx.engine.remote import ENGINE_CHANNEL_OPTIONS, authorization_metadata
from jaxctx.rpc import method_of
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx_server.auth import Key, Role

log = logging.getLogger("jaxctx.server")
RETRY_S = 0.5  # until an engine registers again


@dataclass(frozen=True, slots=True)
class Cluster:
    """The secret that its servers share ("": none, on one machine only), and what this process is among all."""

    key: str = ""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def accepted(self) -> Key:
        """The secret as a key that a server accepts."""
        return Key("cluster", hashlib.sha256(self.key.encode()).digest(), "", Role.CLUSTER)


ALONE = Cluster()


async def join(router: str, cluster: Cluster, port: int, *, leaving_s: float | None = None) -> None:
    """Keep the engine that listens on this port registered with the router at `router`, whenever that is there. With
    `leaving_s` have its contexts go on at others instead, within that time and as far as they can.
    """
    told = None
    while True:
        async with grpc.aio.insecure_channel(router, options=ENGINE_CHANNEL_OPTIONS) as channel:
            try:
                request = RegisterRequest(port=port, incarnation=cluster.incarnation, leaving=leaving_s is not None)
                register = method_of(channel, "Register")
                async for answer in register(request, metadata=authorization_metadata(cluster.key), timeout=leaving_s):
                    told = None
                    log.info("registered with the router at %s, epoch %d", router, answer.epoch)
            except grpc.aio.AioRpcError as error:
                if (told, told := error.code())[0] is not told:
                    log.warning("not with the router at %s: %s", router, error.details())
        if leaving_s is not None:
            return
        await asyncio.sleep(RETRY_S)
