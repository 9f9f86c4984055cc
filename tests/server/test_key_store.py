"""Keys that change while the server runs: the file is looked at, and what a revoked key runs ends."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxctx import errors, rpc
from jaxctx.types import GeneratePiece
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import session_service_pb2
from jaxctx_server import key_store as store_module
from jaxctx_server.auth import CERTIFIED, LOCAL, Key, Role
from jaxctx_server.errors import StartError
from jaxctx_server.key_store import NOT_RELOADED, KeyStore
from tests.server.key_files import key_line, replace_file

LIST = "/jaxctx.v1.ContextService/ListContexts"
STATS = "/jaxctx.v1.AdminService/GetStats"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(key_line("alice") + key_line("bob", "blue"))
    return path


def edited(path: Path, text: str) -> None:
    """The file, in place."""
    path.write_text(text)


async def looked(store: KeyStore) -> None:
    """What a change takes to be seen."""
    await store.poll()
    await store.poll()


def may(store: KeyStore, name: str, method: str = LIST) -> bool:
    try:
        store.authorise(method, f"Bearer {name}-key")
    except errors.Unauthenticated:
        return False
    return True


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [replace_file, edited])
async def test_a_change_of_the_file_is_taken(file: Path, change: Callable[[Path, str], None]) -> None:
    store = KeyStore(None, file)
    await looked(store)
    change(file, key_line("bob", "blue") + key_line("carol"))
    assert may(store, "alice"), "nobody has looked yet"
    await looked(store)
    assert [may(store, name) for name in ("alice", "bob", "carol")] == [False, True, True]


async def test_a_file_in_a_folder_that_is_a_link_is_replaced_with_the_link(tmp_path: Path) -> None:
    """As secrets are that Kubernetes mounts."""
    for version, name in enumerate(("alice", "bob")):
        (tmp_path / f"v{version}").mkdir()
        (tmp_path / f"v{version}" / "keys").write_text(key_line(name))
    (tmp_path / "data").symlink_to("v0")
    (tmp_path / "keys").symlink_to("data/keys")
    store = KeyStore(None, tmp_path / "keys")
    await looked(store)
    (tmp_path / "new").symlink_to("v1")
    (tmp_path / "new").rename(tmp_path / "data")
    await looked(store)
    assert [may(store, name) for name in ("alice", "bob")] == [False, True]


async def test_the_same_size_and_time_hide_no_change(file: Path) -> None:
    store, before = KeyStore(None, file), file.stat()
    await looked(store)
    file.write_text(file.read_text().replace("blue", "pink"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    await looked(store)
    assert store.authorise(LIST, "Bearer bob-key").tenant == "pink"


async def test_what_is_being_written_is_not_taken(file: Path) -> None:
    store = KeyStore(None, file)
    await looked(store)
    edited(file, key_line("alice"))
    await store.poll()
    assert may(store, "bob")
    edited(file, key_line("alice") + key_line("bob", "blue") + key_line("carol"))
    await store.poll()
    assert may(store, "bob")
    await store.poll()
    assert may(store, "bob")
    assert may(store, "carol")


@pytest.mark.parametrize(
    "written", ["", "alice:a-secret-by-mistake:red\n", key_line("alice") + key_line("alice"), "\udcff", None]
)
async def test_a_broken_file_leaves_the_keys_and_says_so_once(
    file: Path, written: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    store, good = KeyStore(None, file), file.read_text()
    await looked(store)
    if written is None:
        file.unlink()
    else:
        file.write_text(written, errors="surrogateescape")
    with caplog.at_level(logging.INFO, "jaxctx"):
        for _ in range(3):
            await looked(store)
    assert may(store, "alice")
    assert may(store, "bob")
    (record,) = caplog.records
    assert (record.levelname, record.__dict__["reason"]) == ("ERROR", NOT_RELOADED)
    assert str(file) in record.getMessage()
    assert "secret" not in record.getMessage()
    assert hashlib.sha256(b"alice-key").hexdigest() not in record.getMessage()
    replace_file(file, good.replace("alice", "alicia"))
    await looked(store)
    assert may(store, "bob"), "what is right again is taken"


async def test_a_file_that_is_not_looked_at_is_read_when_reload_requested(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(None, file)
    edited(file, key_line("bob", "blue"))
    with caplog.at_level(logging.INFO, "jaxctx"):
        await store.reload()
        await store.reload()
    assert not may(store, "alice")
    first, second = caplog.records
    assert (first.__dict__["revoked"], first.__dict__["added"]) == (["alice"], [])
    assert (second.__dict__["revoked"], second.__dict__["added"]) == ([], [])


async def test_a_pipe_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `--keys <(command)` gives it: to read it again would wait for ever."""
    read, write = os.pipe()
    os.write(write, key_line("alice").encode())
    os.close(write)
    store = KeyStore(None, Path(f"/dev/fd/{read}"))
    await looked(store)
    assert caplog.records == []
    await store.reload()
    (record,) = caplog.records
    assert "is no regular file" in record.getMessage()
    assert may(store, "alice")
    os.close(read)


async def test_keys_that_are_in_no_file_stay(file: Path) -> None:
    cluster = Key("cluster", hashlib.sha256(b"cluster-key").digest(), "", Role.CLUSTER)
    store = KeyStore([cluster], file)
    edited(file, key_line("bob", "blue"))
    await store.reload()
    assert may(store, "cluster")
    only = KeyStore([cluster])
    await only.reload()
    await looked(only)
    assert may(only, "cluster")


async def test_without_keys_there_is_nothing_to_read(caplog: pytest.LogCaptureFixture) -> None:
    store = KeyStore(None)
    with caplog.at_level(logging.INFO, "jaxctx"):
        store.request_reload()
    await store.reload()
    assert store.authorise(LIST, None) is LOCAL
    assert "no keys file" in caplog.text
    assert KeyStore(None, without_keys=CERTIFIED).authorise(LIST, None) is CERTIFIED


def test_a_broken_file_at_the_start_is_a_mistake(file: Path) -> None:
    edited(file, "nonsense")
    with pytest.raises(StartError):
        KeyStore(None, file)


async def test_it_is_looked_at_again_and_again_whatever_fails(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "POLL_S", 0.01)
    store, read = KeyStore(None, file), store_module._read
    failed = asyncio.Event()

    def broken(path: Path) -> Any:
        monkeypatch.setattr(store_module, "_read", read)
        asyncio.run_coroutine_threadsafe(_set(failed), loop)
        raise MemoryError

    async def _set(event: asyncio.Event) -> None:
        event.set()

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(store_module, "_read", broken)
    watching = asyncio.create_task(store.watch())
    store.request_reload()
    await asyncio.wait_for(failed.wait(), 60)
    replace_file(file, key_line("bob", "blue"))
    async with asyncio.timeout(60):
        while may(store, "alice"):
            await asyncio.sleep(0.01)
    assert not watching.done()
    watching.cancel()
    assert any(record.__dict__.get("reason") == NOT_RELOADED for record in caplog.records)


# --- calls ------------------------------------------------------------------------------------------------------------


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {name}-key"),)


async def failure(call: Any) -> errors.JaxctxError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return rpc.from_rpc_error(raised.value)


async def revoked(call: Any) -> None:
    error = await asyncio.wait_for(failure(call), 60)
    assert (type(error), error.reason) == (errors.Unauthenticated, "UNAUTHENTICATED")
    assert "revoked" in error.message


async def test_a_revoked_key_is_refused_from_the_next_call(open_grpc_server: Any, file: Path) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        listing = pb.ListContextsRequest()
        await grpc_server.contexts.ListContexts(listing, metadata=bearer("alice"))
        edited(file, key_line("bob", "blue"))
        await store.reload()
        error = await failure(grpc_server.contexts.ListContexts(listing, metadata=bearer("alice")))
        assert isinstance(error, errors.Unauthenticated)
        await grpc_server.contexts.ListContexts(listing, metadata=bearer("bob"))


@pytest.mark.parametrize(
    "written",
    [
        key_line("bob", "blue"),  # gone
        key_line("alice", "green") + key_line("bob", "blue"),  # another tenant's
        key_line("alice", "red", "admin") + key_line("bob", "blue"),  # of another role
    ],
)
async def test_what_runs_with_a_revoked_key_ends(open_grpc_server: Any, file: Path, written: str) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        for name in ("alice", "bob"):
            await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id="a"), metadata=bearer(name))
        grpc_server.engine.hang = True
        streams = {}
        for name in ("alice", "bob"):
            generate = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"), metadata=bearer(name))
            assert (await generate.read()).text == "a"
            streams[name] = generate
        watch = grpc_server.contexts.WatchContexts(pb.WatchContextsRequest(), metadata=bearer("alice"))
        await watch.read()
        fill = grpc_server.contexts.Fill(pb.FillRequest(context_id="a", text="x"), metadata=bearer("alice"))
        async with asyncio.timeout(60):
            while grpc_server.engine.calls[-1][0] != "fill":
                await asyncio.sleep(0.01)
        edited(file, written)
        await store.reload()
        await revoked(fill)
        await revoked(streams["alice"].read())
        with pytest.raises(grpc.aio.AioRpcError):  # what had come before is still there to be read
            while (await watch.read()) is not grpc.aio.EOF:
                pass
        assert watch.done()
        assert await watch.code() == grpc.StatusCode.UNAUTHENTICATED
        assert sorted(grpc_server.engine.cancelled) == ["fill", "generate", "watch"]
        assert not streams["bob"].done()
        streams["bob"].cancel()


async def test_a_new_name_for_a_key_ends_nothing(open_grpc_server: Any, file: Path) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id="a"), metadata=bearer("alice"))
        grpc_server.engine.hang = True
        stream = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"), metadata=bearer("alice"))
        await stream.read()
        edited(file, key_line("alice").replace("alice:", "alicia:"))
        await store.reload()
        await grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=bearer("alice"))
        assert not stream.done()
        stream.cancel()


async def test_a_stream_that_nobody_reads_ends_too(open_grpc_server: Any, file: Path) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        await grpc_server.contexts.CreateContext(pb.CreateContextRequest(context_id="a"), metadata=bearer("alice"))
        text = "x" * 2000
        grpc_server.engine.pieces = [
            GeneratePiece(index=0, context_id="a", text=text, token_ids=[1]) for _ in range(20_000)
        ]
        stream = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"), metadata=bearer("alice"))
        await stream.read()
        pulled = -1
        while pulled != grpc_server.engine.pulled:  # until it no longer moves
            pulled = grpc_server.engine.pulled
            await asyncio.sleep(0.2)
        edited(file, key_line("bob", "blue"))
        await store.reload()
        async with asyncio.timeout(60):
            while grpc_server.engine.cancelled != ["generate"]:
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while (await stream.read()) is not grpc.aio.EOF:
                pass
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_variable_that_is_waited_for_and_health(open_grpc_server: Any, file: Path) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        sessions = grpc_server.stub("SessionService")
        session = await sessions.CreateSession(session_service_pb2.CreateSessionRequest(), metadata=bearer("alice"))
        own = session.session.session_id
        made = await sessions.CreateVariable(
            session_service_pb2.CreateVariableRequest(session_id=own, name="v"), metadata=bearer("alice")
        )
        read = sessions.ReadVariable(
            session_service_pb2.ReadVariableRequest(session_id=own, variable_id=made.variable.variable_id),
            metadata=bearer("alice"),
        )
        watch = health_pb2_grpc.HealthStub(grpc_server.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        async with asyncio.timeout(60):
            while len(store._running) < 2:
                await asyncio.sleep(0.01)
        edited(file, key_line("bob", "blue"))
        await store.reload()
        await revoked(read.read())
        assert not watch.done(), "it needed no key"
        watch.cancel()


async def test_an_error_of_the_calls_own_stays_what_it_is(open_grpc_server: Any, file: Path) -> None:
    store = KeyStore(None, file)
    async with open_grpc_server(keys=store) as grpc_server:
        grpc_server.engine.error = TimeoutError("of its own")
        listing = grpc_server.contexts.ListContexts(pb.ListContextsRequest(), metadata=bearer("alice"))
        assert isinstance(await failure(listing), errors.Internal)
        assert store._running == set()
