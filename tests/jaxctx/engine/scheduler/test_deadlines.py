"""More is asked than can be done: who is refused, when, and what the others get. Under a clock of its own, by seeds."""

import random
from dataclasses import replace
from functools import cache

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.scheduler_output import Batch
from jaxctx.errors import ResourceExhausted
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from tests.engines import MakeEngine, tokens_of
from tests.jaxctx.engine.simulated import Ask, Simulated, padded, with_config

ME = Caller()
SECONDS, BEGIN = 50.0, 10.0  # of load, and from when on what finishes is counted: the first deadline
CONFIG = with_config(max_batch=16, max_batch_tokens=32)


def simulated(config: EngineConfig = CONFIG, *, row_s: float = 0.0015, noise: float = 0.0, seed: int = 0) -> Simulated:
    """Steps of 26 ms if 16 sequences decode, of 50 ms if a prompt goes with them; with noise up to some times that."""
    rng = random.Random(seed)

    def step_s(batch: Batch, at: float) -> float:
        return (0.002 + row_s * padded(batch, config)) * rng.lognormvariate(0, noise)

    return Simulated(config, step_s)


def tokens_in_time(asks: list[Ask]) -> float:
    """Tokens a second of outputs that ended in time, while the load was on."""
    return sum(a.tokens for a in asks if a.in_time and BEGIN <= (a.ended or 0) - 1000 < SECONDS) / (SECONDS - BEGIN)


def load(rate: float, seed: int = 0, tenant: str = "", timeout_s: float | None = 10.0) -> list[Ask]:
    """Requests at random times, of outputs whose lengths differ."""
    rng = random.Random(seed)
    times = (rng.uniform(0, SECONDS) for _ in range(int(rate * SECONDS)))
    return [Ask(at, tenant, max_tokens=rng.randint(150, 250), timeout_s=timeout_s) for at in times]


@cache
def capacity(noise: float = 0.0) -> tuple[float, float]:
    """What it does where nobody has a deadline and many wait: outputs and tokens a second."""
    engine = simulated(replace(CONFIG, queue_limit=100_000), noise=noise)
    asks = engine.run(load(20.0, timeout_s=None), until=SECONDS)
    return sum(ask.in_time for ask in asks) / SECONDS, tokens_in_time(asks)


@pytest.mark.parametrize(
    ("times", "noise"),
    [
        (10, 0.4),
        *[pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0.0), (5, 0.4))],
        *[pytest.param(*each, marks=pytest.mark.campaign) for each in ((2, 0.4), (5, 0.0), (10, 0.0))],
    ],
)
def test_under_overload_nearly_all_that_is_done_is_done_in_time(times: int, noise: float) -> None:
    outputs, tokens = capacity(noise)
    asks = simulated(noise=noise).run(load(times * outputs, seed=times))
    assert tokens_in_time(asks) >= 0.95 * tokens
    refused = [ask for ask in asks if ask.error is not None and ask.error.code == "RESOURCE_EXHAUSTED"]
    assert len(refused) > (1 - 1.5 / times) * len(asks)
    for ask in refused:
        assert ask.error is not None
        assert ask.error.reason == "DEADLINE_UNREACHABLE"
        assert ask.error.retry_after_s is not None
        assert 0.5 <= ask.error.retry_after_s <= 60
    late = [ask for ask in asks if ask.error is not None and ask.error.code == "DEADLINE_EXCEEDED"]
    assert len(late) <= 0.01 * len(asks)
    wasted = sum(ask.tokens for ask in asks if not ask.in_time)
    assert wasted <= 0.05 * sum(ask.tokens for ask in asks)
    at_once = sum((ask.ended or 0) - 1000 - ask.at < 0.1 for ask in refused)
    assert at_once >= 0.7 * len(refused)


def test_below_capacity_nobody_is_refused() -> None:
    outputs, _ = capacity()
    asks = simulated().run(load(0.7 * outputs, seed=1))
    assert all(ask.in_time for ask in asks)


def test_a_flood_does_not_take_another_tenants_share() -> None:
    outputs, tokens = capacity()
    flood, other = load(10 * outputs, 1, "flood"), load(0.4 * outputs, 2, "other")
    for n, ask in enumerate(other):  # evenly: by chance it may ask for more than its half, for a while
        ask.at = n * SECONDS / len(other)
    asks = simulated().run([*flood, *other])
    assert all(ask.in_time for ask in other)
    assert tokens_in_time(asks) >= 0.95 * tokens
    assert tokens_in_time(flood) >= 0.4 * tokens


def test_two_floods_get_the_same() -> None:
    outputs, tokens = capacity()
    one, two = load(10 * outputs, 1, "one"), load(4 * outputs, 2, "two")
    simulated().run([*one, *two])
    assert tokens_in_time(one) == pytest.approx(tokens / 2, rel=0.15)
    assert tokens_in_time(two) == pytest.approx(tokens / 2, rel=0.15)


def test_without_a_deadline_nobody_is_refused_for_one() -> None:
    outputs, _ = capacity()
    asks = simulated().run([*load(3 * outputs, 1, timeout_s=86400.0), *load(outputs, 2, timeout_s=None)])
    assert all(ask.in_time for ask in asks)


def test_a_batch_is_kept_so_small_that_its_outputs_can_be_in_time() -> None:
    """Among 16 no output is done in 8 s, among 8 most are."""
    config = replace(CONFIG, max_batch=16, max_batch_tokens=32)

    def step_s(batch: Batch, at: float) -> float:
        return 0.004 * len(batch.scheduled)

    asks = [Ask(ask.at, max_tokens=200, timeout_s=8.0) for ask in load(10.0, seed=3)]
    Simulated(config, step_s).run(asks)
    assert tokens_in_time(asks) >= 0.8 * 250


def test_outputs_that_usually_end_early_are_not_refused_for_what_they_may_take() -> None:
    """At most 600 tokens, 16 s of steps, in 6 s; they end after 30 to 60."""
    rng, config = random.Random(4), with_config(max_batch=16, max_batch_tokens=32)
    asks = [Ask(rng.uniform(0, 60), max_tokens=600, ends=rng.randint(30, 60), timeout_s=6.0) for _ in range(300)]
    simulated(config).run(asks)
    assert all(ask.in_time for ask in asks)


def test_a_machine_that_was_slow_for_a_while_is_not_thought_slow_for_ever() -> None:
    def step_s(batch: Batch, at: float) -> float:
        return 1.0 if at < 30 else 0.01

    asks = [Ask(at / 2, max_tokens=100, timeout_s=20.0) for at in range(400)]
    Simulated(CONFIG, step_s).run(asks)
    assert all(ask.in_time for ask in asks if ask.at > 120)


def test_thousands_of_requests_a_second_are_answered_at_once() -> None:
    config, rng = with_config(max_batch=16, max_batch_tokens=32), random.Random(5)
    asks = [Ask(rng.uniform(0, 2), str(rng.randrange(20))) for _ in range(4000)]
    engine = simulated(config)
    engine.run(asks)
    refused = [ask for ask in asks if ask.error is not None]
    assert len(refused) > 3900
    assert all(ask.error is not None and ask.error.retry_after_s for ask in refused)


def test_a_full_queue_is_shared_between_tenants() -> None:
    """None of them has a deadline: the queue's limit is what refuses."""
    config = with_config(max_batch=4, max_batch_tokens=32, queue_limit=20)
    flood = [Ask(0.001 * n, "flood", max_tokens=50, timeout_s=None) for n in range(60)]
    other = [Ask(0.5 + 0.01 * n, "other", max_tokens=50, timeout_s=None) for n in range(5)]
    simulated(config).run([*flood, *other])
    assert all(ask.in_time for ask in other)
    refused = [ask for ask in flood if not ask.in_time]
    assert len(refused) == 60 - 4 - 20 + 5
    assert {ask.error.reason for ask in refused if ask.error} == {"QUEUE_FULL"}
    assert all(ask.tokens == 0 for ask in refused)


def slow_steps(engine: object, seconds: float, clock: object) -> None:
    """As if steps had taken so long until now."""
    for decoding in (1, 2, 4, 8):
        for _ in range(20):
            costs = engine.core.scheduler.step_costs  # type: ignore[attr-defined]
            costs.observe(clock(), seconds, decoding=decoding, tokens=decoding, prompt_rows=0)  # type: ignore[operator]


async def test_the_engine_refuses_at_once_what_cannot_be_in_time(make_engine: MakeEngine, clock: object) -> None:
    engine = make_engine()
    context_id = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, context_id, [1, 2, 3])
    slow_steps(engine, 1.0, clock)
    soon = Caller(deadline=clock() + 30.0)  # type: ignore[operator]
    request = GenerateRequest(
        context_id=context_id, max_tokens=100, ignore_eos=True, sampling=SamplingParams(temperature=0.0)
    )
    with pytest.raises(ResourceExhausted, match="late") as error:
        _ = [piece async for piece in engine.generate(soon, request)]
    assert error.value.reason == "DEADLINE_UNREACHABLE"
    assert error.value.retry_after_s
    assert await tokens_of(engine, context_id) == [1, 2, 3]
    pieces = [piece async for piece in engine.generate(ME, request)]  # who has time may have it
    assert sum(len(piece.token_ids) for piece in pieces) == 100


async def test_what_is_refused_while_it_waits_leaves_its_context_as_it_was(make_engine: MakeEngine) -> None:
    """A fill that is tried again would else append its tokens twice."""
    engine = make_engine(EngineConfig(pages=8, max_batch=8, max_batch_tokens=64, pinned_pages_per_tenant=8))
    pinned = (await engine.create(ME, CreateContextRequest(pinned=True))).context_id
    await engine.fill(ME, pinned, [1] * 100)
    other = (await engine.create(ME, CreateContextRequest())).context_id
    await engine.fill(ME, other, [5], defer=True)
    with pytest.raises(ResourceExhausted) as error:
        await engine.fill(ME, other, [2] * 50)
    assert error.value.retry_after_s
    assert await tokens_of(engine, other) == [5]
