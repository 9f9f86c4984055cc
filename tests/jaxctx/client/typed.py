"""What a type checker sees of both clients. Checked by mypy in test_calls; never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import assert_type

import jaxctx
from jaxctx import aio, decoding


def blocking(client: jaxctx.Client) -> None:
    context = client.create("text", add_special_tokens=True, priority=1)
    assert_type(context, jaxctx.Context)
    assert_type(context.fill(tokens=[1], defer=True), jaxctx.FillResult)
    assert_type(context.fork(2), list[jaxctx.Context])
    assert_type(context.truncate(2, timeout_s=1.0), jaxctx.ContextInfo)
    assert_type(context.switch_adapter(None).adapter_spans, Sequence[jaxctx.AdapterSpan])
    assert_type(context.complete(max_tokens=1), jaxctx.Completion[jaxctx.Context])
    assert_type(context.generate(), jaxctx.Stream)
    assert_type([piece.context for piece in context.generate(n=2)], list[jaxctx.Context])
    assert_type(context.save("name", durable=True), jaxctx.Snapshot)
    assert_type(client.open("name", version=1), jaxctx.Context)
    assert_type(client.contexts(), Iterator[jaxctx.Context])
    assert_type(client.watch(), Iterator[jaxctx.ContextEvent])
    assert_type(client.history("name"), list[jaxctx.Snapshot])
    assert_type(client.tokenize("text"), list[int])
    assert_type(decoding.speculative(context, lambda tokens: tokens, max_tokens=1), list[int])
    assert_type(decoding.best_of(context, 2), jaxctx.Completion[jaxctx.Context])
    assert_type(decoding.beam_search(context, width=2, max_tokens=1).context, jaxctx.Context)
    session = client.create_session(ttl_s=1.0)
    assert_type(session, jaxctx.Session)
    assert_type(session.call("{{o}}", o=jaxctx.Output(max_tokens=1)), jaxctx.Call[jaxctx.Variable])
    assert_type(session.variable("id").get(jaxctx.Criterion.LATENCY), str)
    assert_type(session.variable("id").read(), Iterator[str])
    assert_type(session.graph(), list[jaxctx.GraphTask])
    jaxctx.Output(max_tokens="1")  # type: ignore[arg-type]
    context.truncate("2")  # type: ignore[arg-type]
    context.truncate()  # type: ignore[call-arg]
    context.fill("text", token=[1])  # type: ignore[call-arg]
    context.complete(temprature=1.0)  # type: ignore[call-arg]
    client.create(priority="high")  # type: ignore[arg-type]


async def asynchronous(client: aio.Client) -> None:
    context = await client.create("text")
    assert_type(context, aio.Context)
    assert_type(await context.fill("text"), jaxctx.FillResult)
    assert_type(await context.fork(2), list[aio.Context])
    session = await client.create_session()
    assert_type(await session.call("{{o}}", o=jaxctx.Output()), jaxctx.Call[aio.Variable])
    assert_type(await session.gather(await session.variable("id")), list[str])
    assert_type(session.variables(), AsyncIterator[aio.Variable])
    assert_type(await context.complete(max_tokens=1), jaxctx.Completion[aio.Context])
    assert_type(context.generate(), aio.Stream)
    assert_type([piece.context async for piece in context.generate(n=2)], list[aio.Context])
    assert_type(await client.take("name"), aio.Context)
    assert_type(client.contexts(), AsyncIterator[aio.Context])
    assert_type(await client.stats(), jaxctx.EngineStats)
    assert_type(await aio.decoding.speculative(context, lambda tokens: tokens, max_tokens=1), list[int])
    assert_type((await aio.decoding.beam_search(context, width=2, max_tokens=1)).context, aio.Context)
    await context.truncate("2")  # type: ignore[arg-type]
