# ruff: noqa: N802 - gRPC names the methods
"""EngineService: a core's engines come and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from urllib.parse import unquote

from jaxctx.engine.remote import RemoteEngine
from jaxctx.errors import FailedPrecondition
from jaxctx.v1 import engine_service_pb2 as pb
from jaxctx_server.grpc.pipeline import Context
from jaxctx_server.grpc.service import Service
from jaxctx_server.serving import Serving


class EngineService(Service):
    """See the service in protos/jaxctx/v1/engine_service.proto."""

    def __init__(self, serving: Serving, clock: Callable[[], float], cluster_key: str) -> None:
        super().__init__(serving, clock)
        self._cluster_key = cluster_key

    async def Register(self, request: pb.RegisterRequest, context: Context) -> AsyncIterator[pb.RegisterResponse]:
        served, _ = self.valid(context, request)
        if served.model is not None:
            raise FailedPrecondition("this server is no core", reason="WRONG_ROLE")
        programs, engines = served.programs, served.programs.dispatcher.engines
        peer = unquote(context.peer()).partition(":")[2].rpartition(":")[0]  # of ipv4:10.0.0.7:41234, or a Unix socket
        address = f"{peer or '127.0.0.1'}:{request.port}"
        async with aclosing(RemoteEngine(address, request.life, self._cluster_key, self._clock)) as engine:
            await engine.stats()  # Unavailable if it cannot be reached there
            attending = asyncio.create_task(engines.attend(address, engine, engine.encode))
            before, programs.attending[address] = programs.attending.get(address), attending
            try:
                if before is not None:
                    before.cancel()  # its call may have ended unnoticed
                await asyncio.sleep(0)  # it begins by registering
                yield pb.RegisterResponse(epoch=engines.nodes[address].epoch)
                await asyncio.wait([attending])
            finally:
                attending.cancel()
                await asyncio.wait([attending])
