"""How calls travel: errors, retries, deadlines, keys, sockets. Through both clients where they differ."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
import time
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


async def test_ids_that_nobody_chose_are_the_servers(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    children = await either(context.fork(2))
    assert not fake.requests["CreateContext"][0].HasField("context_id")
    assert (fake.requests["Fork"][0].n, fake.requests["Fork"][0].child_ids) == (2, [])
    assert fake.contexts.keys() == {context.id, *(child.id for child in children)}
    assert len(await either(context.fork())) == 1


async def test_a_taken_id_is_an_error(either: Any, client: Any) -> None:
    context = await either(client.create("hello", context_id="mine"))
    with pytest.raises(errors.AlreadyExists):
        await either(client.create(context_id="mine"))
    with pytest.raises(errors.AlreadyExists):
        await either(context.fork(ids=["mine"]))


async def test_deadlines(either: Any, serving: Any) -> None:
    slow = serving.fake.info

    def info(context_id: str) -> Any:
        time.sleep(0.6)
        return slow(context_id)

    client = either.client(serving.target, timeout_s=0.2)
    context = await either(client.create(timeout_s=10.0))
    serving.fake.info = info
    with pytest.raises(errors.DeadlineExceeded):
        await either(context.refresh())
    assert (await either(context.refresh(timeout_s=10.0))).seq_len == 0


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


REFUSED_HERE: list[tuple[str, Any, str]] = [
    ("fill", lambda context, client: context.fill(tokens=[1, 2**40]), "tokens.ids"),
    ("fill", lambda context, client: context.fill(tokens=["a"]), "tokens.ids"),
    ("fill", lambda context, client: context.fill("\ud800"), "text"),
    ("fill", lambda context, client: context.fill(7), "text"),
    ("messages", lambda context, client: context.fill(messages="hello"), "messages.messages"),
    ("messages", lambda context, client: context.fill(messages=["hello"]), "messages.messages[0]"),
    ("messages", lambda context, client: context.fill(messages=[{"role": "user", 7: "x"}]), "messages.messages[0].7"),
    (
        "messages",
        lambda context, client: context.plan(messages=[{"role": "u"}, {"content": 7}]),
        "messages.messages[1].content",
    ),
    ("messages", lambda context, client: client.apply_chat_template([{"role": "\udc00"}]), "messages.messages[0].role"),
    ("generate", lambda context, client: context.complete(max_tokens=2**40), "max_tokens"),
    ("generate", lambda context, client: context.complete(temperature="hot"), "sampling.temperature"),
    ("generate", lambda context, client: context.complete(seed=2**70), "sampling.seed"),
    ("generate", lambda context, client: context.complete(logit_bias=[1]), "sampling.logit_bias"),
    ("generate", lambda context, client: context.complete(stop=["a", 5]), "stop"),
    ("fork", lambda context, client: context.fork("2"), "n"),
    ("fork", lambda context, client: context.fork(ids=[1]), "child_ids"),
    ("rewind", lambda context, client: context.rewind(-(2**31) - 1), "to"),
    ("update", lambda context, client: context.update(labels={"k": 1}), "labels.labels"),
    ("create", lambda context, client: client.create(labels={1: "v"}), "labels"),
    ("create", lambda context, client: client.create(priority=0.5), "priority"),
    ("lookup", lambda context, client: client.context("\ud800"), "context_id"),
    ("models", lambda context, client: client.tokenize("\ud800"), "text"),
    ("models", lambda context, client: client.detokenize([2**31]), "tokens"),
]


@pytest.mark.parametrize(("use", "field"), [case[1:] for case in REFUSED_HERE], ids=[case[0] for case in REFUSED_HERE])
async def test_what_no_message_can_hold_is_refused_by_name(either: Any, client: Any, use: Any, field: str) -> None:
    context = await either(client.create())
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(use(context, client))
    assert [violation.field for violation in raised.value.violations] == [field]


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


@pytest.mark.parametrize("name", ["Client", "Context", "Stream", "Session", "Variable"])
def test_both_clients_take_the_same_arguments(name: str) -> None:
    def methods(owner: type) -> dict[str, list[tuple[str, Any, Any]]]:
        return {
            method: [(p.name, p.default, p.annotation) for p in inspect.signature(function).parameters.values()]
            for method, function in inspect.getmembers(owner, inspect.isfunction)
            if not method.startswith("_")
        }

    assert len(methods(jaxctx.Client)) == 28
    assert len(methods(jaxctx.Context)) == 23  # the operations, `generate` and `learn`
    assert methods(getattr(jaxctx, name)) == methods(getattr(jaxctx.aio, name))


def test_what_help_shows() -> None:
    assert str(inspect.signature(jaxctx.Context.truncate)) == (
        "(self, tokens: 'int', *, timeout_s: 'float | None' = None) -> 'ContextInfo'"
    )
    assert jaxctx.aio.Context.truncate.__name__ == "truncate"
    assert str(jaxctx.Context.truncate.__doc__).startswith("Drop trailing tokens")
    assert inspect.signature(jaxctx.Client.snapshots).return_annotation == "Iterator[Snapshot]"
    assert inspect.signature(jaxctx.aio.Client.snapshots).return_annotation == "AsyncIterator[Snapshot]"
    assert inspect.signature(jaxctx.Client.history).return_annotation == "list[Snapshot]"
    assert inspect.iscoroutinefunction(jaxctx.aio.Context.fork)


def test_what_type_checkers_see() -> None:
    pytest.importorskip("mypy")
    typed = Path(__file__).with_name("typed.py")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(typed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=typed.parents[3])
    assert result.returncode == 0, result.stdout + result.stderr
