"""Contexts on a router's engines: a client does with a router what it does with an engine."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from tests.e2e.router_cluster import (
    LONG_TEXT,
    RouterCluster,
    address_of,
    complete_alone,
    create_on,
    wait_until,
)


async def test_a_client_does_with_a_router_what_it_does_with_an_engine(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    async with await client.create("Once upon a time", labels={"a": "b"}) as context:
        output = await context.complete(max_tokens=6, temperature=0, ignore_eos=True)
        assert output.text == await complete_alone(next(iter(router_cluster.engines)), "Once upon a time", 6)
        tokens = await context.tokens()
        one, other = await context.fork(2)
        await one.fill(" more", defer=True)
        await one.flush()
        compared = await one.compare(other)
        assert (compared.common_tokens, compared.length_b) == (len(tokens), len(tokens))
        await one.rewind(3)
        assert await one.tokens() == tokens[:3]
        assert (await one.update(priority=4)).priority == 4
        assert (await context.plan(" and so on")).computed > 0
        children = [piece.context_id async for piece in other.generate(max_tokens=3, n=2, ignore_eos=True)]
        assert {await address_of(router_cluster, each) for each in children} == {
            await address_of(router_cluster, other.id)
        }
        for each in (*set(children), one.id, other.id):
            await (await client.context(each)).close()
        with pytest.raises(errors.NotFound):
            await client.context(one.id)
        listed = [each async for each in client.contexts()]
        assert [each.id for each in listed] == [context.id]
        assert listed[0].info.labels == {"a": "b"}
    answer = await (await client.create("Is it?")).complete(output_format=jaxctx.OutputFormat(choices=["yes", "no"]))
    assert answer.text in ("yes", "no")
    with pytest.raises(errors.InvalidArgument, match=r"output_format\.regex"):
        await (await client.create("Is it?")).complete(output_format=jaxctx.OutputFormat(regex="[a"))
    (model,) = await client.models()
    assert model.model_id == (await client.model()).model_id
    with pytest.raises(errors.NotFound) as error:
        await client.model("another")
    assert error.value.reason == "MODEL_NOT_FOUND"
    assert await client.detokenize(await client.tokenize("Hello", add_special_tokens=False)) == "Hello"
    assert await client.clear_cache() > 0
    assert [(await engine.stats()).pages_cached for engine in router_cluster.engines.values()] == [0, 0]


async def test_wrong_requests_are_named(client: jaxctx.aio.Client) -> None:
    with pytest.raises(errors.InvalidArgument) as error:
        await client.create(priority=101, salt="s" * 300)
    assert {each.field for each in error.value.violations} == {"priority", "salt"}


async def test_a_context_is_found_wherever_it_is(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    """Of what the router did not make it knows nothing."""
    for n, address in enumerate(router_cluster.engines):
        context = await client.context(await create_on(router_cluster, address, context_id=f"there{n}"))
        await context.fill("Hello")
        assert await context.complete(max_tokens=3)
        assert await address_of(router_cluster, f"there{n}") == address
    with pytest.raises(errors.NotFound) as error:
        await client.context("nowhere")
    assert error.value.reason == "CONTEXT_NOT_FOUND"


async def test_contexts_on_two_engines_are_compared_by_their_tokens(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
) -> None:
    a, b = [await client.context(await create_on(router_cluster, address)) for address in router_cluster.engines]
    await a.fill(tokens=[5, 6, 7, 8])
    await b.fill(tokens=[5, 6, 9])
    compared = await a.compare(b)
    assert (compared.common_tokens, compared.shared_pages, compared.length_a, compared.length_b) == (2, 0, 4, 3)


async def test_a_context_tells_its_engine(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    seen: dict[str, str] = {}

    async def watch() -> None:
        async for event in client.watch():
            if event.context is not None:
                seen[event.context_id] = event.context.engine_id

    watching = asyncio.create_task(watch())
    there = {
        name: await create_on(router_cluster, address, context_id=name)
        for name, address in zip("ab", router_cluster.engines, strict=True)
    }
    first, second = router_cluster.engines
    for context_id, address in (("a", first), ("b", second)):
        found = await client.context(context_id)
        assert found.engine_id == address
        assert (await found.fill("Once", defer=True)).context.engine_id == address
        assert (await found.update(priority=1)).engine_id == address
        assert (await found.complete(max_tokens=2)).context.engine_id == address
        (fork,) = await found.fork(ids=[f"{context_id}2"])
        assert fork.engine_id == address
    assert {each.id: each.engine_id async for each in client.contexts()} == dict(
        zip(("a", "b", "a2", "b2"), (first, second) * 2, strict=True)
    )
    new = await client.create()
    assert new.engine_id == await address_of(router_cluster, new.id)
    await new.fill(LONG_TEXT)  # which may make it anew elsewhere
    assert new.engine_id == await address_of(router_cluster, new.id)
    await wait_until(lambda: seen.keys() >= {*there, "a2", "b2", new.id})
    await wait_until(lambda: seen[new.id] == new.engine_id)
    assert {name: seen[name] for name in ("a", "b", "a2", "b2")} == {"a": first, "b": second, "a2": first, "b2": second}
    watching.cancel()
    async with jaxctx.aio.Client(first, timeout_s=30) as alone_there:
        assert (await alone_there.context("a")).engine_id == "local"


async def test_a_chosen_id_is_there_once(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    first, second = router_cluster.engines
    for n, (there, busy) in enumerate(((first, first), (second, second), (first, second))):
        await create_on(router_cluster, there, context_id=f"c{n}")
        router_cluster.handles[busy].forwarded += 3
        with pytest.raises(errors.AlreadyExists):
            await client.create(context_id=f"c{n}")
        other = await client.create()
        with pytest.raises(errors.AlreadyExists):
            await other.fork(ids=["new", f"c{n}"])
        with pytest.raises(errors.NotFound):
            await client.context("new")
        await (await client.context(f"c{n}")).close()
        await client.create(context_id=f"c{n}")
        router_cluster.handles[busy].forwarded -= 3


async def test_two_that_choose_one_id_at_once(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    created = [asyncio.create_task(client.create(context_id="mine")) for _ in range(6)]
    done = await asyncio.gather(*created, return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["AlreadyExists"] * 5 + ["Context"]
    await address_of(router_cluster, "mine")


async def test_lists_come_in_parts(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    first, second = router_cluster.engines
    ids = [f"c{n:02}" for n in range(21)]
    for n, chosen in enumerate(ids):
        await create_on(router_cluster, (first, second)[n % 3 == 0], context_id=chosen)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        stub = ContextServiceStub(channel)
        for limit in (1, 2, 3, 7, 20, 21, 22, 1000):
            found, token, parts = [], "", 0
            while parts == 0 or token:
                page = await stub.ListContexts(pb.ListContextsRequest(limit=limit, page_token=token))
                assert len(page.contexts) <= limit
                found += [each.context_id for each in page.contexts]
                token, parts = page.next_page_token, parts + 1
            assert found == ids
            assert parts == -(-21 // limit)


async def test_caches_of_all_engines_are_cleared_while_one_leaves(
    router_cluster: RouterCluster,
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = router_cluster.engines

    async def leaving(_: Caller) -> int:
        router_cluster.leave(first)
        await wait_until(lambda: first not in router_cluster.handles)
        return 3

    monkeypatch.setattr(router_cluster.handles[first].engine, "clear_cache", lambda _: asyncio.sleep(0, 0))
    monkeypatch.setattr(router_cluster.handles[second].engine, "clear_cache", leaving)
    assert await client.clear_cache() == 3


async def test_whoever_leaves_ends_the_work(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ")
    pieces = context.generate(max_tokens=1400, ignore_eos=True)
    await anext(pieces)
    assert sum(node.forwarded for node in router_cluster.handles.values()) == 1
    pieces.close()
    async with asyncio.timeout(5):
        while any([(await engine.stats()).running for engine in router_cluster.engines.values()]):
            await asyncio.sleep(0.01)
    await wait_until(lambda: not any(node.forwarded for node in router_cluster.handles.values()))


async def test_deadlines_travel(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:
    context = await client.create("Tell: ")
    for engine in router_cluster.engines.values():
        engine.loop.post_if_running(lambda: time.sleep(0.6))
    with pytest.raises(errors.DeadlineExceeded):
        await context.complete(max_tokens=1400, ignore_eos=True, timeout_s=0.3)
    async with asyncio.timeout(5):
        while any([(await engine.stats()).running for engine in router_cluster.engines.values()]):
            await asyncio.sleep(0.01)
