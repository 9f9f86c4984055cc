"""Scenarios of identity, page control, speculation, names, pressure with tiers, tenants and time, through gRPC."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.types import Tier
from tests.e2e.conftest import CONFIG, TENANTS
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, held, oracle, unchanged
from tests.e2e.gated_store import until


@pytest.fixture
async def alice(address: str) -> AsyncIterator[jaxctx.aio.Client]:
    async with jaxctx.aio.Client(address, api_key=TENANTS[0], timeout_s=60) as client:
        yield client


@pytest.fixture
async def bob(address: str) -> AsyncIterator[jaxctx.aio.Client]:
    async with jaxctx.aio.Client(address, api_key=TENANTS[1], timeout_s=60) as client:
        yield client


async def test_pages_are_shared_only_by_the_same_identity(client, engine) -> None:
    prompt = THOUSAND[:64]
    whole = await filled(client, prompt)

    async def shared(context: jaxctx.aio.Context) -> int:
        return sum(count > 1 for count in (await context.pages()).refcounts)

    salted = await client.create(salt="x")
    assert (await salted.fill(tokens=prompt)).cached == 0
    begun = prompt[:32]
    ranges = [[(0, 8), (index - 8, index + 1)] for index in range(32, 64)]
    passes = {
        "moved": {"positions": list(range(100, 132))},
        "masked": {"masks": ranges},
        "both": {"positions": list(range(100, 132)), "masks": ranges},
    }
    contexts = {}
    for name, explicit in passes.items():
        contexts[name] = await filled(client, begun)
        await contexts[name].forward(prompt[32:], **explicit)
        assert await shared(contexts[name]) == 2, name
    usual = await filled(client, begun)
    await usual.forward(prompt[32:], positions=list(range(32, 64)), masks=[[(0, i + 1)] for i in range(32, 64)])
    assert (await usual.pages()).page_ids == (await whole.pages()).page_ids, "an explicit causal mask is the default"
    again = await filled(client, begun)
    await again.forward(prompt[32:], masks=ranges)
    assert (await again.pages()).page_ids == (await contexts["masked"].pages()).page_ids, "equal masks are shared"
    assert await greedy(again, 5) == await greedy(contexts["masked"], 5)
    assert await greedy(usual, 5) == oracle(prompt, 5)


async def test_commit_errors(client) -> None:
    context = await client.create(manual_commit=True)
    info = (await context.fill(tokens=THOUSAND[:40])).context
    assert (info.working_pages, info.working_tokens) == (3, 40)
    for pages, error in ((3, errors.FailedPrecondition), (4, errors.OutOfRange)):
        async with unchanged(client, context):
            with pytest.raises(error):
                await context.commit(pages)
    assert (await context.commit(0)).working_tokens == 40
    info = await context.commit(2)
    assert (info.committed_pages, info.working_pages, info.working_tokens) == (2, 1, 8)


async def test_speculation_forks_and_rewinds(client) -> None:
    context = await filled(client, THOUSAND[:999])
    right = oracle(THOUSAND, 5)
    drafts = [*right[:2], *[(token + 1) % 256 for token in right[2:]]]
    rows = [jaxctx.ForwardOutputOptions(index=row, sample={"temperature": 0.0}) for row in range(6)]
    result = await context.forward([THOUSAND[999], *drafts], keep_working=True, outputs=rows)
    assert [output.token_id for output in result.outputs[:3]] == right[:3]
    assert (await context.truncate(3)).seq_len == 1002
    assert await context.tokens() == THOUSAND + right[:2]


class TestNames:
    @pytest.fixture
    def store(self, tmp_path) -> str:
        return f"file://{tmp_path}/"

    @pytest.fixture
    def engine(self, make_engine, engine_config, store):
        return make_engine(engine_config, store=store)

    @pytest.mark.parametrize("durable", [False, True])
    async def test_snapshots_by_name(self, client, engine, durable) -> None:
        context = await filled(client, THOUSAND[:100])
        first = await context.save("a", durable=durable)
        assert (first.version, first.latest, first.durable, first.tokens) == (1, True, durable, 100)
        async with unchanged(client, context):
            with pytest.raises(errors.AlreadyExists):
                await context.save("a", durable=durable)
        await context.fill(tokens=THOUSAND[100:130])
        async with unchanged(client, context):
            with pytest.raises(errors.Aborted) as error:
                await context.save("a", durable=durable, overwrite_version=2)
            assert error.value.reason == "VERSION_MISMATCH"
            with pytest.raises(errors.NotFound) as missing:
                await context.save("b", durable=durable, overwrite_version=1)
            assert missing.value.reason == "SNAPSHOT_NOT_FOUND"
        second = await context.save("a", durable=durable, overwrite_version=1)
        assert (second.version, second.parent_version) == (2, 1)
        assert [each.version for each in await client.history("a")] == [2, 1]

        one, two = await client.open("a"), await client.open("a")
        await one.fill(tokens=[1, 2, 3])
        assert await two.tokens() == THOUSAND[:130]
        assert await (await client.open("a", version=1)).tokens() == THOUSAND[:100]
        assert await client.delete_snapshot("a") == 2
        await until(lambda: len(engine.core.cache.context_table) == 4)  # what the versions held is given up
        async with unchanged(client, context, one, two):
            for refused in (client.open("a"), client.take("a"), client.delete_snapshot("a"), client.snapshot("a")):
                with pytest.raises(errors.NotFound) as missing:
                    await refused
                assert missing.value.reason == "SNAPSHOT_NOT_FOUND"
        assert await greedy(two, 5) == oracle(THOUSAND[:130], 5)
        assert await greedy(one, 5) == oracle([*THOUSAND[:130], 1, 2, 3], 5)

    @pytest.mark.parametrize("durable", [False, True])
    async def test_of_two_takes_one_wins(self, client, engine, durable) -> None:
        context = await filled(client, THOUSAND[:100])
        await context.save("a", durable=durable)
        await context.close()
        takes = await asyncio.gather(*[client.take("a") for _ in range(4)], return_exceptions=True)
        (taken,) = [each for each in takes if isinstance(each, jaxctx.aio.Context)]
        assert {getattr(each, "reason", None) for each in takes if each is not taken} == {"SNAPSHOT_NOT_FOUND"}
        info = await taken.refresh()
        assert (info.seq_len, info.committed_pages, info.working_tokens) == (100, 6, 4)
        assert await greedy(taken, 5) == oracle(THOUSAND[:100], 5)
        assert [each.id async for each in client.contexts()] == [taken.id], "losers leave nothing behind"

    @pytest.mark.parametrize("durable", [False, True])
    async def test_what_had_an_end_can_be_made_permanent(self, client, clock, durable) -> None:
        context = await filled(client, THOUSAND[:100])
        await context.save("a", durable=durable, ttl_s=50)
        await context.save("b", durable=durable, ttl_s=50)
        assert (await context.update(ttl_s=50)).expiry.seconds == 50
        other = await filled(client, [1])
        await other.update(ttl_s=50)
        assert (await context.update(ttl_s=math.inf)).expiry is None
        assert (await client.update_snapshot("a", ttl_s=math.inf)).expiry is None
        clock.offset += 51
        assert (await context.refresh()).expiry is None
        assert (await client.snapshot("a")).expiry is None
        assert await greedy(await client.open("a"), 3) == await greedy(context, 3) == oracle(THOUSAND[:100], 3)
        with pytest.raises(errors.NotFound):
            await other.refresh()
        with pytest.raises(errors.NotFound):
            await client.snapshot("b")


class TestTiers:
    @pytest.fixture(params=[(0, 0), (16, 0), (16, 400), (400, 0)])
    def engine_config(self, request) -> EngineConfig:
        host, disk = request.param
        return EngineConfig(
            pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=1024, host_pages=host, disk_pages=disk
        )

    async def test_more_contexts_than_the_pool_holds(self, client, engine, engine_config) -> None:
        prompts = [[(i * 31 + k) % 256 for i in range(400 + k)] for k in range(5)]
        contexts = [await filled(client, prompt) for prompt in prompts]
        assert (await engine.stats()).suspensions > 0
        restored = 0
        for context, prompt in zip(contexts, prompts, strict=True):
            plan = await context.plan(tokens=[7])
            result = await context.fill(tokens=[7])
            restored += result.restored
            assert result.resident + result.restored + result.computed == plan.tokens
            assert await greedy(context, 6) == oracle([*prompt, 7], 6)
        if engine_config.host_pages + engine_config.disk_pages >= 400:
            assert restored > 4 * 400, "nothing is computed that some tier holds"
        elif not engine_config.host_pages:
            assert restored == 0


class TestTenants:
    @pytest.fixture
    def keys(self, two_tenants):
        return two_tenants

    @pytest.fixture
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            pages=64,
            max_batch=8,
            max_batch_tokens=64,
            max_context_tokens=1024,
            host_pages=32,
            pinned_pages_per_tenant=30,
        )

    async def test_tenants_share_nothing(self, alice, bob, engine) -> None:
        prompt = THOUSAND[:160]
        mine = await filled(alice, prompt)
        await mine.save("a")
        assert (await bob.plan(tokens=prompt)).cached == 0
        theirs = await bob.create()
        assert (await theirs.fill(tokens=prompt)).cached == 0
        assert list((await theirs.pages()).refcounts) == [1] * 10
        flood = await filled(bob, [9] * 900)  # everybody else goes to host memory
        assert (await alice.plan(tokens=prompt)).restored > 0
        for ask in (bob.snapshot("a"), bob.open("a"), bob.delete_snapshot("a"), bob.context(mine.id)):
            with pytest.raises(errors.NotFound):
                await ask
        assert [each.name async for each in bob.snapshots()] == []
        assert {each.id async for each in bob.contexts()} == {theirs.id, flood.id}

    async def test_tenants_share_what_is_published(self, alice, bob, engine) -> None:
        prompt = THOUSAND[:160]
        mine = await filled(alice, prompt)
        publication = await mine.publish()
        assert publication.tokens == 160
        theirs = await bob.create()
        assert (await theirs.fill(tokens=[*prompt, *[5] * 40])).resident == 160
        more = await alice.create()
        assert (await more.plan(tokens=[*prompt, *[5] * 40])).resident == 160, "what bob went on with is bob's"
        assert await greedy(theirs, 5) == oracle([*prompt, *[5] * 40], 5)
        with pytest.raises(errors.NotFound) as error:
            await bob.unpublish(publication.publication_id)
        assert error.value.reason == "PUBLICATION_NOT_FOUND"
        assert await bob.publications() == []
        await alice.unpublish(publication.publication_id)
        late = await bob.create(salt="")
        assert (await late.plan(tokens=prompt)).resident == 0
        assert await greedy(theirs, 5) == oracle([*prompt, *[5] * 40, *oracle([*prompt, *[5] * 40], 5)], 5)

    async def test_pins_and_their_quota(self, alice, bob, engine, clock) -> None:
        pinned = await alice.create(pinned=True, pin_s=100)
        await pinned.fill(tokens=THOUSAND[:160])
        end = pinned.info.pinned_until
        assert end.timestamp() - clock.wall() == pytest.approx(100, abs=5)
        idle = await filled(alice, [4] * 160)
        with pytest.raises(errors.ResourceExhausted) as error:
            await (await filled(alice, [3] * 400)).update(pinned=True)
        assert error.value.reason == "PIN_BUDGET"
        assert "20 remain" in error.value.message
        for k in range(3):
            await filled(bob, [k] * 700)
        assert (await pinned.refresh()).state.value == "idle"
        assert list((await pinned.pages()).tiers) == [Tier.DEVICE] * 10
        assert (await idle.refresh()).state.value == "suspended", "whose turn came before"
        clock.offset += 40
        assert (await pinned.refresh()).pinned_until == end, "60 remain"
        clock.offset += 61
        assert not (await pinned.refresh()).pinned
        await filled(bob, [8] * 1000)
        assert (await pinned.refresh()).state.value == "suspended"
        assert await greedy(pinned, 5) == oracle(THOUSAND[:160], 5)

    async def test_contexts_and_snapshots_end_when_their_time_is_over(self, alice, clock, engine) -> None:
        fixed = await alice.create(ttl_s=50, context_id="fixed")
        sliding = await alice.create(ttl_s=50, sliding=True, context_id="sliding")
        await fixed.fill(tokens=[1, 2, 3])
        await fixed.save("s", ttl_s=50)
        clock.offset += 40
        await sliding.fill(tokens=[1, 2, 3])
        assert (await fixed.refresh()).expiry is not None
        clock.offset += 11
        with pytest.raises(errors.NotFound) as error:
            await fixed.fill(tokens=[4])
        assert error.value.reason == "CONTEXT_EXPIRED"
        with pytest.raises(errors.NotFound):
            await alice.open("s")
        assert (await sliding.update(ttl_s=1000)).expiry is not None
        clock.offset += 500
        assert await sliding.tokens() == [1, 2, 3]
        assert [each.id async for each in alice.contexts()] == ["sliding"]


async def test_watch_tells_of_every_context(client, engine) -> None:
    first = await filled(client, [1, 2, 3])
    events = client.watch()
    assert (await anext(events)).context_id == first.id
    (child,) = await first.fork()
    assert ((event := await anext(events)).change.value, event.context_id) == ("forked", child.id)
    await child.close()
    assert ((event := await anext(events)).change.value, event.context_id) == ("closed", child.id)
    await events.aclose()


async def test_compare_finds_where_two_contexts_part(client, engine) -> None:
    parent = await filled(client, THOUSAND[:100])
    (child,) = await parent.fork()
    await parent.fill(tokens=[1, 2, 3])
    await child.fill(tokens=[1, 2, 4])
    found = await parent.compare(child)
    assert (found.common_tokens, found.shared_pages) == (102, 6)
    assert (child.info.parent_id, child.info.forked_at) == (parent.id, 100)


async def test_a_busy_pool_gives_every_page_back(client, engine) -> None:
    context = await filled(client, THOUSAND[:100])
    await context.save("kept")
    await context.close()
    assert await held(engine) == 7
    await client.delete_snapshot("kept")
    async with asyncio.timeout(60):
        while await held(engine) != 0:
            await asyncio.sleep(0.005)
    assert CONFIG.pages == (await engine.stats()).pages_free + (await engine.stats()).pages_cached
