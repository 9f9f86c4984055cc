"""Logs: JSON lines, or short ones on a terminal."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import re
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.responses import PlainTextResponse

from jaxctx import rpc
from jaxctx.v1 import content_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server import logs
from jaxctx_server.auth import Role
from jaxctx_server.http.server import HttpServer, bind_tcp
from tests.server.harness import bearer, failure, key, method_of


@pytest.fixture
def _quiet() -> Any:
    """`main` configures logging for a process of its own."""
    root, levels = logging.getLogger(), {name: logging.getLogger(name).level for name in ("jaxctx", "uvicorn")}
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(stream: io.StringIO) -> list[str]:
    """Lines of a message with a field, and of an exception in a function that knows a secret."""
    logs.configure("info", stream)
    log = logging.getLogger("jaxctx.server")
    log.debug("too much")
    log.info("hi %s", "you", extra={"method": "/a/b", "where": ["x", "y"]})
    secret = "a prompt"
    try:
        raise ValueError(len(secret))
    except ValueError:
        log.exception("a defect")
    return stream.getvalue().splitlines()


@pytest.mark.usefixtures("_quiet")
def test_logs_are_json_lines_with_fields() -> None:
    first, second = map(json.loads, logged(io.StringIO()))
    assert first.pop("time").endswith("Z")
    fields = {"method": "/a/b", "where": ["x", "y"]}
    assert first == {"level": "info", "logger": "jaxctx.server", "message": "hi you", **fields}
    assert second["exception"].splitlines()[-1] == "ValueError: 8"
    assert "a prompt" not in second["exception"]


@pytest.mark.usefixtures("_quiet")
def test_on_a_terminal_logs_are_for_reading_along() -> None:
    first, *rest = (re.sub(r"\x1b\[[0-9;]*m", "", line) for line in logged(Terminal()))
    assert re.search(r"\[info +\] hi you +\[jaxctx\.server\] method=/a/b where=\['x', 'y'\]$", first)
    assert rest[-1] == "ValueError: 8"
    assert "a prompt" not in "".join(rest)


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
@pytest.mark.usefixtures("_quiet")
async def test_of_exceptions_in_libraries_no_message_is_logged(stream_type: type[io.StringIO]) -> None:
    """They may quote a request: uvicorn logs those of an application, asyncio those of tasks that nobody waited for."""
    stream = stream_type()
    logs.configure("info", stream)
    secret = "a prompt"

    async def fail() -> None:
        try:
            raise KeyError(secret)
        except KeyError as error:
            raise ValueError(secret) from error

    try:
        await fail()
    except ValueError as error:
        logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=error)
    task = asyncio.ensure_future(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    written = stream.getvalue()
    assert "a prompt" not in written
    for told in ("Exception in ASGI application", "Task exception was never retrieved", "ValueError", "KeyError"):
        assert told in written
    assert written.count("in fail") >= 2  # where it was raised


@pytest.mark.usefixtures("_quiet")
async def test_what_is_no_http_is_not_logged() -> None:
    """Whoever can connect could fill the log."""
    stream = io.StringIO()
    logs.configure("info", stream)
    server = HttpServer(PlainTextResponse("here"), bind_tcp("127.0.0.1", 0))
    await server.start()
    for data in (b"no http\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data)
        async with asyncio.timeout(60):
            assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        writer.close()
    await server.close()
    assert stream.getvalue() == ""


# --- what callers send ------------------------------------------------------------------------------------------------

MARKER = "xylophone7"  # a text, an id, a name and a part of a key, as callers send them


def filled_with_marker(kind: Descriptor, depth: int = 6) -> Message:
    """A message with the marker in each field that can hold it."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            fill_message_field(message, field, depth)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            value: Any = MARKER if field.type == FieldDescriptor.TYPE_STRING else MARKER.encode()
            setattr(message, field.name, value) if not field.is_repeated else getattr(message, field.name).append(value)
    return message


def fill_message_field(message: Message, field: FieldDescriptor, depth: int) -> None:
    kind = field.message_type
    if not depth or kind.file.package != "jaxctx.v1":
        return
    if kind.GetOptions().map_entry:
        if kind.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
            getattr(message, field.name)[MARKER] = MARKER
        return
    value = filled_with_marker(kind, depth - 1)
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        getattr(message, field.name).CopyFrom(value)


async def ended(call: Any) -> None:
    """Wait until a call has ended, or a stream has sent something; what it says does not matter."""
    try:
        async with asyncio.timeout(5):
            await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError:
        pass
    finally:
        call.cancel()


@pytest.mark.usefixtures("_quiet")
async def test_nothing_that_a_caller_sends_is_ever_logged(open_grpc_server: Any) -> None:
    """At the level that logs most: all methods with the marker in each field, prompts, and errors that quote them."""
    stream = io.StringIO()
    logs.configure("debug", stream)
    keys = [key("alice", f"{MARKER}-user", "red"), key("root", f"{MARKER}-root", "ops", Role.ADMIN)]
    async with open_grpc_server(keys=keys) as grpc_server:
        for name, method in rpc.METHODS.items():
            if name == "Drain":
                continue  # what it is sent has no fields, and others would be refused after it
            for secret in (f"{MARKER}-root", f"{MARKER}-user", f"{MARKER}-unknown"):
                request = filled_with_marker(method.input_type)
                await ended(method_of(grpc_server.channel, name)(request, metadata=bearer(secret)))
        user = {"metadata": bearer(f"{MARKER}-user")}
        contexts = grpc_server.contexts
        await contexts.CreateContext(pb.CreateContextRequest(context_id="c", labels={"k": MARKER}), **user)
        await contexts.Fill(pb.FillRequest(context_id="c", text=MARKER), **user)
        message = content_pb2.ChatMessage(role="user", content=MARKER)
        await ended(
            contexts.Fill(pb.FillRequest(context_id="c", messages=content_pb2.ChatMessages(messages=[message])), **user)
        )
        assert [part async for part in contexts.Generate(pb.GenerateRequest(context_id="c", stop=[MARKER]), **user)]
        for error in (ValueError(f"the prompt was {MARKER}"), KeyError(MARKER)):
            grpc_server.engine.error = error
            await failure(contexts.Flush(pb.FlushRequest(context_id="c"), **user))
    written = stream.getvalue()
    lines = [json.loads(line) for line in written.splitlines()]
    called = {line["method"].rpartition("/")[2] for line in lines if line["message"] == "call"}
    assert called >= rpc.METHODS.keys() - {"Drain", "Register"}
    assert len([line for line in lines if line["message"].startswith("incident")]) == 2
    assert MARKER not in written
    generated = [line for line in lines if line.get("method", "").endswith("/Generate") and line["code"] == "OK"]
    assert generated[-1]["completion_tokens"] == 2
