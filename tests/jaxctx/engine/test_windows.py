"""Layers with sliding windows in the engine: forks, rewinds, hits, masks and drafts change no token of any context.

The model adds up what rows see in each layer, exactly, so that one token too many or too few anywhere is another text.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import pytest

from jaxctx.cache.attention_overrides import decode_override
from jaxctx.cache.context import Context
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.factory import ServedModel
from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.prompt_lookup import PromptLookup
from jaxctx.errors import FailedPrecondition, OutOfRange, ResourceExhausted
from jaxctx.model.config import ModelConfig
from jaxctx.types import (
    CreateContextRequest,
    ForwardOutputParams,
    ForwardRequest,
    GenerateRequest,
    SamplingParams,
)
from scripts.checkpoints import init_random
from scripts.dense import DenseCausal
from tests.engines import MakeEngine, tokens_of
from tests.windowed_echo import Ranges, Truth, windowed_echo

ME = Caller()
GREEDY = SamplingParams(temperature=0.0)
WINDOWS = (6, None, 17, 6)  # less and more than a page, and all
CONFIG = EngineConfig(
    pages=72, page_size=4, max_batch=4, max_batch_tokens=16, max_context_tokens=96, draft_tokens=3, host_pages=16
)
TRUTH = Truth(WINDOWS)


@dataclass
class Text:
    """What is known of one context."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    masks: list[Ranges] = field(default_factory=list)  # an empty one: all up to the token itself

    def add(self, token: int) -> None:
        """Append a token without a position and a mask of its own."""
        self.positions.append(len(self.tokens))
        self.tokens.append(token)
        self.masks.append(())

    def next_token(self, end: int | None = None) -> int:
        """What follows the first `end` tokens."""
        return TRUTH.next_token(self.tokens[:end], self.positions[:end], self.masks[:end])

    def cut(self, end: int) -> None:
        """Leave the first `end` tokens."""
        del self.tokens[end:], self.positions[end:], self.masks[end:]

    def copy(self) -> "Text":
        return Text([*self.tokens], [*self.positions], [*self.masks])


def known(context: Context) -> Text:
    """What the engine's own books say of a context."""
    text = Text()
    for index, token in enumerate(context.tokens().tolist()):
        text.add(token)
        override = context.attention_overrides.get(index)
        if override:
            text.positions[index], text.masks[index] = decode_override(override)
    return text


class Actor:
    """One client that does random things to contexts of its own and knows what their tokens must be."""

    def __init__(self, engine: LocalEngine, seed: int, prefixes: list[list[int]], masks: float) -> None:
        """`masks`: how often it computes tokens with positions and masks of their own."""
        self.engine = engine
        self.rng = random.Random(seed)
        self.prefixes = prefixes
        self.masks = masks
        self.contexts: dict[str, Text] = {}
        self.checked = 0

    async def run(self, operations: int) -> None:
        actions = [self.create, self.fill, self.fill, self.generate, self.generate, self.fork, self.rewind, self.close]
        for _ in range(operations):
            action = self.rng.choice(actions) if self.contexts else self.create
            if self.contexts and self.rng.random() < self.masks:
                action = self.forward
            try:
                await action()
            except ResourceExhausted:
                if self.contexts:
                    await self.close()
        for context_id, text in self.contexts.items():
            assert await tokens_of(self.engine, context_id) == text.tokens
        for context_id in list(self.contexts):
            await self.engine.close(ME, context_id)

    def pick(self) -> tuple[str, Text]:
        context_id = self.rng.choice(list(self.contexts))
        return context_id, self.contexts[context_id]

    async def create(self) -> None:
        info = await self.engine.create(ME, CreateContextRequest())
        self.contexts[info.context_id] = Text()

    async def fill(self) -> None:
        context_id, text = self.pick()
        prefix = self.rng.choice(self.prefixes)
        new = prefix[: self.rng.randint(1, len(prefix))]
        if text.tokens:
            new = [self.rng.randrange(256) for _ in range(self.rng.randint(1, 30))]
        try:
            await self.engine.fill(ME, context_id, new)
        except OutOfRange:
            return
        for token in new:
            text.add(token)

    async def generate(self) -> None:
        context_id, text = self.pick()
        request = GenerateRequest(context_id=context_id, max_tokens=self.rng.randint(1, 24), sampling=GREEDY)
        try:
            async for piece in self.engine.generate(ME, request):
                for token in piece.token_ids:
                    assert token == text.next_token(), (len(text.tokens), text.positions)
                    text.add(token)
                    self.checked += 1
        except FailedPrecondition:
            assert not text.tokens
        except OutOfRange:
            assert len(text.tokens) == CONFIG.max_context_tokens

    async def forward(self) -> None:
        """A tree of tokens: each has a position near its own, and sees the beginning and some tokens before it."""
        context_id, text = self.pick()
        first, count = len(text.tokens), self.rng.randint(1, 9)
        grown = text.copy()
        for index in range(first, first + count):
            grown.add(self.rng.randrange(256))
            if self.rng.random() < 0.8:
                low, high = max(0, index - 12), min(index + 8, CONFIG.max_context_tokens - 1)
                grown.positions[index] = self.rng.randint(low, max(low, high))
            if self.rng.random() < 0.6:
                grown.masks[index] = self.mask(first, index)
        asked = sorted(self.rng.sample(range(count), self.rng.randint(0, min(count, 4))))
        request = ForwardRequest(
            context_id=context_id,
            tokens=grown.tokens[first:],
            positions=grown.positions[first:],
            masks=[mask or [(0, index + 1)] for index, mask in enumerate(grown.masks[first:], first)],
            outputs=[ForwardOutputParams(index=index, sample=GREEDY) for index in asked],
        )
        try:
            result = await self.engine.forward(ME, request)
        except OutOfRange:
            return
        self.contexts[context_id] = grown
        for output in result.outputs:
            assert output.token_id == grown.next_token(first + output.index + 1)
            self.checked += 1

    def mask(self, first: int, index: int) -> Ranges:
        ranges = [(0, self.rng.randint(1, first))] if first else []
        seen = sorted({*self.rng.sample(range(first, index), self.rng.randint(0, index - first)), index})
        return ranges + [(each, each + 1) for each in seen if each >= first]

    async def fork(self) -> None:
        if len(self.contexts) < 5:
            context_id, text = self.pick()
            for child in await self.engine.fork(ME, context_id, n=self.rng.randint(1, 2)):
                self.contexts[child.context_id] = text.copy()

    async def rewind(self) -> None:
        context_id, text = self.pick()
        to = self.rng.randint(0, len(text.tokens))
        await self.engine.rewind(ME, context_id, to)
        text.cut(to)

    async def close(self) -> None:
        context_id, _ = self.pick()
        await self.engine.close(ME, context_id)
        del self.contexts[context_id]


def guess(self: PromptLookup, context: Context, count: int, min_ngram: int = 0) -> list[int]:
    """Drafts of which most are right."""
    text, guesses = known(context), []
    for _ in range(max(count, 0)):
        right = text.next_token() if len(text.tokens) % 5 else 1
        guesses.append(right)
        text.add(right)
    return guesses


async def run_actors(engine: LocalEngine, seed: int, masks: float, operations: int = 40) -> None:
    prefixes = [[random.Random(i).randrange(256) for _ in range(60)] for i in range(2)]
    actors = [Actor(engine, 100 * seed + number, prefixes, masks) for number in range(3)]
    await asyncio.gather(*[actor.run(operations) for actor in actors])
    assert sum(actor.checked for actor in actors) > 50
    cached = (await engine.stats()).tokens_cached
    for _ in range(2):  # the second one finds the pages of the first
        last = Actor(engine, seed, [prefixes[0]], 0)
        await last.create()
        ((context_id, text),) = last.contexts.items()
        await engine.fill(ME, context_id, prefixes[0])
        for token in prefixes[0]:
            text.add(token)
        await last.generate()
    assert (await engine.stats()).tokens_cached > cached


@pytest.mark.parametrize(
    ("seed", "masks"),
    [
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        (2, 0.25),
        *[pytest.param(seed, 0.2 * (seed % 3), marks=pytest.mark.campaign) for seed in range(3, 12)],
    ],
)
async def test_any_trace_equals_what_each_context_would_read_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int, masks: float
) -> None:
    monkeypatch.setattr(PromptLookup, "guess", guess)
    engine = make_engine(CONFIG, windowed_echo(WINDOWS), device_config=CONFIG, whole=False)
    await run_actors(engine, seed, masks)


@pytest.mark.parametrize("position", [3, 20, 38, 44, 60])
async def test_a_text_goes_on_behind_tokens_of_other_positions(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """While the windows of later tokens begin there, they hide others than the first indices."""
    monkeypatch.setattr(PromptLookup, "guess", guess)
    engine = make_engine(CONFIG, windowed_echo(WINDOWS), device_config=CONFIG, whole=False)
    context_id = (await engine.create(ME, CreateContextRequest())).context_id
    text = Text()
    for token in range(40):
        text.add(token)
    await engine.fill(ME, context_id, text.tokens)
    for number in range(3):
        text.add(90 + number)
        text.positions[-1] = position + number
    request = ForwardRequest(context_id=context_id, tokens=text.tokens[40:], positions=text.positions[40:])
    await engine.forward(ME, request)
    request = GenerateRequest(context_id=context_id, max_tokens=40, sampling=GREEDY, ignore_eos=True)
    async for piece in engine.generate(ME, request):
        for token in piece.token_ids:
            assert token == text.next_token(), len(text.tokens)
            text.add(token)
    assert len(text.tokens) == 83


LAYERS = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=96,
    width=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    max_positions=4096,
    query_key_norm="head",
)


@pytest.fixture(params=["float32", "bfloat16"])
def decoder(request: pytest.FixtureRequest, echo_served: ServedModel) -> ServedModel:
    """A decoder whose windows alternate, with capped scores."""
    model, params = init_random(LAYERS, seed=5, dtype=request.param, scale=0.3)
    model = replace(model, kv=replace(model.kv, windows=(9, None, 9, 30), soft_cap=1.5))
    return replace(echo_served, model=model, params=params, revision=f"windows-{request.param}", dtype=request.param)


@pytest.mark.campaign
async def test_a_decoder_with_windows_says_what_dense_attention_says(
    make_engine: MakeEngine, decoder: ServedModel
) -> None:
    """Alone, forked, rewound, found in the cache and beside others. In bfloat16 all of these are equal."""
    config = replace(CONFIG, draft_tokens=0)
    engine = make_engine(config, decoder, device_config=config, whole=False)
    rng = random.Random(3)
    prompts = [[rng.randrange(96) for _ in range(length)] for length in (1, 9, 33, 50)]
    alone = []
    for prompt in prompts:
        context_id = (await engine.create(ME, CreateContextRequest(salt="alone"))).context_id
        await engine.fill(ME, context_id, prompt)
        alone.append(await continued(engine, context_id))
    if decoder.dtype == "float32":
        assert alone == [dense_greedy(decoder, prompt) for prompt in prompts]

    for prompt, expected in zip(prompts, alone, strict=True):
        context_id = (await engine.create(ME, CreateContextRequest())).context_id
        for part in (prompt[: len(prompt) // 3], prompt[len(prompt) // 3 :]):
            await engine.fill(ME, context_id, part)
        forks = [fork.context_id for fork in await engine.fork(ME, context_id, n=2)]
        again = (await engine.create(ME, CreateContextRequest())).context_id
        await engine.fill(ME, again, prompt)
        assert await asyncio.gather(*[continued(engine, each) for each in (context_id, *forks, again)]) == 4 * [
            expected
        ]
        await engine.rewind(ME, forks[0], len(prompt) + 7)
        assert await continued(engine, forks[0], TOKENS - 7) == expected[7:]
        for each in (context_id, *forks, again):
            await engine.close(ME, each)


TOKENS = 40


async def continued(engine: LocalEngine, context_id: str, tokens: int = TOKENS) -> list[int]:
    request = GenerateRequest(context_id=context_id, max_tokens=tokens, sampling=GREEDY, ignore_eos=True)
    return [token async for piece in engine.generate(ME, request) for token in piece.token_ids]


def dense_greedy(served: ServedModel, prompt: list[int]) -> list[int]:
    """The greedy continuation of a prompt, each token computed anew from all before it."""
    model, length = served.model, len(prompt) + TOKENS
    kv = model.kv

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        dense = DenseCausal(windows=kv.windows, soft_cap=kv.soft_cap)
        return model.logits(served.params, model.hidden(served.params, tokens, jnp.arange(length), dense))

    tokens = [*prompt]
    while len(tokens) < length:
        padded = jnp.asarray([*tokens, *[0] * (length - len(tokens))], jnp.int32)
        tokens.append(int(logits(padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]
