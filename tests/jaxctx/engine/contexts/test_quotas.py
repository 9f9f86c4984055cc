"""Quotas of a tenant and the budget of its pins: what is charged, what is refused, what is given back."""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.contexts import quotas as quotas_module
from jaxctx.engine.contexts.quotas import Quotas, hidden_tenant
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import InvalidArgument, ResourceExhausted
from jaxctx.types import CreateContextRequest, GenerateRequest, Ttl, UpdateContextRequest
from tests.engines import context_info
from tests.jaxctx.cache.mutations import Mutation

ME, OTHER = Caller("me"), Caller("other")
CONFIG = EngineConfig(pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=512, pinned_pages_per_tenant=20)


# --- the account ------------------------------------------------------------------------------------------------------


def test_charges_against_a_plain_dict() -> None:
    source, quotas, plain = random.Random(3), Quotas(CONFIG), {}
    for _ in range(5000):
        payer, holder, pages = source.choice("ab"), source.randrange(5), source.randrange(12)
        tenant = source.choice((payer, hidden_tenant(payer)))
        if source.random() < 0.3:
            quotas.charge(tenant, holder, 0)
            plain.pop((payer, holder), None)
        else:
            more = pages - plain.get((payer, holder), 0)
            used = sum(charge for (owner, _), charge in plain.items() if owner == payer)
            if more <= 20 - used:
                quotas.check_pin(tenant, holder, pages)
                quotas.charge(tenant, holder, pages)
                plain[payer, holder] = pages
            else:
                with pytest.raises(ResourceExhausted, match=f" {20 - used} remain") as error:
                    quotas.check_pin(tenant, holder, pages)
                assert error.value.reason == "PIN_BUDGET"
        for owner in "ab":
            assert (
                quotas.pinned(owner)
                == quotas.pinned(hidden_tenant(owner))
                == sum(charge for (each, _), charge in plain.items() if each == owner)
            )
    for tenant, holder in plain:
        quotas.charge(tenant, holder, 0)
    assert not any(quotas._charges.values())


def test_snapshot_quotas_name_what_is_exceeded() -> None:
    quotas = Quotas(replace(CONFIG, max_snapshots_per_tenant=3, max_snapshot_bytes_per_tenant=1000))
    quotas.check_snapshots(count=3, size_bytes=1000)
    for count, size, name in (
        (4, 0, "max_snapshots_per_tenant is 3"),
        (1, 1001, "max_snapshot_bytes_per_tenant is 1000"),
    ):
        with pytest.raises(ResourceExhausted, match=name) as error:
            quotas.check_snapshots(count=count, size_bytes=size)
        assert (error.value.reason, error.value.retry_after_s) == ("QUOTA", None)  # they are kept for days
    Quotas(CONFIG).check_snapshots(count=10**9, size_bytes=10**15)


def test_half_of_a_snapshot_quota_is_near_its_limit() -> None:
    quotas = Quotas(replace(CONFIG, max_snapshots_per_tenant=3, max_snapshot_bytes_per_tenant=1000))
    assert quotas.limits_snapshots
    assert not quotas.is_near_snapshot_limit(1, 499)
    assert quotas.is_near_snapshot_limit(2, 0)
    assert quotas.is_near_snapshot_limit(0, 500)
    assert Quotas(replace(CONFIG, max_snapshots_per_tenant=0)).limits_snapshots
    assert not Quotas(CONFIG).limits_snapshots
    assert not Quotas(CONFIG).is_near_snapshot_limit(10**9, 10**15)


@pytest.mark.parametrize("name", ["max_contexts_per_tenant", "pinned_pages_per_tenant", "max_snapshots_per_tenant"])
def test_a_negative_quota_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        replace(CONFIG, **{name: -1})


def test_half_of_the_pages_may_be_pinned_by_default() -> None:
    assert EngineConfig(pages=9).pin_budget == 4
    assert EngineConfig(pages=9, pinned_pages_per_tenant=0).pin_budget == 0


MUTATIONS = [
    Mutation("what the holder has counts twice", Quotas, "check_pin", "[holder]", "[None]"),
    Mutation("what is hidden is not checked", Quotas, "check_pin", "owner_of(tenant)", "tenant"),
    Mutation("what is hidden is nobody's", Quotas, "charge", "owner_of(tenant)", "tenant"),
    Mutation(
        "who shrinks pays on",
        Quotas,
        "charge",
        "charges[holder] = pages",
        "charges[holder] = max(pages, charges[holder])",
    ),
    Mutation(
        "a charge adds to the one before",
        Quotas,
        "charge",
        "charges[holder] = pages",
        "charges.update({holder: pages})",
    ),
    Mutation("a holder that pays nothing stays", Quotas, "charge", "if not pages:", "if False:"),
    Mutation("one too few", quotas_module, "_check", "count > limit", "count >= limit"),
    Mutation("bytes are not counted", Quotas, "check_snapshots", "_tenant, size_bytes, None)", "_tenant, 0, None)"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    with pytest.raises((AssertionError, ResourceExhausted, pytest.fail.Exception)):
        test_charges_against_a_plain_dict()
        test_snapshot_quotas_name_what_is_exceeded()


# --- in an engine -----------------------------------------------------------------------------------------------------


async def filled(engine: LocalEngine, pages: int, caller: Caller = ME, token: int = 1, **options: object) -> str:
    info = await engine.create(caller, CreateContextRequest(**options))  # type: ignore[arg-type]
    await engine.fill(caller, info.context_id, [token] * pages * 16)
    return info.context_id


async def refused(call: Awaitable[object], remaining: int) -> None:
    with pytest.raises(ResourceExhausted, match=f" {remaining} remain") as error:
        await call
    assert error.value.reason == "PIN_BUDGET"


async def generate(engine: LocalEngine, context_id: str, tokens: int) -> None:
    async for _ in engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=tokens, ignore_eos=True)):
        pass


async def test_pins_are_charged_what_they_hold_and_refused_beyond_the_budget(make_engine) -> None:
    engine = make_engine(CONFIG)
    charged = engine.core.lifecycle.quotas.pinned
    a, b = await filled(engine, 8), await filled(engine, 8)  # the same pages
    assert (await engine.update(ME, a, UpdateContextRequest(pinned=True))).pinned
    assert (await engine.update(ME, b, UpdateContextRequest(pinned=True))).pinned_until is None
    assert charged("me") == 16
    c = await filled(engine, 5, token=3)
    before = await context_info(engine, ME, c)
    await refused(engine.update(ME, c, UpdateContextRequest(pinned=True, priority=7)), remaining=4)
    assert await context_info(engine, ME, c) == before
    theirs = await filled(engine, 5, OTHER)
    await engine.update(OTHER, theirs, UpdateContextRequest(pinned=True))  # another tenant's is its own
    await engine.rewind(ME, b, 4 * 16)
    assert charged("me") == 12
    await engine.update(ME, c, UpdateContextRequest(pinned=True))
    await engine.update(ME, a, UpdateContextRequest(pinned=False))
    await engine.close(ME, c)
    assert (charged("me"), charged("other")) == (4, 5)


async def test_growth_of_a_pinned_context_is_charged_when_it_is_admitted(make_engine) -> None:
    engine = make_engine(CONFIG)
    charged = engine.core.lifecycle.quotas.pinned
    a = await filled(engine, 10, pinned=True)
    before = await context_info(engine, ME, a)
    await refused(engine.fill(ME, a, [2] * 11 * 16), remaining=10)
    await refused(engine.reserve_pages(ME, a, 11), remaining=10)
    await refused(generate(engine, a, 10 * 16 + 2), remaining=10)
    after = await context_info(engine, ME, a)
    assert after == replace(before, used_at=after.used_at)
    task = asyncio.create_task(generate(engine, a, 10 * 16 + 1))  # the last token is not computed
    while charged("me") == 10:
        await asyncio.sleep(0.001)
    assert charged("me") == 20  # at once, though it does not hold them yet
    assert (await engine.create(ME, CreateContextRequest(pinned=True))).pinned  # an empty one costs nothing
    await task
    assert charged("me") == 20
    await engine.rewind(ME, a, 16)
    await engine.reserve_pages(ME, a, 5)
    assert charged("me") == 6
    await engine.release_pages(ME, a, 5)
    assert charged("me") == 1


async def test_a_cancelled_writer_gives_back_what_it_was_promised(make_engine) -> None:
    engine = make_engine(CONFIG)
    a = await filled(engine, 1, pinned=True)
    stream = engine.generate(ME, GenerateRequest(context_id=a, max_tokens=300, ignore_eos=True))
    await anext(stream)
    assert engine.core.lifecycle.quotas.pinned("me") == 20
    await refused(engine.update(ME, await filled(engine, 1, token=2), UpdateContextRequest(pinned=True)), remaining=0)
    await stream.aclose()
    info = await context_info(engine, ME, a)
    assert engine.core.lifecycle.quotas.pinned("me") == info.committed_pages + info.working_pages < 20


async def test_a_pin_with_an_end_survives_a_flood_until_then(make_engine, clock) -> None:
    engine = make_engine(CONFIG)
    pinned = await filled(engine, 10, pinned=True, pin_s=100)
    idle = await filled(engine, 10, token=2)
    info = await context_info(engine, ME, pinned)
    assert info.pinned_until.timestamp() == pytest.approx(clock.wall() + 100, abs=2)

    async def flood() -> tuple[str, str]:
        await engine.close(OTHER, await filled(engine, 30, OTHER, token=4))
        await engine.close(OTHER, await filled(engine, 31, OTHER, token=5))
        await engine.reserve_pages(
            OTHER, (await engine.create(OTHER, CreateContextRequest(context_id="x"))).context_id, 54
        )
        await engine.close(OTHER, "x")
        return (await context_info(engine, ME, pinned)).state.value, (await context_info(engine, ME, idle)).state.value

    assert await flood() == ("idle", "suspended")
    clock.offset += 100
    info = await context_info(engine, ME, pinned)
    assert (info.pinned, info.pinned_until, info.committed_pages) == (False, None, 10)  # evictable, not closed
    assert engine.core.lifecycle.quotas.pinned("me") == 0
    await engine.reserve_pages(OTHER, (await engine.create(OTHER, CreateContextRequest())).context_id, 64)
    assert (await context_info(engine, ME, pinned)).state.value == "suspended"


async def test_a_pin_can_be_given_another_end(make_engine, clock) -> None:
    engine = make_engine(CONFIG)
    a = await filled(engine, 2, pinned=True, pin_s=10, ttl=Ttl(1000))
    assert (
        await engine.update(ME, a, UpdateContextRequest(pinned=True, pin_s=50))
    ).pinned_until.timestamp() == pytest.approx(clock.wall() + 50, abs=2)
    clock.offset += 20
    assert (await engine.update(ME, a, UpdateContextRequest(pinned=True))).pinned_until is None
    clock.offset += 100
    assert (await context_info(engine, ME, a)).pinned
    clock.offset += 1000
    assert await engine.list(ME) == []
    assert engine.core.lifecycle.quotas.pinned("me") == 0


async def test_contexts_of_a_tenant_are_counted_and_forks_too(make_engine) -> None:
    engine = make_engine(replace(CONFIG, max_contexts_per_tenant=3))
    a = await filled(engine, 1)
    await engine.fork(ME, a)
    for call in (
        engine.fork(ME, a, n=2),
        generate_many(engine, a),
    ):
        with pytest.raises(ResourceExhausted, match="max_contexts_per_tenant is 3") as error:
            await call
        assert error.value.reason == "QUOTA"
    await engine.create(ME, CreateContextRequest())
    with pytest.raises(ResourceExhausted):
        await engine.create(ME, CreateContextRequest())
    await engine.create(OTHER, CreateContextRequest())
    await engine.close(ME, a)
    await engine.create(ME, CreateContextRequest())
    assert len(await engine.list(ME)) == 3


async def generate_many(engine: LocalEngine, context_id: str) -> None:
    async for _ in engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=2, n=2)):
        pass
