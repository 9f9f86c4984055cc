"""Plan says beforehand what Fill then reports, whole, through gRPC: wherever the pages are."""

import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx.types import FillResult, PlanResult
from tests.e2e.echo_contexts import THOUSAND, filled, greedy, oracle

LENGTHS = (1, 16, 17, 33, 400, 408)
MORE = (1, 8, 9, 20)
TIERS = [(0, 0), (12, 0), (400, 0), (12, 400)]


@pytest.fixture(params=TIERS, ids=str)
def engine_config(request) -> EngineConfig:
    host, disk = request.param
    return EngineConfig(
        pages=64, max_batch=8, max_batch_tokens=64, max_context_tokens=1024, host_pages=host, disk_pages=disk
    )


async def want(client: jaxctx.aio.Client, pages: int) -> None:
    """So many pages at once: whoever is idle leaves the device, and what is left over stays cached there."""
    context = await client.create()
    await context.reserve(pages)
    await context.close()


def same(plan: PlanResult, done: FillResult) -> None:
    assert (plan.resident, plan.restored, plan.computed) == (done.resident, done.restored, done.computed)
    assert (plan.host + plan.disk, plan.tokens) == (plan.restored, plan.resident + plan.restored + plan.computed)
    assert plan.pages_needed == done.context.committed_pages + done.context.working_pages - plan.resident // 16


@pytest.mark.parametrize("left", ["nothing", "half"])
async def test_what_left_the_device_comes_back_as_planned(client, engine_config, left) -> None:
    """To a suspended context with its partial page, where a tier has room, and to a new one all full pages."""
    everything = engine_config.host_pages + engine_config.disk_pages >= 400
    for length in LENGTHS:
        for more in MORE:
            tokens, new = THOUSAND[:length], [*range(more)]
            pages = -(-length // 16)
            resident = pages // 2 * 16 if left == "half" else 0
            await client.clear_cache()
            old = await filled(client, tokens)
            await want(client, 64 - resident // 16)
            assert (await old.refresh()).state.value == "suspended"
            other = await client.create()
            for context, given in ((old, new), (other, [*tokens, *new])):
                plan = await context.plan(tokens=given)
                assert await context.plan(tokens=given) == plan, "to plan changes nothing"
                if context is old:
                    assert (plan.tokens, plan.resident) == (length + more, resident)
                    if everything:
                        assert plan.restored == length - resident, "with the partial page"
                same(plan, await context.fill(tokens=given))
                assert await greedy(context, 2) == oracle([*tokens, *new], 2), (length, more)
                await context.close()
                if context is old:
                    await want(client, 64 - resident // 16)
