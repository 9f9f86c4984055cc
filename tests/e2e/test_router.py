"""What is no program, asked of a router: it comes to the engine that is its place, wherever that is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import jaxctx
from jaxctx import errors
from jaxctx import types as requests
from jaxctx.engine.interface import Caller as Asker
from jaxctx.rpc import METHODS
from jaxctx.types import ContextChange
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx_server.auth import Key
from jaxctx_server.cluster import ALONE, Cluster
from jaxctx_server.router import planning
from jaxctx_server.router.planning import Planner
from tests.e2e.test_cluster import (
    KEY,
    USERS,
    Forwarder,
    RouterCluster,
    alone,
    cluster,  # noqa: F401 - a fixture
    refused,
    router_cluster,  # noqa: F401 - a fixture
    router_of,
    until,
)
from tests.engines import Clock
from tests.server.harness import method_of

LONG = "You are a careful assistant who answers in one short sentence, and never guesses. " * 2


@pytest.fixture
async def client(router_cluster: RouterCluster) -> AsyncIterator[jaxctx.aio.Client]:  # noqa: F811
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=30) as client:
        yield client


async def where(router_cluster: RouterCluster, context_id: str, tenant: str = "") -> str:  # noqa: F811
    """The address of the one engine that has a context."""
    found = []
    for address, engine in router_cluster.engines.items():
        with suppress(errors.NotFound):
            await engine.inspect(Asker(tenant), context_id)
            found.append(address)
    (address,) = found
    return address


async def made_on(router_cluster: RouterCluster, address: str, **chosen: Any) -> str:  # noqa: F811
    """A context that was there before the router knew of it."""
    info = await router_cluster.engines[address].create(Asker(), requests.CreateContextRequest(**chosen))
    return str(info.context_id)


async def crowd(router_cluster: RouterCluster, address: str) -> None:  # noqa: F811
    """Have an engine look loaded, so that new contexts come to the other."""
    router_cluster.handles[address].forwarded += 4


# --- what a client can do -------------------------------------------------------------------------------------------


async def test_a_client_does_with_a_router_what_it_does_with_an_engine(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    async with await client.create("Once upon a time", labels={"a": "b"}) as context:
        output = await context.complete(max_tokens=6, temperature=0, ignore_eos=True)
        assert output.text == await alone(next(iter(router_cluster.engines)), "Once upon a time", 6)
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
        assert {await where(router_cluster, each) for each in children} == {await where(router_cluster, other.id)}
        for each in (*set(children), one.id, other.id):
            await (await client.context(each)).close()
        with pytest.raises(errors.NotFound):
            await client.context(one.id)
        listed = [each async for each in client.contexts()]
        assert [each.id for each in listed] == [context.id]
        assert listed[0].info.labels == {"a": "b"}
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


async def test_a_context_is_found_wherever_it_is(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    """Of what the router did not make it knows nothing."""
    for n, address in enumerate(router_cluster.engines):
        context = await client.context(await made_on(router_cluster, address, context_id=f"there{n}"))
        await context.fill("Hello")
        assert await context.complete(max_tokens=3)
        assert await where(router_cluster, f"there{n}") == address
    with pytest.raises(errors.NotFound) as error:
        await client.context("nowhere")
    assert error.value.reason == "CONTEXT_NOT_FOUND"


async def test_contexts_on_two_engines_are_compared_by_their_tokens(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    a, b = [await client.context(await made_on(router_cluster, address)) for address in router_cluster.engines]
    await a.fill(tokens=[5, 6, 7, 8])
    await b.fill(tokens=[5, 6, 9])
    compared = await a.compare(b)
    assert (compared.common_tokens, compared.shared_pages, compared.length_a, compared.length_b) == (2, 0, 4, 3)


# --- where to -------------------------------------------------------------------------------------------------------


async def test_new_contexts_go_where_most_of_their_prompt_is_cached(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    """Also where that engine has more to do; and with no prefix anywhere where there is least to do."""
    addresses = list(router_cluster.engines)
    for address, prompt in zip(addresses, (LONG, "Another thing altogether. " * 6), strict=True):
        home = await client.context(await made_on(router_cluster, address))
        await home.fill(prompt)
        for busy in addresses:
            router_cluster.handles[busy].forwarded += 3
            assert (await client.plan(prompt + "?")).resident >= 64
            async with await client.create(labels={"a": "b"}) as context:
                assert (await context.fill(prompt + "!")).resident >= 64
                assert await where(router_cluster, context.id) == address
                assert (await context.refresh()).labels == {"a": "b"}
            router_cluster.handles[busy].forwarded -= 3
    for busy, free in (addresses, addresses[::-1]):
        router_cluster.handles[busy].forwarded += 3
        async with await client.create("Nothing like it") as context:
            assert await where(router_cluster, context.id) == free
        router_cluster.handles[busy].forwarded -= 3


async def test_a_context_tells_its_engine(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    seen: dict[str, str] = {}

    async def watch() -> None:
        async for event in client.watch():
            if event.context is not None:
                seen[event.context_id] = event.context.engine_id

    watching = asyncio.create_task(watch())
    there = {
        name: await made_on(router_cluster, address, context_id=name)
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
    assert new.engine_id == await where(router_cluster, new.id)
    await new.fill(LONG)  # which may make it anew elsewhere
    assert new.engine_id == await where(router_cluster, new.id)
    await until(lambda: seen.keys() >= {*there, "a2", "b2", new.id})
    await until(lambda: seen[new.id] == new.engine_id)
    assert {name: seen[name] for name in ("a", "b", "a2", "b2")} == {"a": first, "b": second, "a2": first, "b2": second}
    watching.cancel()
    async with jaxctx.aio.Client(first, timeout_s=30) as alone_there:
        assert (await alone_there.context("a")).engine_id == "local"


async def test_only_an_empty_context_moves(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    first, second = router_cluster.engines
    home = await client.context(await made_on(router_cluster, second))
    await home.fill(LONG)
    await crowd(router_cluster, second)
    context = await client.create(context_id="mine")
    assert await where(router_cluster, "mine") == first
    await context.update(priority=3)
    await context.fill(LONG)
    assert await where(router_cluster, "mine") == first
    assert (await context.refresh()).priority == 3


async def test_a_fill_that_is_cancelled_leaves_one_context(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    _, second = router_cluster.engines
    await (await client.context(await made_on(router_cluster, second))).fill(LONG)
    await crowd(router_cluster, second)
    for n in range(12):
        context = await client.create(context_id=f"mine{n}")
        filling = asyncio.create_task(context.fill(LONG))
        await asyncio.sleep(n / 1000)
        filling.cancel()
        with suppress(asyncio.CancelledError):
            await filling
        with suppress(errors.Aborted):
            await context.fill(" and more")
        await where(router_cluster, context.id)


# --- ids that callers choose ----------------------------------------------------------------------------------------


async def test_a_chosen_id_is_there_once(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    first, second = router_cluster.engines
    for n, (there, busy) in enumerate(((first, first), (second, second), (first, second))):
        await made_on(router_cluster, there, context_id=f"c{n}")
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


async def test_two_that_choose_one_id_at_once(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    created = [asyncio.create_task(client.create(context_id="mine")) for _ in range(6)]
    done = await asyncio.gather(*created, return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["AlreadyExists"] * 5 + ["Context"]
    await where(router_cluster, "mine")


async def test_snapshots_of_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    contexts = [await client.context(await made_on(router_cluster, address)) for address in router_cluster.engines]
    for n, context in enumerate(contexts):
        await context.fill(f"Number {n}")
        await context.save(f"s{n}")
        with pytest.raises(errors.AlreadyExists):
            await contexts[1 - n].save(f"s{n}")
    assert (await contexts[0].save("s0", overwrite_version=1)).version == 2
    assert [each.name async for each in client.snapshots()] == ["s0", "s1"]
    assert [each.version for each in await client.history("s0")] == [2, 1]
    with pytest.raises(errors.NotFound) as error:
        await client.history("s2")
    assert error.value.reason == "SNAPSHOT_NOT_FOUND"
    for n, context in enumerate(contexts):
        opened = await client.open(f"s{n}", context_id=f"opened{n}")
        assert await opened.tokens() == await context.tokens()
        with pytest.raises(errors.AlreadyExists):
            await client.open(f"s{1 - n}", context_id=f"opened{n}")
        assert (await client.update_snapshot(f"s{n}", labels={"a": "b"})).labels == {"a": "b"}
    await client.take("s1")
    with pytest.raises(errors.NotFound):
        await client.snapshot("s1")
    assert await client.delete_snapshot("s0") == 2


async def test_publications_of_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    published = []
    for address in router_cluster.engines:
        context = await client.context(await made_on(router_cluster, address))
        await context.fill(f"At {address} " + LONG)
        published.append((await context.publish()).publication_id)
    assert [each.publication_id for each in await client.publications()] == sorted(published)
    for each in published:
        assert (await client.update_publication(each, labels={"a": "b"})).labels == {"a": "b"}
        await client.unpublish(each)
    assert await client.publications() == []
    with pytest.raises(errors.NotFound) as error:
        await client.unpublish(published[0])
    assert error.value.reason == "PUBLICATION_NOT_FOUND"


async def test_lists_come_in_parts(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    first, second = router_cluster.engines
    ids = [f"c{n:02}" for n in range(21)]
    for n, chosen in enumerate(ids):
        await made_on(router_cluster, (first, second)[n % 3 == 0], context_id=chosen)
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


# --- watching -------------------------------------------------------------------------------------------------------


async def test_a_watch_sees_all_engines(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    first, second = router_cluster.engines
    await made_on(router_cluster, first, context_id="a")
    await made_on(router_cluster, second, context_id="b")
    seen: list[tuple[ContextChange, str]] = []

    async def watch() -> None:
        async for event in client.watch():
            seen.append((event.change, event.context_id))

    watching = asyncio.create_task(watch())
    await until(lambda: len(seen) == 2)
    assert sorted(each for _, each in seen) == ["a", "b"]
    await made_on(router_cluster, second, context_id="c")
    await until(lambda: (ContextChange.CREATED, "c") in seen)
    router_cluster.leave(second)
    await until(lambda: ContextChange.RESET in dict(seen))
    await until(lambda: seen[-1] == (ContextChange.EXISTS, "a"))
    await router_cluster.register(second)
    await until(
        lambda: sorted(seen[-3:], key=lambda each: each[1])[1:]
        == [(ContextChange.EXISTS, "b"), (ContextChange.EXISTS, "c")]
    )

    # One that the router made, and remembers on an earlier life of its engine, is told of too.
    mine = await client.create(context_id="mine")
    await until(lambda: (ContextChange.CREATED, "mine") in seen)
    home = await where(router_cluster, "mine")
    router_cluster.leave(home)
    await until(lambda: seen[-1][0] is ContextChange.EXISTS and "mine" not in {each for _, each in seen[-3:]})
    await router_cluster.register(home)
    await until(lambda: (ContextChange.EXISTS, "mine") in seen[-4:])
    await mine.close()
    await until(lambda: seen[-1] == (ContextChange.CLOSED, "mine"))
    assert not watching.done()
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    with pytest.raises(errors.Unavailable) as error:
        await asyncio.wait_for(watching, 5)
    assert error.value.reason == "DRAINING"
    await draining


async def test_a_watch_begins_anew_where_an_engine_ended_it(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = router_cluster.engines
    watched, ended = router_cluster.engines[first].watch, asyncio.Event()
    seen: list[tuple[ContextChange, str]] = []

    async def ending(caller: Asker, include_program_contexts: bool) -> AsyncIterator[Any]:
        async for event in watched(caller, include_program_contexts):
            yield event
            if not ended.is_set():
                ended.set()
                raise errors.ResourceExhausted("too many calls at once", reason="QUEUE_FULL")

    async def watch() -> None:
        async for event in client.watch():
            seen.append((event.change, event.context_id))

    monkeypatch.setattr(router_cluster.engines[first], "watch", ending)
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    await made_on(router_cluster, first, context_id="a")
    await ended.wait()
    await until(lambda: seen[-2:] == [(ContextChange.RESET, ""), (ContextChange.EXISTS, "a")])
    watching.cancel()


async def test_a_closed_context_is_not_found_whatever_became_of_its_engine(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    await (await client.create(context_id="mine")).close()
    for address in router_cluster.engines:
        router_cluster.leave(address)
        await until(lambda address=address: address not in router_cluster.handles)  # type: ignore[misc]
        await router_cluster.register(address)
    with pytest.raises(errors.NotFound):
        await client.context("mine")


async def test_a_drain_waits_for_a_fill_that_is_being_placed(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def slowly(*_: Any) -> dict[Any, Any]:
        await gate.wait()
        return {}

    monkeypatch.setattr(Planner, "plans", slowly)
    context = await client.create()
    filling = asyncio.create_task(context.fill(LONG))
    await until(lambda: bool(router_cluster.programs.working))
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await asyncio.sleep(0.3)
    assert not draining.done()
    gate.set()
    assert (await filling).context.seq_len > 0
    await draining


async def test_an_engine_that_does_not_answer_delays_no_first_fill(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "PLAN_TIMEOUT_S", 0.05)
    context = await client.create(context_id="mine")
    (other,) = set(router_cluster.engines) - {await where(router_cluster, "mine")}
    never = asyncio.Event()
    monkeypatch.setattr(router_cluster.engines[other], "plan", lambda *_, **__: never.wait())
    async with asyncio.timeout(5):
        assert (await context.fill(LONG)).computed


async def test_caches_of_all_engines_are_cleared_while_one_leaves(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = router_cluster.engines

    async def leaving(_: Asker) -> int:
        router_cluster.leave(first)
        await until(lambda: first not in router_cluster.handles)
        return 3

    monkeypatch.setattr(router_cluster.handles[first].engine, "clear_cache", lambda _: asyncio.sleep(0, 0))
    monkeypatch.setattr(router_cluster.handles[second].engine, "clear_cache", leaving)
    assert await client.clear_cache() == 3


async def test_a_context_that_moves_is_not_closed_for_who_watches(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    _, second = router_cluster.engines
    await (await client.context(await made_on(router_cluster, second))).fill(LONG)
    await crowd(router_cluster, second)
    seen: list[ContextChange] = []

    async def watch() -> None:
        async for event in client.watch():
            if event.context_id == "mine":
                seen.append(event.change)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    context = await client.create(context_id="mine")
    await until(lambda: seen == [ContextChange.CREATED])
    await context.fill(LONG)
    assert await where(router_cluster, "mine") == second
    await context.close()
    await until(lambda: ContextChange.CLOSED in seen)
    assert set(seen[:-1]) <= {ContextChange.CREATED, ContextChange.CHANGED}
    watching.cancel()


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_without_engines(clock: Clock) -> None:
    router_cluster = RouterCluster(clock, None, ALONE)  # noqa: F811
    async with router_of(router_cluster), grpc.aio.insecure_channel(router_cluster.router) as channel:
        for rpc, fields in (
            ("CreateContext", {}),
            ("CreateContext", {"context_id": "c"}),
            ("GetContext", {"context_id": "c"}),
            ("Generate", {"context_id": "c"}),
            ("ListContexts", {}),
            ("Plan", {"text": "x"}),
            ("ListModels", {}),
            ("Tokenize", {"text": "x"}),
            ("GetSnapshot", {"name": "s"}),
        ):
            call = method_of(channel, rpc)(GetMessageClass(METHODS[rpc].input_type)(**fields), timeout=10)
            error = await refused(call)
            assert (rpc, error.reason) == (rpc, "ENGINE_LOST")
            assert (rpc, error.message) == (rpc, "no engine has come yet")
            assert error.retry_after_s


async def test_there_are_no_models_only_where_no_engine_is(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    """What a client is told is never that there are no models: they are unknown until an engine is there."""
    assert len(await client.models()) == 1
    for address in router_cluster.engines:
        router_cluster.leave(address)
    await until(lambda: not router_cluster.handles)
    for asking in (client.models(), client.tokenize("x"), client.create()):
        with pytest.raises(errors.Unavailable) as error:
            await asking
        assert (error.value.reason, error.value.message) == ("ENGINE_LOST", "no engine is there now")
        assert error.value.retry_after_s
    empty = RouterCluster(router_cluster.clock, None, ALONE)
    async with router_of(empty), jaxctx.aio.Client(empty.router, timeout_s=30) as early:
        for asking in (early.models(), early.model()):
            with pytest.raises(errors.Unavailable) as error:
                await asking
            assert (error.value.reason, error.value.message) == ("ENGINE_LOST", "no engine has come yet")
            assert error.value.retry_after_s


async def test_the_contexts_of_a_lost_engine(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    first, second = router_cluster.engines
    await crowd(router_cluster, second)
    lost = await client.create("Hello there", context_id="lost")
    assert await where(router_cluster, "lost") == first
    kept = await client.context(await made_on(router_cluster, second, context_id="kept"))
    router_cluster.leave(first)
    await until(lambda: first not in router_cluster.handles)
    with pytest.raises(errors.Unavailable) as error:
        await lost.fill("!", timeout_s=10)
    assert error.value.reason == "ENGINE_LOST"
    assert [each.id async for each in client.contexts()] == ["kept"]
    assert await kept.fill("Hello")
    again = await client.create("Hello there", context_id="lost")
    assert len(await again.tokens()) > 5
    await router_cluster.register(first)  # what it has is there again
    assert [each.id async for each in client.contexts()] == ["kept", "lost"]
    await again.fill("!")
    held = await router_cluster.engines[second].inspect(Asker(), "lost")
    assert held.context.seq_len == len(await again.tokens())


async def test_an_output_of_a_lost_engine_ends(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    context = await client.create("Tell: ")
    pieces = context.generate(max_tokens=1400, ignore_eos=True)
    await anext(pieces)
    router_cluster.leave(await where(router_cluster, context.id))
    with pytest.raises(errors.Unavailable) as error:
        async for _ in pieces:
            pass
    assert error.value.reason == "ENGINE_LOST"


async def test_what_an_engine_may_have_that_is_cut_off_is_not_found_nor_free(
    router_cluster: RouterCluster,  # noqa: F811
    client: jaxctx.aio.Client,
) -> None:
    cut_off, other = router_cluster.engines
    await made_on(router_cluster, cut_off, context_id="there")
    incarnation = router_cluster.handles[cut_off].engine._headers[-1][1]
    forwarder = Forwarder(int(cut_off.rpartition(":")[2]))
    port = await forwarder.begin()
    router_cluster.leave(cut_off)
    await until(lambda: cut_off not in router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        registered = EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation))
        await registered.read()
        forwarder.open.clear()
        await until(lambda: router_cluster.handles.keys() == {other})
        for call in (client.context("there", timeout_s=10), client.create(context_id="there", timeout_s=10)):
            with pytest.raises(errors.Unavailable) as error:
                await call
            assert error.value.reason == "ENGINE_LOST"
        assert await client.create("Hello")  # of an id that nobody can have
        forwarder.open.set()
        await until(lambda: len(router_cluster.handles) == 2)
        assert await client.context("there")
        registered.cancel()
        await until(lambda: router_cluster.handles.keys() == {other})
        with pytest.raises(errors.Unavailable):
            await client.context("there", timeout_s=10)


async def test_whoever_leaves_ends_the_work(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    context = await client.create("Tell: ")
    pieces = context.generate(max_tokens=1400, ignore_eos=True)
    await anext(pieces)
    assert sum(node.forwarded for node in router_cluster.handles.values()) == 1
    pieces.close()
    async with asyncio.timeout(5):
        while any([(await engine.stats()).running for engine in router_cluster.engines.values()]):
            await asyncio.sleep(0.01)
    await until(lambda: not any(node.forwarded for node in router_cluster.handles.values()))


async def test_deadlines_travel(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    context = await client.create("Tell: ")
    for engine in router_cluster.engines.values():
        engine.loop.post_if_running(lambda: time.sleep(0.6))
    with pytest.raises(errors.DeadlineExceeded):
        await context.complete(max_tokens=1400, ignore_eos=True, timeout_s=0.3)
    async with asyncio.timeout(5):
        while any([(await engine.stats()).running for engine in router_cluster.engines.values()]):
            await asyncio.sleep(0.01)


async def test_a_router_drains(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    context = await client.create("Tell: ")
    telling = asyncio.create_task(context.complete(max_tokens=300, ignore_eos=True))
    await until(lambda: any(node.forwarded for node in router_cluster.handles.values()))
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    for call in (client.create(timeout_s=10), context.fill("!", timeout_s=10), context.save("s", timeout_s=10)):
        with pytest.raises(errors.Unavailable) as error:
            await call
        assert error.value.reason == "DRAINING"
    assert (await context.refresh()).context_id == context.id
    await asyncio.wait_for(draining, 120)
    assert len((await asyncio.wait_for(telling, 1)).token_ids) == 300
    await context.close()


async def test_an_engine_drains(router_cluster: RouterCluster, client: jaxctx.aio.Client) -> None:  # noqa: F811
    """What is new goes elsewhere, at once; what is there says so, and can be read and closed."""
    first, second = router_cluster.engines
    await crowd(router_cluster, second)
    there = await client.create("Hello there", context_id="there")
    await there.save("s")
    assert await where(router_cluster, "there") == first
    await router_cluster.engines[first].drain()
    for _ in range(2):
        other = await client.create("Hello there")
        assert await where(router_cluster, other.id) == second
    for call in (there.fill("!", timeout_s=10), client.open("s", timeout_s=10)):
        with pytest.raises(errors.Unavailable) as error:
            await call
        assert error.value.reason == "DRAINING"
    assert await there.tokens()
    await there.close()


async def test_health(router_cluster: RouterCluster) -> None:  # noqa: F811
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def serving(service: str) -> bool:
            told = await stub.Check(health_pb2.HealthCheckRequest(service=f"jaxctx.v1.{service}"))
            return bool(told.status == health_pb2.HealthCheckResponse.SERVING)

        watch = stub.Watch(health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await serving("ContextService")
        for address in router_cluster.engines:
            router_cluster.leave(address)
        await until(lambda: not router_cluster.handles)
        for service in ("ContextService", "SnapshotService", "ModelService"):
            assert not await serving(service)
        assert await serving("SessionService")
        assert await serving("AdminService")
        told = await asyncio.wait_for(watch.read(), 5)
        assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


class TestWithKeys:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return USERS

    @pytest.fixture
    def cluster(self) -> Cluster:  # noqa: F811
        return Cluster(KEY)

    async def test_tenants_travel(self, router_cluster: RouterCluster) -> None:  # noqa: F811
        async with (
            jaxctx.aio.Client(router_cluster.router, api_key="alice", timeout_s=10) as alice,
            jaxctx.aio.Client(router_cluster.router, api_key="bob", timeout_s=10) as bob,
        ):
            for client in (alice, bob):
                await client.create("Hello", context_id="mine")
            assert await where(router_cluster, "mine", "alice")
            await alice.create(context_id="hers")
            with pytest.raises(errors.NotFound):
                await bob.context("hers")
            assert [each.id async for each in bob.contexts()] == ["mine"]
            with pytest.raises(errors.PermissionDenied):
                await bob.clear_cache()
        async with grpc.aio.insecure_channel(router_cluster.router) as channel:
            error = await refused(ContextServiceStub(channel).ListContexts(pb.ListContextsRequest()))
            assert isinstance(error, errors.Unauthenticated)
