"""ContextService of a router: each call at the engine that has the context, and lists and plans of all engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxctx import errors
from jaxctx.engine.interface import Caller
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx.v1.generation_pb2 import FINISH_REASON_LENGTH, Usage
from jaxctx_server.call_record import CURRENT_RECORD, CallRecord
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.router.context_service import RouterContextService, compare_tokens
from jaxctx_server.router.placement import ContextKey
from tests.server.router.fake_router import FakeRouter

ALICE = Caller("alice", 1060.0)
BOB = Caller("bob", 1060.0)


async def create_on(router: FakeRouter, address: str, context_id: str, tokens: tuple[int, ...] = ()) -> None:
    """A context on an engine, of which the router has not heard."""
    engine = router.connections[address].fake
    await engine.create(ALICE, CreateContextRequest(context_id=context_id))
    await engine.fill(ALICE, context_id, tokens)


def address_of(router: FakeRouter, context_id: str) -> str | None:
    placement = router.placements.get(ContextKey("alice", context_id))
    return None if placement is None else placement.handle.id


async def test_a_context_is_created_on_the_least_loaded_engine_and_remembered_there(router: FakeRouter) -> None:
    router.handle("a").forwarded = 1
    response = await router.contexts.create_context(ALICE, pb.CreateContextRequest(salt="s"))
    assert response.context.engine_id == "b"
    placement = router.placements.get(ContextKey("alice", response.context.context_id))
    assert placement is not None
    assert placement.handle is router.handle("b")
    assert placement.created == pb.CreateContextRequest(context_id=response.context.context_id, salt="s")
    (_, caller, _) = router.connections["b"].requests[-1]
    assert caller == ALICE


async def test_a_context_of_a_model_is_created_on_an_engine_of_it(router: FakeRouter) -> None:
    router.add_engine("c", model_id="other")
    response = await router.contexts.create_context(ALICE, pb.CreateContextRequest(model_id="other"))
    assert response.context.engine_id == "c"
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.create_context(ALICE, pb.CreateContextRequest(model_id="none"))
    assert raised.value.reason == "MODEL_NOT_FOUND"


REQUESTS: dict[str, Any] = {  # of one context, by the method of the service
    "fill": pb.FillRequest(context_id="x", tokens={"ids": [1]}),
    "flush": pb.FlushRequest(context_id="x"),
    "forward": pb.ForwardRequest(context_id="x", tokens=[1]),
    "truncate": pb.TruncateRequest(context_id="x"),
    "rewind": pb.RewindRequest(context_id="x"),
    "switch_adapter": pb.SwitchAdapterRequest(context_id="x"),
    "get_context": pb.GetContextRequest(context_id="x"),
    "update_context": pb.UpdateContextRequest(context_id="x", priority=1),
    "reserve_pages": pb.ReservePagesRequest(context_id="x", pages=1),
    "commit_pages": pb.CommitPagesRequest(context_id="x", pages=1),
    "release_pages": pb.ReleasePagesRequest(context_id="x", pages=1),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_response_says_where_the_context_is_and_that_is_remembered(router: FakeRouter, name: str) -> None:
    await create_on(router, "b", "x")
    request = REQUESTS[name]
    response = await getattr(router.contexts, name)(ALICE, request)
    assert (response.context.context_id, response.context.engine_id) == ("x", "b")
    assert address_of(router, "x") == "b"
    asked = len(router.connections["a"].requests)
    await getattr(router.contexts, name)(ALICE, request)
    assert len(router.connections["a"].requests) == asked, "the second call goes to the context's engine at once"


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_context_of_another_tenant_is_not_found(router: FakeRouter, name: str) -> None:
    await create_on(router, "b", "x")
    await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id="x"))
    with pytest.raises(errors.NotFound):
        await getattr(router.contexts, name)(BOB, REQUESTS[name])
    assert router.placements.get(ContextKey("bob", "x")) is None


async def test_the_children_of_a_fork_are_remembered_where_their_parent_is(router: FakeRouter) -> None:
    await create_on(router, "b", "x")
    response = await router.contexts.fork(ALICE, pb.ForkRequest(context_id="x", child_ids=["y", "z"]))
    assert [context.engine_id for context in response.contexts] == ["b", "b"]
    assert (address_of(router, "y"), address_of(router, "z")) == ("b", "b")


async def test_pieces_of_an_output_say_where_its_context_is(router: FakeRouter) -> None:
    await create_on(router, "b", "x")
    pieces = [piece async for piece in router.contexts.generate(ALICE, pb.GenerateRequest(context_id="x"))]
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].context.engine_id == "b"
    assert address_of(router, "x") == "b"


async def test_outputs_and_tokens_are_counted_on_a_router_as_well(router: FakeRouter) -> None:
    generations, record = GenerationMetrics(), CallRecord()
    contexts = RouterContextService(
        router.forwarder, router.lister, router.planner, router.watcher, router.placements, router.migrator, generations
    )
    engine = router.connections["a"]  # as in a process of its own: its services would write to this record, too
    engine.responses["Fill"] = pb.FillResponse(resident=1, restored=2, computed=2, context=Context(context_id="x"))
    engine.streams["Generate"] = asyncio.Queue()
    usage = Usage(prompt_tokens=5, computed_tokens=0, completion_tokens=2)
    for part in (
        pb.GenerateResponse(token_ids=[7]),
        pb.GenerateResponse(token_ids=[8], finish=FINISH_REASON_LENGTH, usage=usage),
        None,
    ):
        engine.streams["Generate"].put_nowait(part)
    token = CURRENT_RECORD.set(record)
    try:
        await contexts.fill(ALICE, pb.FillRequest(context_id="x", text="AB"))
        assert (record.prompt_tokens, record.cached_tokens) == (5, 3)
        assert len([part async for part in contexts.generate(ALICE, pb.GenerateRequest(context_id="x"))]) == 2
        engine.errors["Generate"] = [errors.ResourceExhausted("full", reason="QUEUE_FULL")]
        with pytest.raises(errors.ResourceExhausted):
            await anext(contexts.generate(ALICE, pb.GenerateRequest(context_id="x")))
    finally:
        CURRENT_RECORD.reset(token)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (5, 3, 2)
    assert (record.model_id, record.finish_reasons) == ("fake", ["length"])
    assert (generations.first_token.count, generations.between_tokens.count) == (1, 1)
    assert dict(generations.outputs) == {"length": 1, "error": 1}


async def test_an_output_that_is_read_no_further_ends_on_its_engine(router: FakeRouter) -> None:
    await create_on(router, "b", "x")
    pieces = router.contexts.generate(ALICE, pb.GenerateRequest(context_id="x"))
    await anext(pieces)
    assert router.handle("b").forwarded == 1
    await pieces.aclose()
    assert router.connections["b"].fake.cancelled == ["generate"]
    assert router.handle("b").forwarded == 0


async def test_a_closed_context_is_forgotten(router: FakeRouter) -> None:
    await create_on(router, "b", "x")
    await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id="x"))
    await router.contexts.close_context(ALICE, pb.CloseContextRequest(context_id="x"))
    assert address_of(router, "x") is None
    with pytest.raises(errors.NotFound):
        await router.contexts.close_context(ALICE, pb.CloseContextRequest(context_id="x"))


async def test_a_context_that_could_not_be_closed_is_not_forgotten(router: FakeRouter) -> None:
    await create_on(router, "b", "x")
    await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id="x"))
    router.connections["b"].errors["CloseContext"] = [errors.Unavailable("it is gone", reason="ENGINE_LOST")]
    with pytest.raises(errors.Unavailable):
        await router.contexts.close_context(ALICE, pb.CloseContextRequest(context_id="x"))
    assert address_of(router, "x") == "b"


async def listed(router: FakeRouter, **fields: Any) -> pb.ListContextsResponse:
    return await router.contexts.list_contexts(ALICE, pb.ListContextsRequest(**fields))


async def test_contexts_of_all_engines_are_listed_in_the_order_of_their_ids(router: FakeRouter) -> None:
    for address, context_id in (("a", "c3"), ("b", "c1"), ("a", "c2"), ("b", "c4")):
        await create_on(router, address, context_id)
    first = await listed(router, limit=3)
    assert [(context.context_id, context.engine_id) for context in first.contexts] == [
        ("c1", "b"),
        ("c2", "a"),
        ("c3", "a"),
    ]
    assert first.next_page_token == "c3"
    last = await listed(router, limit=3, page_token="c3")
    assert [context.context_id for context in last.contexts] == ["c4"]
    assert last.next_page_token == ""


async def test_a_list_asks_each_engine_as_the_request_says(router: FakeRouter) -> None:
    await listed(router, limit=3, page_token="c", include_program_contexts=True)
    for connection in router.connections.values():
        asked = pb.ListContextsRequest(limit=4, page_token="c", include_program_contexts=True)
        assert connection.requests_of("ListContexts") == [asked]


async def test_no_client_learns_of_other_tenants(router: FakeRouter) -> None:
    with pytest.raises(errors.PermissionDenied, match="tenants_only"):
        await listed(router, tenants_only=True)
    assert not any(connection.requests for connection in router.connections.values())


async def test_of_a_context_on_two_engines_the_latest_version_is_listed(router: FakeRouter) -> None:
    for address, version in (("a", 7), ("b", 5)):
        router.connections[address].responses["ListContexts"] = pb.ListContextsResponse(
            contexts=[Context(context_id="x", version=version)]
        )
    (context,) = (await listed(router)).contexts
    assert (context.version, context.engine_id) == (7, "a")


async def test_contexts_on_one_engine_are_compared_there(router: FakeRouter) -> None:
    response = await router.contexts.compare(ALICE, pb.CompareRequest(a="x", b="y"))
    assert (response.common_tokens, response.shared_pages) == (5, 1)


async def test_contexts_on_two_engines_are_compared_by_their_tokens(router: FakeRouter) -> None:
    await create_on(router, "a", "x", (1, 2, 3))
    await create_on(router, "b", "y", (1, 2, 4, 5))
    for connection in router.connections.values():
        connection.errors["Compare"] = [errors.NotFound("no such context")]
    response = await router.contexts.compare(ALICE, pb.CompareRequest(a="x", b="y"))
    assert response == pb.CompareResponse(common_tokens=2, length_a=3, length_b=4)


async def test_contexts_on_two_engines_are_compared_while_a_third_is_away(router: FakeRouter) -> None:
    await create_on(router, "a", "x", (1, 2, 3))
    await create_on(router, "b", "y", (1, 2, 4, 5))
    for context_id in ("x", "y"):
        await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id=context_id))
    lost = errors.Unavailable("the engine does not answer", reason="ENGINE_LOST")
    missing = errors.NotFound("no such context")
    router.connections["a"].errors["Compare"], router.connections["b"].errors["Compare"] = [lost], [missing]
    response = await router.contexts.compare(ALICE, pb.CompareRequest(a="x", b="y"))
    assert response == pb.CompareResponse(common_tokens=2, length_a=3, length_b=4)
    stopped = errors.Unavailable("it stops", reason="NOT_SERVING")
    router.connections["a"].errors["Compare"], router.connections["b"].errors["Compare"] = [stopped], [missing]
    with pytest.raises(errors.Unavailable):
        await router.contexts.compare(ALICE, pb.CompareRequest(a="x", b="y"))


async def test_a_context_that_is_nowhere_cannot_be_compared(router: FakeRouter) -> None:
    await create_on(router, "a", "x", (1, 2, 3))
    for connection in router.connections.values():
        connection.errors["Compare"] = [errors.NotFound("no such context")]
    with pytest.raises(errors.NotFound):
        await router.contexts.compare(ALICE, pb.CompareRequest(a="x", b="y"))


@pytest.mark.parametrize(
    ("a", "b", "common"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)]
)
def test_the_tokens_that_two_contexts_have_in_common(a: list[int], b: list[int], common: int) -> None:
    assert compare_tokens(a, b) == pb.CompareResponse(common_tokens=common, length_a=len(a), length_b=len(b))


async def test_a_plan_of_a_new_context_is_that_of_the_engine_that_would_get_it(router: FakeRouter) -> None:
    router.connections["a"].responses["Plan"] = pb.PlanResponse(resident=1)
    router.connections["b"].responses["Plan"] = pb.PlanResponse(resident=2)
    assert (await router.contexts.plan(ALICE, pb.PlanRequest(text="x"))).resident == 2


async def test_a_plan_of_a_context_is_that_of_its_engine(router: FakeRouter) -> None:
    await create_on(router, "a", "x")
    await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id="x"))
    router.connections["a"].responses["Plan"] = pb.PlanResponse(resident=1)
    router.connections["b"].responses["Plan"] = pb.PlanResponse(resident=2)
    assert (await router.contexts.plan(ALICE, pb.PlanRequest(context_id="x", text="x"))).resident == 1


async def test_a_plan_that_every_engine_refuses_ends_with_an_engines_error(router: FakeRouter) -> None:
    for connection in router.connections.values():
        connection.errors["Plan"] = [errors.InvalidArgument.field("text", "is too long")] * 2
    with pytest.raises(errors.InvalidArgument):
        await router.contexts.plan(ALICE, pb.PlanRequest(text="x"))


async def test_changes_are_those_of_the_watcher(router: FakeRouter) -> None:
    for connection in router.connections.values():
        connection.streams["WatchContexts"] = asyncio.Queue()
    changes = router.contexts.watch_contexts(ALICE, pb.WatchContextsRequest())
    change = pb.WatchContextsResponse(context_id="x", context=Context(context_id="x"))
    router.connections["b"].streams["WatchContexts"].put_nowait(change)
    assert (await anext(changes)).context.engine_id == "b"
    await changes.aclose()
