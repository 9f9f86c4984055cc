"""What tests of contexts on the echo model share: filled contexts, and the tokens that are expected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime

import jaxctx
from jaxctx.engine.engine import LocalEngine
from tests.echo import echo_next

THOUSAND = [(3 * i + i // 7) % 256 for i in range(1000)]


def oracle(tokens: list[int], count: int) -> list[int]:
    """The tokens that the echo model says after these, so many of them."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(echo_next(tokens))
    return tokens[-count:]


async def filled(client: jaxctx.aio.Client, tokens: list[int]) -> jaxctx.aio.Context:
    """A new context with these tokens."""
    context = await client.create()
    await context.fill(tokens=tokens)
    return context


async def greedy(context: jaxctx.aio.Context, count: int) -> list[int]:
    """The likeliest tokens that follow in a context, so many of them."""
    return list((await context.complete(max_tokens=count, temperature=0)).token_ids)


async def held(engine: LocalEngine) -> int:
    """Pages that contexts hold."""
    return (await engine.stats()).pages_held


@asynccontextmanager
async def unchanged(client: jaxctx.aio.Client, *contexts: jaxctx.aio.Context) -> AsyncIterator[None]:
    """What is refused within changes nothing that a client can see; only when a context was last used may change."""

    async def seen() -> object:
        states = [
            (replace(await each.refresh(), used_at=datetime.min), await each.pages(), await each.tokens())
            for each in contexts
        ]
        listed = [each async for each in client.snapshots()]
        versions = [await client.history(each.name) for each in listed]
        stats = replace(await client.stats(), steps=0)
        assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.pages_total
        return states, versions, stats, {each.id async for each in client.contexts()}

    before = await seen()
    yield
    assert await seen() == before


async def wait_until_idle(engine: LocalEngine) -> None:
    """Wait until no request runs or waits, and no page is promised."""
    for _ in range(400):
        stats = await engine.stats()
        if stats.running == stats.waiting == stats.pages_reserved == 0:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(stats)
