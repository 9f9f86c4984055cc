"""Fill and generate on the echo model, against its plain-Python oracle."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine import engine as engine_module
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.errors import Aborted, FailedPrecondition, InvalidArgument, NotFound, OutOfRange, ResourceExhausted
from jaxctx.types import (
    ContextState,
    CreateContextRequest,
    FinishReason,
    GeneratePiece,
    GenerateRequest,
    SamplingParams,
)
from tests.echo import EOS_ID, echo_next
from tests.engines import SMALL, MakeEngine, context_info, tokens_of
from tests.jaxctx.engine.echo_generation import GREEDY, ME, PROMPTS, collect, fresh, greedy, oracle


@pytest.mark.parametrize("length", PROMPTS)
async def test_greedy_equals_the_oracle_at_every_page_edge(engine: LocalEngine, length: int) -> None:
    context_id = await fresh(engine, PROMPTS[length])
    assert await greedy(engine, context_id, 40) == oracle(PROMPTS[length], 40)


async def test_sequences_batched_together_equal_each_alone(engine: LocalEngine) -> None:
    ids = [await fresh(engine, prompt) for prompt in PROMPTS.values()]
    results = await asyncio.gather(*[greedy(engine, context_id, 30) for context_id in ids])
    for prompt, result in zip(PROMPTS.values(), results, strict=True):
        assert result == oracle(prompt, 30)


async def test_a_second_generation_continues_the_first(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[17])
    first = await greedy(engine, context_id, 9)
    info = await context_info(engine, ME, context_id)
    assert (info.seq_len, info.buffered_tokens) == (17 + 8, 1)  # the last sampled token is not computed yet
    assert first + await greedy(engine, context_id, 9) == oracle(PROMPTS[17], 18)


async def test_fill_after_generate_computes_the_buffered_token_too(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[15])
    tokens = PROMPTS[15] + await greedy(engine, context_id, 3)
    result = await engine.fill(ME, context_id, [1, 2, 3])
    assert (result.resident, result.computed) == (0, 4)
    assert await greedy(engine, context_id, 5) == oracle([*tokens, 1, 2, 3], 5)


async def test_deferred_tokens_wait_for_the_next_operation(engine: LocalEngine) -> None:
    info = await engine.create(ME, CreateContextRequest())
    result = await engine.fill(ME, info.context_id, PROMPTS[63], defer=True)
    assert (result.computed, result.context.seq_len, result.context.buffered_tokens) == (0, 0, 63)
    flushed = await engine.fill(ME, info.context_id)
    assert (flushed.computed, flushed.context.seq_len, flushed.context.buffered_tokens) == (63, 63, 0)
    again = await engine.fill(ME, info.context_id)
    assert (again.resident, again.computed) == (0, 0)


async def test_generating_on_a_flushed_page_edge_changes_no_shared_page(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[64])
    (fork,) = await engine.fork(ME, context_id)
    both = await asyncio.gather(greedy(engine, context_id, 20), greedy(engine, fork.context_id, 20))
    assert both[0] == both[1] == oracle(PROMPTS[64], 20)


async def test_n_outputs_are_forks_and_the_context_is_flushed_but_not_continued(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[17])
    request = GenerateRequest(context_id=context_id, max_tokens=12, n=3, sampling=SamplingParams(seed=5))
    pieces = await collect(engine, request)
    by_index = {i: [t for p in pieces if p.index == i for t in p.token_ids] for i in range(3)}
    forks = {p.index: p.context_id for p in pieces}
    assert len(set(forks.values())) == 3
    assert context_id not in forks.values()
    assert len({tuple(tokens) for tokens in by_index.values()}) == 3  # each output has a seed of its own
    assert (await context_info(engine, ME, context_id)).seq_len == 17
    for index, fork in forks.items():
        assert await tokens_of(engine, fork) == PROMPTS[17] + by_index[index]


async def test_outputs_of_neighbouring_seeds_share_none_and_each_draws_alone_by_its_own(engine: LocalEngine) -> None:
    async def run(seed: int, n: int) -> list[tuple[list[int], int | None]]:
        """Tokens and seed of each output."""
        context_id = await fresh(engine, PROMPTS[17])
        request = GenerateRequest(context_id=context_id, max_tokens=12, n=n, sampling=SamplingParams(seed=seed))
        pieces = await collect(engine, request)
        tokens = [[t for p in pieces if p.index == index for t in p.token_ids] for index in range(n)]
        seeds = {p.index: p.seed for p in pieces if p.finish is not None}
        return [(tokens[index], seeds[index]) for index in range(n)]

    several = [*await run(42, 5), *await run(43, 5)]
    assert len({seed for _, seed in several}) == 10
    assert len({tuple(tokens) for tokens, _ in several}) == 10
    assert (several[0][1], several[5][1]) == (42, 43)
    for tokens, seed in several:
        assert seed is not None
        assert await run(seed, 1) == [(tokens, seed)]


async def test_seeded_sampling_repeats_alone_and_in_company(engine: LocalEngine) -> None:
    async def run(seed: int) -> list[int]:
        context_id = await fresh(engine, PROMPTS[17])
        request = GenerateRequest(context_id=context_id, max_tokens=25, sampling=SamplingParams(seed=seed, top_p=0.9))
        return [t for p in await collect(engine, request) for t in p.token_ids]

    alone = await run(7)
    together = await asyncio.gather(run(3), run(7), run(11))
    assert together[1] == alone
    assert together[0] != alone


async def test_the_last_piece_reports_reason_usage_seed_and_counters(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[65])
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=4, sampling=GREEDY))
    last = pieces[-1]
    assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert last.finish is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (65, 64, 4)
    assert last.context is not None
    assert last.context.seq_len == 65 + 3
    assert last.context.working_pages == 1


async def test_stop_token_ends_the_output_and_joins_the_context(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[15])
    expected = oracle(PROMPTS[15], 30)
    stop = expected[10]
    at = expected.index(stop)
    request = GenerateRequest(context_id=context_id, max_tokens=30, sampling=GREEDY, stop_token_ids=[stop])
    pieces = await collect(engine, request)
    assert [t for p in pieces for t in p.token_ids] == expected[: at + 1]
    assert (pieces[-1].finish, pieces[-1].stop_match) == (FinishReason.STOP, stop)
    assert await tokens_of(engine, context_id) == PROMPTS[15] + expected[: at + 1]


async def test_min_tokens_suppresses_stop_tokens(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[15])
    stop = oracle(PROMPTS[15], 1)[0]
    request = GenerateRequest(context_id=context_id, max_tokens=8, min_tokens=4, sampling=GREEDY, stop_token_ids=[stop])
    tokens = [t for p in await collect(engine, request) for t in p.token_ids]
    expected = list(PROMPTS[15])
    for _ in range(4):
        expected.append(echo_next(expected, suppress=[stop, EOS_ID]))
    assert tokens[:4] == expected[15:]
    assert stop not in tokens[:4]


async def test_logit_bias_and_eos(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[15])
    sampling = SamplingParams(temperature=0.0, logit_bias={EOS_ID: 100.0})
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=5, sampling=sampling))
    assert [p.finish for p in pieces] == [FinishReason.STOP]
    assert pieces[0].stop_match == EOS_ID
    request = GenerateRequest(context_id=context_id, max_tokens=5, sampling=sampling, ignore_eos=True)
    assert [t for p in await collect(engine, request) for t in p.token_ids] == [EOS_ID] * 5


async def test_a_slot_does_not_inherit_its_former_owners_bias_or_penalties(engine: LocalEngine) -> None:
    biased = await fresh(engine, PROMPTS[15])
    sampling = SamplingParams(temperature=0.0, logit_bias={9: 100.0}, repetition_penalty=2.0)
    await collect(engine, GenerateRequest(context_id=biased, max_tokens=5, sampling=sampling))
    plain = await fresh(engine, PROMPTS[17])
    assert await greedy(engine, plain, 10) == oracle(PROMPTS[17], 10)


async def test_frequency_penalty_counts_this_output_only(engine: LocalEngine) -> None:
    context_id = await fresh(engine, [9] * 20)
    sampling = SamplingParams(temperature=0.0, logit_bias={9: 50.0}, frequency_penalty=30.0)
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=3, sampling=sampling))
    tokens = [t for p in pieces for t in p.token_ids]
    assert tokens[0] == 9
    assert tokens[2] != 9


async def test_logprobs_come_with_every_token(engine: LocalEngine) -> None:
    context_id = await fresh(engine, PROMPTS[15])
    request = GenerateRequest(context_id=context_id, max_tokens=3, sampling=GREEDY, logprobs=True, top_logprobs=2)
    for piece in await collect(engine, request):
        assert [logprob.token_id for logprob in piece.logprobs] == list(piece.token_ids)
        for logprob in piece.logprobs:
            assert logprob.token_id == logprob.top[0][0]
            assert logprob.logprob == logprob.top[0][1] >= logprob.top[1][1]


async def test_max_tokens_is_cut_to_what_the_context_may_hold(engine: LocalEngine) -> None:
    limit = engine.info.max_context_tokens
    context_id = await fresh(engine, [5] * (limit - 3))
    pieces = await collect(engine, GenerateRequest(context_id=context_id, max_tokens=50, sampling=GREEDY))
    assert sum(len(p.token_ids) for p in pieces) == 3
    assert pieces[-1].finish is FinishReason.LENGTH
    with pytest.raises(OutOfRange):
        await greedy(engine, context_id, 1)
    with pytest.raises(OutOfRange):
        await engine.fill(ME, context_id, [1])


async def test_errors_change_nothing(engine: LocalEngine) -> None:
    info = await engine.create(ME, CreateContextRequest())
    with pytest.raises(FailedPrecondition):
        await greedy(engine, info.context_id, 1)
    for bad in ([512], [-1], [2**40]):
        with pytest.raises(InvalidArgument):
            await engine.fill(ME, info.context_id, bad)
    with pytest.raises(NotFound):
        await greedy(engine, "nobody", 1)
    with pytest.raises(NotFound):
        await engine.fill(Caller(tenant="other"), info.context_id, [1])
    assert replace(await context_info(engine, ME, info.context_id), used_at=info.used_at) == info


async def test_no_compilation_after_ready(engine: LocalEngine) -> None:
    await asyncio.gather(*[greedy(engine, await fresh(engine, PROMPTS[n]), n % 7 + 1) for n in PROMPTS])
    assert (await engine.stats()).compilations_after_ready == 0


class TestForksWithoutPages:
    """Several outputs of a prompt while another request has the pages that their forks need."""

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> LocalEngine:
        return make_engine(replace(SMALL, pages=20))

    @pytest.fixture
    async def running(self, engine: LocalEngine) -> AsyncIterator[AsyncIterator[GeneratePiece]]:
        """An output that nobody reads further: it keeps the pages that it was promised."""
        context_id = await fresh(engine, PROMPTS[1])
        request = GenerateRequest(context_id=context_id, max_tokens=17 * 16, sampling=GREEDY, ignore_eos=True)
        pieces = engine.generate(ME, request)
        await anext(pieces)
        yield pieces
        await pieces.aclose()  # type: ignore[attr-defined]

    @staticmethod
    async def of_three(engine: LocalEngine) -> GenerateRequest:
        context_id = await fresh(engine, PROMPTS[17])
        return GenerateRequest(context_id=context_id, max_tokens=20, sampling=GREEDY, n=3)

    @staticmethod
    async def until_busy(engine: LocalEngine, context_id: str) -> None:
        for _ in range(500):
            if (await context_info(engine, ME, context_id)).state is ContextState.BUSY:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("no writer has the context")

    async def test_they_wait_for_them(self, engine: LocalEngine, running: AsyncIterator[GeneratePiece]) -> None:
        waiting = asyncio.create_task(collect(engine, await self.of_three(engine)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await running.aclose()  # type: ignore[attr-defined]
        pieces = await waiting
        for index in range(3):
            tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
            assert tokens == oracle(PROMPTS[17], 20)

    async def test_nobody_writes_to_the_context_meanwhile(
        self, engine: LocalEngine, running: AsyncIterator[GeneratePiece]
    ) -> None:
        request = await self.of_three(engine)
        waiting = asyncio.create_task(collect(engine, request))
        await self.until_busy(engine, request.context_id)
        for write in (
            engine.rewind(ME, request.context_id, 3),
            engine.fill(ME, request.context_id, [1]),
            engine.truncate(ME, request.context_id, 1),
            collect(engine, replace(request, n=1)),
        ):
            with pytest.raises(Aborted) as refused:
                await write
            assert (refused.value.reason, refused.value.retry_after_s) == ("CONTEXT_BUSY", 0.1)
        also_waiting = asyncio.create_task(collect(engine, request))  # it changes nothing either
        await running.aclose()  # type: ignore[attr-defined]
        for pieces in (await waiting, await also_waiting):
            for index in range(3):
                tokens = [token for piece in pieces if piece.index == index for token in piece.token_ids]
                assert tokens == oracle(PROMPTS[17], 20)
        assert (await engine.rewind(ME, request.context_id, 3)).state is ContextState.IDLE

    async def test_the_context_may_be_closed_meanwhile(
        self, engine: LocalEngine, running: AsyncIterator[GeneratePiece]
    ) -> None:
        request = await self.of_three(engine)
        waiting = asyncio.create_task(collect(engine, request))
        await self.until_busy(engine, request.context_id)
        await engine.close(ME, request.context_id)
        await engine.create(ME, CreateContextRequest(context_id=request.context_id))
        await engine.fill(ME, request.context_id, PROMPTS[1])
        await running.aclose()  # type: ignore[attr-defined]
        with pytest.raises(NotFound):
            await waiting

    async def test_a_drain_waits_for_them(
        self, engine: LocalEngine, running: AsyncIterator[GeneratePiece], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        request = await self.of_three(engine)
        # Their turn to ask again never comes before this test gives it: all the time only the call itself waits.
        asked, ask_again = asyncio.Event(), asyncio.Event()
        ask = engine._page_waits.ask

        async def ask_when_told(tenant: str, question: Any, give_up_at: float) -> object:
            asked.set()
            await ask_again.wait()
            return await ask(tenant, question, give_up_at)

        monkeypatch.setattr(engine._page_waits, "ask", ask_when_told)
        waiting = asyncio.create_task(collect(engine, request))
        await asked.wait()
        await running.aclose()  # type: ignore[attr-defined]
        draining = asyncio.create_task(engine.drain())
        for _ in range(20):  # as often as a drain that does not wait would take to see that no request runs
            await engine.stats()
            await asyncio.sleep(0)
        assert not draining.done()
        ask_again.set()
        await draining
        assert len({piece.index for piece in await waiting if piece.finish}) == 3

    async def test_who_leaves_meanwhile_leaves_nothing(
        self, engine: LocalEngine, running: AsyncIterator[GeneratePiece]
    ) -> None:
        request = await self.of_three(engine)
        waiting = asyncio.create_task(collect(engine, request))
        await self.until_busy(engine, request.context_id)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.contexts) == (1, 0, 2)
        states = [info.state for info in await engine.list(ME)]
        assert sorted(state.value for state in states) == ["busy", "idle"]

    async def test_not_for_ever(
        self, engine: LocalEngine, running: AsyncIterator[GeneratePiece], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine_module, "FORK_WAIT_S", 0.05)
        with pytest.raises(ResourceExhausted) as refused:
            await collect(engine, await self.of_three(engine))
        assert refused.value.reason == "OUT_OF_PAGES"

    async def test_not_if_no_request_would_free_them(self, engine: LocalEngine) -> None:
        for caller, pages in ((ME, 10), (Caller("other"), 8)):  # a tenant may pin half of the pool
            pinned = await engine.create(caller, CreateContextRequest(pinned=True))
            await engine.fill(caller, pinned.context_id, [5] * 16 * pages)
        with pytest.raises(ResourceExhausted) as refused:
            await collect(engine, await self.of_three(engine))
        assert refused.value.reason == "OUT_OF_PAGES"
