"""Adapters behind a router: loaded on all engines, and contexts only where theirs is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jaxctx import errors
from jaxctx.engine.interface import PROGRAM_LABELS, Caller
from jaxctx.types import CreateContextRequest
from jaxctx.v1 import admin_service_pb2
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.router.migration import has_adapter_of
from jaxctx_server.router.placement import ContextKey
from jaxctx_server.service.admin import LocalAdminService
from tests.server.router.fake_router import FakeRouter

ALICE, ROOT = Caller("alice"), Caller("ops")


@pytest.fixture
def admin(router: FakeRouter) -> LocalAdminService:
    return LocalAdminService(router.lifecycle)


async def test_an_adapter_is_loaded_on_all_engines_of_its_model(router: FakeRouter, admin: LocalAdminService) -> None:
    router.add_engine("c", model_id="other")
    response = await admin.load_adapter(ROOT, admin_service_pb2.LoadAdapterRequest(name="sql"))
    assert (response.adapter.name, response.adapter.contexts) == ("sql", 4)  # two on each
    assert {address: dict(each.fake.adapter_revisions) for address, each in router.connections.items()} == {
        "a": {"sql": "content of sql"},
        "b": {"sql": "content of sql"},
        "c": {},
    }
    await admin.load_adapter(ROOT, admin_service_pb2.LoadAdapterRequest(name="fr", model_id="other"))
    listed = await admin.list_adapters(ROOT, admin_service_pb2.ListAdaptersRequest())
    assert [(each.name, each.contexts) for each in listed.adapters] == [("fr", 2), ("sql", 4)]
    await admin.unload_adapter(ROOT, admin_service_pb2.UnloadAdapterRequest(name="sql"))
    assert [router.connections[each].fake.adapter_revisions for each in "ab"] == [{}, {}]
    with pytest.raises(errors.NotFound) as raised:
        await admin.unload_adapter(ROOT, admin_service_pb2.UnloadAdapterRequest(name="sql"))
    assert raised.value.reason == "ADAPTER_NOT_FOUND"


async def test_an_error_of_one_engine_is_told_when_all_have_ended(router: FakeRouter, admin: LocalAdminService) -> None:
    router.connections["a"].errors["LoadAdapter"].append(errors.ResourceExhausted("full", reason="ADAPTER_SLOTS"))
    with pytest.raises(errors.ResourceExhausted, match="full"):
        await admin.load_adapter(ROOT, admin_service_pb2.LoadAdapterRequest(name="sql"))
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(adapter="sql"))
    assert created.context.engine_id == "b"


async def test_without_engines(empty_router: FakeRouter) -> None:
    admin = LocalAdminService(empty_router.lifecycle)
    with pytest.raises(errors.Unavailable):
        await admin.load_adapter(ROOT, admin_service_pb2.LoadAdapterRequest(name="sql"))
    with pytest.raises(errors.Unavailable):
        await admin.unload_adapter(ROOT, admin_service_pb2.UnloadAdapterRequest(name="sql"))
    assert (await admin.list_adapters(ROOT, admin_service_pb2.ListAdaptersRequest())).slots == 0


async def give(router: FakeRouter, address: str, **revisions: str) -> None:
    """Adapters of an engine, which the router knows by its next report."""
    router.connections[address].fake.adapter_revisions.update(revisions)
    await router.connections[address].stats()


@pytest.mark.parametrize("field", ["adapter", "model_id"])
async def test_a_context_is_made_where_its_adapter_is(router: FakeRouter, field: str) -> None:
    await give(router, "b", sql="1")
    for _ in range(3):
        created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(**{field: "sql"}))
        assert created.context.engine_id == "b"
        assert router.connections["b"].fake.calls[-1][2].adapter == "sql"
    await router.contexts.plan(ALICE, pb.PlanRequest(text="x", **{field: "sql"}))
    assert not router.connections["a"].requests
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.create_context(ALICE, pb.CreateContextRequest(**{field: "none"}))
    assert raised.value.reason == ("ADAPTER_NOT_FOUND" if field == "adapter" else "MODEL_NOT_FOUND")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.plan(ALICE, pb.PlanRequest(text="x", **{field: "none"}))
    assert raised.value.reason == ("ADAPTER_NOT_FOUND" if field == "adapter" else "MODEL_NOT_FOUND")


async def test_a_first_fill_moves_a_context_only_to_where_its_adapter_is(router: FakeRouter) -> None:
    await give(router, "a", sql="1")
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(adapter="sql"))
    await router.contexts.fill(ALICE, pb.FillRequest(context_id=created.context.context_id, text="abcd"))
    assert not router.connections["b"].requests
    await give(router, "b", sql="1")
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(adapter="sql"))
    await router.contexts.fill(ALICE, pb.FillRequest(context_id=created.context.context_id, text="abcd"))
    assert [request.adapter for request in router.connections["b"].requests_of("Plan")] == ["sql"]


async def create_with_sql(router: FakeRouter, **fields: str) -> Context:
    """A context that was just made on the engine "a" with the adapter "sql" of content "1"; most is cached on "b"."""
    await give(router, "a", sql="1")
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(**fields))  # type: ignore[arg-type]
    assert (created.context.engine_id, created.context.adapter_revision) == ("a", "1")
    router.connections["b"].responses["Plan"] = pb.PlanResponse(resident=100, pages_needed=1, pages_available=99)
    return created.context


async def fill_first(router: FakeRouter, context: Context) -> tuple[str, str]:
    """The engine of a context after its first fill, and the content of its adapter there."""
    filled = await router.contexts.fill(ALICE, pb.FillRequest(context_id=context.context_id, text="abcd"))
    return filled.context.engine_id, filled.context.adapter_revision


@pytest.mark.parametrize("field", ["adapter", "model_id"])
async def test_a_first_fill_moves_a_context_only_to_where_its_adapter_has_the_same_content(
    router: FakeRouter, field: str
) -> None:
    context = await create_with_sql(router, **{field: "sql"})
    await give(router, "b", sql="2")  # an operator replaces it: one engine has it before the other
    assert await fill_first(router, context) == ("a", "1")
    await give(router, "b", sql="1")
    assert await fill_first(router, await create_with_sql(router, **{field: "sql"})) == ("b", "1")


async def test_a_first_fill_finds_an_adapter_that_was_replaced_just_now(router: FakeRouter) -> None:
    context = await create_with_sql(router, adapter="sql")
    await give(router, "b", sql="1")
    router.connections["b"].fake.adapter_revisions["sql"] = "2"  # which the router does not know yet
    assert await fill_first(router, context) == ("a", "1")
    assert ("alice", context.context_id) not in router.connections["b"].fake.contexts


async def test_a_first_fill_of_a_context_whose_adapter_is_loaded_nowhere_any_more(router: FakeRouter) -> None:
    context = await create_with_sql(router, adapter="sql")
    router.connections["a"].fake.adapter_revisions.clear()
    await give(router, "a")
    assert await fill_first(router, context) == ("a", "1")


async def test_a_context_moves_only_to_an_engine_with_the_content_of_its_adapter(router: FakeRouter) -> None:
    await give(router, "a", sql="1")
    await give(router, "b", sql="2")
    context = Context(adapter="sql", adapter_revision="1")
    assert [has_adapter_of(router.handle(each), context) for each in "ab"] == [True, False]
    await give(router, "b", renamed="1")
    assert has_adapter_of(router.handle("b"), context)
    assert has_adapter_of(router.handle("b"), Context())


async def test_a_context_that_switched_needs_the_content_of_all_its_adapters(router: FakeRouter) -> None:
    await give(router, "a", sql="1", fr="2")
    await give(router, "b", sql="1")
    spans = [{"adapter": "fr", "adapter_revision": "2"}, {"start": 5}, {"start": 7, "adapter_revision": "1"}]
    context = Context(adapter="sql", adapter_revision="1", adapter_spans=spans)
    assert [has_adapter_of(router.handle(each), context) for each in "ab"] == [True, False]


@pytest.mark.parametrize("known", [True, False])
async def test_switching_is_for_the_engine_that_has_the_context(router: FakeRouter, known: bool) -> None:
    await router.connections["b"].fake.create(ALICE, CreateContextRequest(context_id="x"))
    if known:
        await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id="x"))
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ALICE, pb.SwitchAdapterRequest(context_id="x", adapter="sql"))
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    await give(router, "b", sql="1")
    response = await router.contexts.switch_adapter(ALICE, pb.SwitchAdapterRequest(context_id="x", adapter="sql"))
    assert (response.context.adapter, response.context.engine_id) == ("sql", "b")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ROOT, pb.SwitchAdapterRequest(context_id="x"))
    assert raised.value.reason == "CONTEXT_NOT_FOUND"


async def test_a_switch_moves_a_context_to_where_the_adapter_is(router: FakeRouter) -> None:
    """Not to where the contents of its earlier ones are not, and only if no other call uses it."""
    context_id = await create_on_a(router)
    switch = pb.SwitchAdapterRequest(context_id=context_id, adapter="fr")
    await give(router, "b", fr="2")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ALICE, switch)
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    assert not router.connections["a"].requests_of("Save")

    await give(router, "b", other="1")
    router.placements.forget(ContextKey("alice", context_id))  # as a router that has just started
    with router.placements.in_use(ContextKey("alice", context_id)), pytest.raises(errors.NotFound):
        await router.contexts.switch_adapter(ALICE, switch)
    response = await router.contexts.switch_adapter(ALICE, switch)
    assert (response.context.adapter, response.context.engine_id) == ("fr", "b")
    assert [("alice", context_id) in router.connections[each].fake.contexts for each in "ab"] == [False, True]


async def test_a_switch_that_cannot_move_leaves_the_context_where_it_was(router: FakeRouter) -> None:
    context_id = await create_on_a(router)
    await give(router, "b", fr="2", other="1")
    router.connections["b"].errors["Take"] = [errors.ResourceExhausted("it is full")]
    switch = pb.SwitchAdapterRequest(context_id=context_id, adapter="fr")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ALICE, switch)
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    kept = await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id=context_id))
    assert (kept.context.adapter, kept.context.engine_id) == ("sql", "a")


async def test_a_switch_that_is_cancelled_lets_the_move_end(router: FakeRouter) -> None:
    """The caller is gone, by a deadline too; the context is on one engine afterwards, and switches there."""
    context_id = await create_on_a(router)
    await give(router, "b", fr="2", other="1")
    gate = router.connections["b"].gates["Take"] = asyncio.Event()
    switch = pb.SwitchAdapterRequest(context_id=context_id, adapter="fr")
    switching = asyncio.create_task(router.contexts.switch_adapter(ALICE, switch))
    async with asyncio.timeout(10):
        while not router.connections["b"].requests_of("Take"):
            await asyncio.sleep(0)
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching
        gate.set()
        kept = await router.contexts.get_context(ALICE, pb.GetContextRequest(context_id=context_id))
        assert kept.context.engine_id == "b"
        assert (await router.contexts.switch_adapter(ALICE, switch)).context.adapter == "fr"
    assert [("alice", context_id) in router.connections[each].fake.contexts for each in "ab"] == [False, True]


@pytest.mark.parametrize("why", ["of a program", "leaving", "all others leave"])
async def test_contexts_that_a_switch_does_not_move(router: FakeRouter, why: str) -> None:
    context_id = await create_on_a(router)
    await give(router, "b", fr="2", other="1")
    if why == "of a program":
        held = router.connections["a"].fake.contexts["alice", context_id]
        held.info = replace(held.info, labels=dict(PROGRAM_LABELS))
    else:
        router.handle("a" if why == "leaving" else "b").draining = True
    switch = pb.SwitchAdapterRequest(context_id=context_id, adapter="fr")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ALICE, switch)
    assert raised.value.reason == "ADAPTER_NOT_FOUND"
    assert not router.connections["a"].requests_of("Save")


async def test_no_other_tenant_moves_a_context(router: FakeRouter) -> None:
    context_id = await create_on_a(router)
    await give(router, "b", fr="2", other="1")
    with pytest.raises(errors.NotFound) as raised:
        await router.contexts.switch_adapter(ROOT, pb.SwitchAdapterRequest(context_id=context_id, adapter="fr"))
    assert raised.value.reason == "CONTEXT_NOT_FOUND"
    assert not router.connections["a"].requests_of("Save")


async def create_on_a(router: FakeRouter) -> str:
    """A context with the adapter sql, whose content is 1, on the engine "a"."""
    await give(router, "a", sql="1")
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest(adapter="sql"))
    assert created.context.engine_id == "a"
    context_id: str = created.context.context_id
    held = router.connections["a"].fake.contexts["alice", context_id]
    held.info = replace(held.info, adapter="sql", adapter_revision="1")
    return context_id


async def test_a_first_fill_moves_no_context_that_switched(router: FakeRouter) -> None:
    for address in "ab":
        await give(router, address, sql="1")
    created = await router.contexts.create_context(ALICE, pb.CreateContextRequest())
    context_id = created.context.context_id
    await router.contexts.switch_adapter(ALICE, pb.SwitchAdapterRequest(context_id=context_id, adapter="sql"))
    await router.contexts.fill(ALICE, pb.FillRequest(context_id=context_id, text="abcd"))
    assert not [each for each in "ab" if router.connections[each].requests_of("Plan")]


async def test_models_of_all_engines_and_their_adapters_are_listed(router: FakeRouter) -> None:
    from jaxctx.v1 import model_service_pb2

    await give(router, "a", sql="1")
    await give(router, "b", sql="1", fr="2")
    listed = await router.models.list_models(ALICE, model_service_pb2.ListModelsRequest())
    assert [(each.model_id, each.parent_model_id) for each in listed.models] == [
        ("fake", ""),
        ("fr", "fake"),
        ("sql", "fake"),
    ]
    got = await router.models.get_model(ALICE, model_service_pb2.GetModelRequest(model_id="fr"))
    assert got.model.adapter_revision == "2"
