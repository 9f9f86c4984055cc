"""How calls travel: errors, retries, deadlines, keys, sockets. Through both clients."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx import errors


@pytest.mark.parametrize("error_class", errors.BY_CODE.values(), ids=lambda c: c.code)
async def test_each_error_arrives_as_itself(either: Any, client: Any, fake: Any, error_class: Any) -> None:
    context = await either(client.create())
    sent = error_class("said why", violations=[errors.FieldViolation("tokens[0]", "negative")], retry_after_s=0.5)
    for rpc, use in (("Fill", lambda: context.fill("x")), ("Generate", context.complete)):
        fake.fail_before[rpc] = [sent]
        with pytest.raises(error_class) as raised:
            await either(use())
        got = raised.value
        assert type(got) is error_class
        assert (got.message, got.reason, got.violations) == (sent.message, sent.reason, sent.violations)
        assert got.retry_after_s == 0.5
        assert isinstance(got.__cause__, grpc.RpcError)
        assert len(fake.requests[rpc]) == 1  # what may have happened is not repeated


async def test_what_can_be_repeated_is(either: Any, client: Any, fake: Any) -> None:
    fake.fail_before["GetModel"] = [errors.Unavailable("loading"), errors.Unavailable("loading")]
    assert (await either(client.model())).model_id == "a"
    fake.fail_before["GetModel"] = [errors.Unavailable("loading") for _ in range(9)]
    with pytest.raises(errors.Unavailable):
        await either(client.model())
    assert len(fake.fail_before["GetModel"]) == 9 - 4


async def test_what_closes_is_repeated_and_gone_at_the_second_time(either: Any, client: Any, fake: Any) -> None:
    context, session = await either(client.create()), await either(client.create_session())
    for rpc, closed in (("CloseContext", context), ("DeleteSession", session)):
        fake.fail_after[rpc] = [errors.Unavailable("connection lost")]
        await either(closed.close())
        assert len(fake.requests[rpc]) == 2
    assert not fake.contexts
    assert not fake.sessions


async def test_what_makes_contexts_is_tried_once_and_safely_again_with_an_id(
    either: Any, client: Any, fake: Any
) -> None:
    fake.fail_after["CreateContext"] = [errors.Unavailable("connection lost")]
    with pytest.raises(errors.Unavailable):
        await either(client.create("hello", context_id="mine"))
    with pytest.raises(errors.AlreadyExists):
        await either(client.create("hello", context_id="mine"))
    context = await either(client.context("mine"))
    fake.fail_after["Fork"] = [errors.Unavailable("connection lost")]
    with pytest.raises(errors.Unavailable):
        await either(context.fork(ids=["a", "b"]))
    with pytest.raises(errors.AlreadyExists):
        await either(context.fork(ids=["a", "b"]))
    assert set(fake.contexts) == {"mine", "a", "b"}


async def test_deadlines(either: Any, serving: Any) -> None:
    context_message = serving.fake.context_message

    def slow_context_message(context_id: str) -> Any:
        time.sleep(0.6)
        return context_message(context_id)

    client = either.client(serving.target, timeout_s=0.2)
    context = await either(client.create(timeout_s=10.0))
    serving.fake.context_message = slow_context_message
    with pytest.raises(errors.DeadlineExceeded):
        await either(context.refresh())
    assert (await either(context.refresh(timeout_s=10.0))).seq_len == 0


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 1e300])
async def test_deadlines_that_are_none(either: Any, serving: Any, timeout_s: float) -> None:
    of_client = either.client(serving.target, timeout_s=timeout_s)
    of_each_call = either.client(serving.target)
    for client, own in ((of_client, None), (of_each_call, timeout_s)):
        context = await either(client.create("hello", timeout_s=own))
        assert str(await either(context.complete(timeout_s=own))) == "abcdef"
        assert (await either(client.plan("hello", timeout_s=own))).tokens == 5


async def test_a_deadline_that_is_no_number(either: Any, client: Any, fake: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="timeout_s"):
        await either(client.create("hello", timeout_s=math.nan))
    assert not fake.contexts
    with pytest.raises(errors.InvalidArgument, match="timeout_s"):
        either.client("127.0.0.1:1", timeout_s=math.nan)


async def test_calls_of_a_closed_client(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create("hello"))
    await either(client.close())
    await either(client.close())
    calls: list[Callable[[], Any]] = [
        lambda: either(client.plan("hello")),
        lambda: either(context.complete()),
        lambda: either(context.close()),
        lambda: either.list(client.watch()),
    ]
    for call in calls:
        with pytest.raises(errors.FailedPrecondition, match="closed"):
            await call()
    assert not await either.exit(context, KeyError("of the block")), "which goes on"
    with pytest.raises(errors.FailedPrecondition):
        await either.exit(context)


def test_a_client_that_another_thread_closes_at_that_moment(serving: Any) -> None:
    client = jaxctx.Client(serving.target)
    channel: Any = client._channel

    def method(request: Any, **_: Any) -> Any:
        channel.close()
        raise ValueError("Cannot invoke RPC on closed channel!")

    with pytest.raises(errors.FailedPrecondition, match="closed"):
        channel.start(method, None, None)


async def test_a_stream_that_is_read_ends_with_cancelled_when_the_client_is_closed(serving: Any) -> None:
    """And not as if its task had been cancelled, which would end without a word."""
    serving.fake.stalls = True
    client = jaxctx.aio.Client(serving.target)
    context = await client.create("hello")
    reading = asyncio.create_task(context.complete())
    assert await asyncio.to_thread(serving.fake.started.wait, 5)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await reading


async def test_a_call_under_way_ends_with_cancelled_when_the_client_is_closed(serving: Any) -> None:
    entered, may_go_on = threading.Event(), threading.Event()

    def slow_context_message(context_id: str) -> Any:
        entered.set()
        may_go_on.wait(5)
        raise errors.NotFound("it does not matter any more")

    client = jaxctx.aio.Client(serving.target)
    context = await client.create("hello")
    serving.fake.context_message = slow_context_message
    asking = asyncio.create_task(context.refresh())
    assert await asyncio.to_thread(entered.wait, 5)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await asking
    may_go_on.set()


async def test_nobody_there(either: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = either.client(f"127.0.0.1:{free.getsockname()[1]}", timeout_s=10.0)
        with pytest.raises(errors.Unavailable) as raised:
            await either(client.stats())
    assert raised.value.reason == "NOT_SERVING"


async def test_the_key_travels_with_every_call(either: Any, serving: Any) -> None:
    client = either.client(serving.target, api_key="secret")
    context = await either(client.create())
    await either(context.complete())
    for rpc in ("CreateContext", "Generate"):
        assert serving.fake.metadata[rpc][0]["authorization"] == "Bearer secret"
    await either((await either(either.client(serving.target).create())).close())
    assert "authorization" not in serving.fake.metadata["CloseContext"][0]


async def test_space_around_the_key_is_left_out(either: Any, serving: Any) -> None:
    await either(either.client(serving.target, api_key=" secret\n").create())
    assert serving.fake.metadata["CreateContext"][0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["", " \n", "a\nb", "schlüssel"])
def test_keys_that_cannot_be(either: Any, key: str) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        either.client("127.0.0.1:1", api_key=key)
    assert raised.value.violations[0].field == "api_key"
    assert not key.strip() or key not in raised.value.message


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "credentials"])
async def test_unix_socket(either: Any, serve: Any, tmp_path: Path, secure: bool) -> None:
    serving = serve(
        f"unix:{tmp_path}/s", grpc.local_server_credentials(grpc.LocalConnectionType.UDS) if secure else None
    )
    credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS) if secure else None
    client = await either.enter(either.client(serving.target, credentials=credentials))
    assert (await either((await either(client.create("hello"))).complete())).text == "abcdef"
    await either.exit(client)


def test_import_needs_neither_jax_nor_numpy() -> None:
    program = """
import sys
for name in ("jax", "jaxlib", "numpy", "flax"):
    sys.modules[name] = None  # importing it raises ImportError
import jaxctx, jaxctx.aio, jaxctx.rpc
client = jaxctx.Client("127.0.0.1:1", timeout_s=0.01)
print(jaxctx.__version__)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == jaxctx.__version__
