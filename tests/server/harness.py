"""What tests of the server share: keys, and calls through a stub."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from jaxctx import errors, rpc
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.auth import Key, Role


def key(name: str, secret: str, tenant: str, role: Role = Role.USER) -> Key:
    return Key(name, hashlib.sha256(secret.encode()).digest(), tenant, role)


KEYS = [key("alice", "a-key", "red"), key("bob", "b-key", "blue"), key("root", "r-key", "ops", Role.ADMIN)]


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


def method_of(channel: Any, name: str) -> Any:
    """A callable for a method of the contract by its name, for tests of all methods."""
    method = rpc.METHODS[name]
    serialize = GetMessageClass(method.input_type).SerializeToString
    deserialize = GetMessageClass(method.output_type).FromString
    path = f"/{method.containing_service.full_name}/{name}"
    if method.server_streaming:  # requests never are a stream
        return channel.unary_stream(path, serialize, deserialize)
    return channel.unary_unary(path, serialize, deserialize)


async def failure(call: Any) -> errors.JaxctxError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return rpc.from_rpc_error(raised.value)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


async def create(grpc_server: Any, context_id: str = "a", **kwargs: Any) -> None:
    await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id=context_id), **kwargs)
