"""Publications: who shares them, who may list and end them, and what they cost."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.engine.snapshots.publications import Publications
from jaxctx.errors import FailedPrecondition, NotFound, ResourceExhausted
from jaxctx.types import CreateContextRequest, RetentionUpdate, Ttl
from tests.engines import SMALL

ME, OTHER = Caller("me"), Caller("other")


async def filled(engine: LocalEngine, tokens: list[int], caller: Caller = ME) -> str:
    context_id = (await engine.create(caller, CreateContextRequest())).context_id
    await engine.fill(caller, context_id, tokens)
    return context_id


async def resident(engine: LocalEngine, tokens: list[int], caller: Caller) -> int:
    return (await engine.plan(caller, tokens)).resident


async def test_a_publication_is_shared_by_all_and_its_owner_s_alone_to_end(engine: LocalEngine) -> None:
    context = await filled(engine, [5] * 40)
    published = await engine.publish(ME, context, RetentionUpdate(labels={"k": "v"}))
    assert (published.tokens, published.pages, published.labels, published.expiry) == (32, 2, {"k": "v"}, None)
    assert await engine.publications(ME) == [published]
    assert await engine.publications(OTHER) == []
    assert await resident(engine, [5] * 40, OTHER) == 32
    for call in (
        engine.unpublish(OTHER, published.publication_id),
        engine.update_publication(OTHER, published.publication_id, RetentionUpdate(labels={})),
        engine.unpublish(ME, "pub_none"),
    ):
        with pytest.raises(NotFound) as error:
            await call
        assert error.value.reason == "PUBLICATION_NOT_FOUND"
    reader = await filled(engine, [5] * 40, OTHER)
    await engine.unpublish(ME, published.publication_id)
    assert await engine.publications(ME) == []
    assert await resident(engine, [5] * 40, Caller("third")) == 0
    assert (await engine.fill(OTHER, reader, [1])).context.seq_len == 41, "who shares its pages keeps them"


async def test_publications_are_listed_by_their_ids_until_they_end(engine: LocalEngine, clock) -> None:
    context = await filled(engine, [5] * 40)
    first = await engine.publish(ME, context, RetentionUpdate(ttl=Ttl(100)))
    second = await engine.publish(ME, context, RetentionUpdate())
    ids = sorted([first.publication_id, second.publication_id])
    assert [each.publication_id for each in await engine.publications(ME)] == ids
    changed = await engine.update_publication(ME, second.publication_id, RetentionUpdate(ttl=Ttl(500)))
    assert changed.expiry is not None
    assert changed.expiry.seconds == 500
    clock.offset += 100
    assert await engine.publications(ME) == [changed]
    clock.offset += 400
    assert await engine.publications(ME) == []
    assert (await engine.stats()).publications == 0


async def test_only_full_pages_are_published(engine: LocalEngine) -> None:
    context = await filled(engine, [5] * 15)
    with pytest.raises(FailedPrecondition, match="no full page"):
        await engine.publish(ME, context, RetentionUpdate())


async def test_a_suspended_context_comes_back_to_be_published(make_engine) -> None:
    engine = make_engine(replace(SMALL, pages=8, max_context_tokens=128))
    context = await filled(engine, [5] * 40)
    await engine.close(ME, await filled(engine, [6] * 120))
    assert engine.core.cache.get("me", context).suspended
    assert (await engine.publish(ME, context, RetentionUpdate())).pages == 2


async def test_a_suspended_context_is_published_under_memory_pressure(make_engine, monkeypatch) -> None:
    engine = make_engine(replace(SMALL, pages=16))
    context, submit_request = await filled(engine, [5] * 40), engine.loop.submit_request

    async def under_pressure(command: Any) -> Any:
        """After every command all contexts are suspended that may be, as a large request of another would do it."""
        result = await submit_request(command)

        def suspend_all(_: object) -> None:
            for victim in list(engine.core.cache.victims()):
                engine.core.cache.suspend(victim)

        await submit_request(suspend_all)
        return result

    monkeypatch.setattr(engine.loop, "submit_request", under_pressure)
    await engine.stats()
    assert engine.core.cache.get("me", context).suspended
    published = await engine.publish(ME, context, RetentionUpdate())
    assert (published.tokens, published.pages) == (32, 2)
    monkeypatch.undo()
    assert await resident(engine, [5] * 40, OTHER) == 32
    stats = await engine.stats()
    assert (stats.contexts, stats.pages_held) == (2, 2), "the context, which is still suspended, and the publication"


async def test_a_publication_whose_caller_has_gone_ends(engine: LocalEngine, monkeypatch) -> None:
    context = await filled(engine, [5] * 40)
    begun, go_on, publish = threading.Event(), threading.Event(), Publications.publish

    def slow(self, *args: Any) -> Any:
        begun.set()
        go_on.wait(60)
        return publish(self, *args)

    monkeypatch.setattr(Publications, "publish", slow)
    publishing = asyncio.ensure_future(engine.publish(ME, context, RetentionUpdate()))
    await asyncio.to_thread(begun.wait, 60)
    publishing.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert await engine.publications(ME) == []
    assert engine.core.lifecycle.quotas.pinned("me") == 0


async def test_a_publication_is_charged_as_a_pin(make_engine) -> None:
    engine = make_engine(replace(SMALL, pinned_pages_per_tenant=3))
    context = await filled(engine, [5] * 40)
    published = await engine.publish(ME, context, RetentionUpdate())
    assert engine.core.lifecycle.quotas.pinned("me") == 2
    with pytest.raises(ResourceExhausted, match=" 1 remain") as error:
        await engine.publish(ME, context, RetentionUpdate())
    assert error.value.reason == "PIN_BUDGET"
    await engine.unpublish(ME, published.publication_id)
    assert engine.core.lifecycle.quotas.pinned("me") == 0
