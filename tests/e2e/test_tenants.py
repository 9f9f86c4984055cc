"""What tenants learn of each other, through gRPC: nothing on any tier, and of publications what they are for."""

import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.engine.config import EngineConfig
from jaxctx.types import Tier
from jaxctx_server.auth import Key, Role
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, oracle

NAMES = ("alice", "bob", "carol", "dave")
PROMPT = THOUSAND[:160]


@pytest.fixture
def keys() -> list[Key]:
    return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in NAMES]


@pytest.fixture
def engine_config() -> EngineConfig:
    return EngineConfig(
        pages=64,
        max_batch=8,
        max_batch_tokens=64,
        max_context_tokens=1024,
        host_pages=60,
        disk_pages=300,
        pinned_pages_per_tenant=40,
    )


@pytest.fixture
async def tenants(address: str) -> AsyncIterator[list[jaxctx.aio.Client]]:
    async with AsyncExitStack() as stack:
        clients = [jaxctx.aio.Client(address, api_key=name, timeout_s=60) for name in NAMES]
        yield [await stack.enter_async_context(client) for client in clients]


async def all_pages_wanted(client: jaxctx.aio.Client) -> None:
    """Whatever is idle leaves the device."""
    context = await client.create()
    await context.reserve(64)
    await context.close()


async def test_nothing_is_found_of_another_tenant_on_any_tier(tenants) -> None:
    alice, *others = tenants
    mine = await filled(alice, PROMPT)

    async def are_on(tier: Tier, client: jaxctx.aio.Client) -> None:
        assert list((await mine.pages()).tiers) == [tier] * 10
        found = await alice.plan(tokens=PROMPT)
        assert found.cached == 159, "the owner finds all of them"
        assert found.host == (159 if tier is Tier.HOST else 0)
        assert found.disk == (159 if tier is Tier.DISK else 0)
        plan = await client.plan(tokens=PROMPT)
        assert (plan.resident, plan.restored, plan.host, plan.disk, plan.computed) == (0, 0, 0, 0, 160)
        theirs = await client.create()  # of no salt, as alice's
        result = await theirs.fill(tokens=PROMPT)
        assert (result.resident, result.restored, result.computed) == (0, 0, 160)
        assert list((await theirs.pages()).refcounts) == [1] * 10

    await are_on(Tier.DEVICE, others[0])
    await all_pages_wanted(others[0])
    await are_on(Tier.HOST, others[1])
    await filled(others[0], [9] * 950)
    await all_pages_wanted(others[0])
    await are_on(Tier.DISK, others[2])
    assert await greedy(mine, 5) == oracle(PROMPT, 5)


async def test_counts_are_a_tenants_own(tenants) -> None:
    """Who else holds a published page, or how much of the pool others keep busy, shows nowhere."""
    alice, bob, carol, _ = tenants
    await (await filled(alice, PROMPT)).publish()
    mine = await filled(bob, [*PROMPT, *[5] * 40])
    assert mine.info.committed_pages == 12
    more = [*PROMPT, 6, 6]

    async def seen() -> object:
        asked, of_a_new_one = await mine.plan(tokens=[1]), await bob.plan(tokens=more)
        assert (of_a_new_one.resident, of_a_new_one.pages_needed) == (160, 1)
        return [*(await mine.pages()).refcounts], asked.pages_available, of_a_new_one.pages_available

    before = await seen()
    assert before == ([1] * 13, 64 - 13, 64), "a context keeps its own pages"
    for client in (alice, carol):
        context = await filled(client, more)
        assert await seen() == before, "opened and filled"
        await context.update(pinned=True)
        assert await seen() == before, "pinned"
        other = await filled(client, [9] * 100)
        await other.fork()
        assert await seen() == before, "of its own, and a fork"
        stream = other.generate(max_tokens=250, ignore_eos=True)
        await anext(stream)
        assert await seen() == before, "at work"
        stream.close()
    await (await filled(carol, [8] * 64)).publish()
    assert await seen() == before, "published"

    (child,) = await mine.fork()
    await child.update(pinned=True)
    assert await seen() == ([2] * 12 + [1], 64 - 14, 64 - 13), "its own counts"


async def test_publications_last_as_long_as_they_were_to(tenants, clock) -> None:
    """A sliding one begins again when anybody finds it, a fixed one never does."""
    alice, bob, carol, _ = tenants
    prompts = {"fixed": PROMPT, "used": THOUSAND[160:320], "unused": THOUSAND[320:480], "for ever": THOUSAND[480:640]}
    ids = {}
    for name, prompt in prompts.items():
        context = await filled(alice, prompt)
        ttl_s = math.inf if name == "for ever" else 50
        publication = await context.publish(ttl_s=ttl_s, sliding=name in ("used", "unused"))
        ids[name] = publication.publication_id
        assert (publication.expiry is None) == (name == "for ever")
        assert publication.expiry is None or publication.expiry.sliding == (name != "fixed")
        await context.close()

    async def there() -> set[str]:
        """That the owner has, and a tenant finds who has no pages of its own."""
        listed = [each.publication_id for each in await alice.publications()]
        found = {name for name in prompts if (await carol.plan(tokens=[*prompts[name], 1])).cached == 160}
        assert sorted(ids[name] for name in found) == listed
        return found

    clock.offset += 40
    assert await there() == set(prompts), "to look is no use"
    for name in ("fixed", "used"):
        theirs = await bob.create()
        assert (await theirs.fill(tokens=[*prompts[name], 5])).resident == 160
    clock.offset += 11
    assert await there() == {"used", "for ever"}
    with pytest.raises(errors.NotFound):
        await alice.unpublish(ids["fixed"])
    clock.offset += 38  # 49 after its use
    assert await there() == {"used", "for ever"}
    assert (await (await bob.create()).fill(tokens=[*prompts["used"], 6])).resident == 160
    clock.offset += 49
    assert await there() == {"used", "for ever"}
    clock.offset += 2
    assert await there() == {"for ever"}
    assert await greedy(theirs, 5) == oracle([*prompts["used"], 5], 5), "who shares its pages keeps them"


async def test_a_publication_is_changed_by_its_owner_alone(tenants, clock) -> None:
    alice, bob, *_ = tenants
    published = await (await filled(alice, PROMPT)).publish(ttl_s=50, labels={"k": "v"})
    for client, name in ((bob, published.publication_id), (alice, "another")):
        with pytest.raises(errors.NotFound) as error:
            await client.update_publication(name, ttl_s=math.inf)
        assert error.value.reason == "PUBLICATION_NOT_FOUND"
    assert [await client.publications() for client in (alice, bob)] == [[published], []]
    changed = await alice.update_publication(published.publication_id, labels={})
    assert (changed.labels, changed.expiry) == ({}, published.expiry)
    changed = await alice.update_publication(published.publication_id, ttl_s=math.inf)
    assert changed.expiry is None
    clock.offset += 1000
    assert (await (await bob.create()).fill(tokens=PROMPT)).resident == 159
    await alice.update_publication(published.publication_id, ttl_s=5)
    clock.offset += 5
    with pytest.raises(errors.NotFound):
        await alice.update_publication(published.publication_id, ttl_s=math.inf)
    assert await alice.publications() == []
