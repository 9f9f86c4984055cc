"""Random traces on the engine: whatever happens around it, a context reads and generates as if it were alone."""

import asyncio
import random

import pytest

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.prompt_lookup import PromptLookup
from jaxctx.errors import FailedPrecondition, OutOfRange, ResourceExhausted
from jaxctx.types import CreateContextRequest, GenerateRequest, SamplingParams
from tests.echo import echo_next
from tests.engines import context_info, tokens_of

from .oracle_drafter import oracle_drafter

ME = Caller()
GREEDY = SamplingParams(temperature=0.0)


class Actor:
    """One client that does random things to contexts of its own and knows what their tokens must be."""

    def __init__(self, engine: LocalEngine, seed: int, prefixes: list[list[int]], limit: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.prefixes = prefixes
        self.limit = limit
        self.contexts: dict[str, list[int]] = {}

    async def run(self, operations: int) -> None:
        actions = [self.create, self.fill, self.fill, self.generate, self.generate, self.fork, self.cancel]
        actions += [self.truncate, self.rewind, self.close, self.defer, self.read]
        for _ in range(operations):
            action = self.rng.choice(actions) if self.contexts else self.create
            try:
                await action()
            except ResourceExhausted:
                if self.contexts:
                    await self.close()
        for context_id in list(self.contexts):
            await self.engine.close(ME, context_id)

    def pick(self) -> tuple[str, list[int]]:
        context_id = self.rng.choice(list(self.contexts))
        return context_id, self.contexts[context_id]

    def new_tokens(self) -> list[int]:
        if self.rng.random() < 0.5:
            prefix = self.rng.choice(self.prefixes)
            return prefix[: self.rng.randint(1, len(prefix))]
        return [self.rng.randrange(256) for _ in range(self.rng.randint(1, 40))]

    async def create(self) -> None:
        info = await self.engine.create(ME, CreateContextRequest())
        self.contexts[info.context_id] = []

    async def fill(self, defer: bool = False) -> None:
        context_id, tokens = self.pick()
        new = self.new_tokens()
        try:
            result = await self.engine.fill(ME, context_id, new, defer=defer)
        except OutOfRange:
            assert len(tokens) + len(new) > self.limit
            return
        tokens += new
        assert result.context.seq_len + result.context.buffered_tokens == len(tokens)

    async def defer(self) -> None:
        await self.fill(defer=True)

    async def generate(self) -> None:
        context_id, tokens = self.pick()
        request = GenerateRequest(context_id=context_id, max_tokens=self.rng.randint(1, 20), sampling=GREEDY)
        try:
            async for piece in self.engine.generate(ME, request):
                self.expect(tokens, piece.token_ids)
        except FailedPrecondition:
            assert not tokens
        except OutOfRange:
            assert len(tokens) == self.limit

    def expect(self, tokens: list[int], new: object) -> None:
        for token in new:  # type: ignore[attr-defined]
            assert token == echo_next(tokens)
            tokens.append(token)

    async def cancel(self) -> None:
        """Leave a generation after a few pieces, or a call before it answers."""
        context_id, tokens = self.pick()
        if not tokens:
            return
        stream = self.engine.generate(ME, GenerateRequest(context_id=context_id, max_tokens=30, sampling=GREEDY))
        leave_after = self.rng.randint(0, 3)
        task = asyncio.create_task(self.consume(stream, tokens, leave_after))
        await asyncio.sleep(self.rng.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        actual = await tokens_of(self.engine, context_id)
        assert actual[: len(tokens)] == tokens
        self.expect(tokens, actual[len(tokens) :])  # what was settled but not read joined the context too

    async def consume(self, stream: object, tokens: list[int], leave_after: int) -> None:
        count = 0
        async for piece in stream:  # type: ignore[attr-defined]
            self.expect(tokens, piece.token_ids)
            count += 1
            if count > leave_after:
                return

    async def fork(self) -> None:
        if len(self.contexts) < 6:
            context_id, tokens = self.pick()
            for child in await self.engine.fork(ME, context_id, n=self.rng.randint(1, 3)):
                self.contexts[child.context_id] = list(tokens)

    async def truncate(self) -> None:
        context_id, tokens = self.pick()
        info = await context_info(self.engine, ME, context_id)
        droppable = info.working_tokens + info.buffered_tokens
        count = self.rng.randint(0, droppable)
        await self.engine.truncate(ME, context_id, count)
        del tokens[len(tokens) - count :]

    async def rewind(self) -> None:
        context_id, tokens = self.pick()
        to = self.rng.randint(0, len(tokens))
        info = await self.engine.rewind(ME, context_id, to)
        del tokens[to:]
        assert info.seq_len + info.buffered_tokens == to

    async def read(self) -> None:
        context_id, tokens = self.pick()
        assert await tokens_of(self.engine, context_id) == tokens

    async def close(self) -> None:
        context_id, _ = self.pick()
        await self.engine.close(ME, context_id)
        del self.contexts[context_id]


@pytest.mark.parametrize(
    ("page_size", "pages", "steps"),
    [
        (16, 48, 2),
        (16, 48, 4),
        pytest.param(2, 320, 1, marks=pytest.mark.slow),
        pytest.param(1, 500, 2, marks=pytest.mark.campaign),
    ],
)
async def test_random_traces_equal_solo_runs(make_engine, monkeypatch, page_size: int, pages: int, steps: int) -> None:
    limit = 200
    monkeypatch.setattr(PromptLookup, "guess", oracle_drafter(random.Random(page_size), right=0.8))
    config = EngineConfig(
        pages=pages,
        page_size=page_size,
        max_batch=8,
        max_batch_tokens=32,
        max_context_tokens=limit,
        steps_in_flight=steps,
    )
    engine = make_engine(config)
    rng = random.Random(page_size)
    prefixes = [[rng.randrange(256) for _ in range(60)] for _ in range(3)]
    prefixes.append(prefixes[0][:35] + prefixes[1][:20])  # a tree: shared to the middle of a page
    actors = [Actor(engine, seed, prefixes, limit) for seed in range(10)]
    await asyncio.gather(*[actor.run(60) for actor in actors])
    stats = await engine.stats()
    assert (stats.pages_held, stats.contexts, stats.running, stats.waiting) == (0, 0, 0, 0)
    assert stats.suspensions > 0  # the pool was too small for all, or this proves less than it says
    assert stats.compilations_after_ready == 0
    assert stats.tokens_drafted > stats.tokens_accepted > 0
