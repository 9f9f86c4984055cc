"""The scenarios: what is asked of a server, the same for every server.

Prompts are token ids, so tokenizers make no difference, and every request is greedy and runs to its full length. A
scenario first prepares (unmeasured: caches, batch sizes met for the first time) and then measures. It sees a server
only as a `Target`; fresh random tokens in every round keep one round's cache from helping the next.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times in seconds since the request began."""

    first_s: float
    last_s: float
    tokens: int  # generated
    first_tokens: int  # of these, in the first message
    cached: int | None  # prompt tokens found in a cache, where the server tells

    @property
    def per_token_s(self) -> float:
        """Time between tokens after the first message; 0 if everything came in it."""
        return (self.last_s - self.first_s) / max(self.tokens - self.first_tokens, 1)


class Target(Protocol):
    """A server under load."""

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Continue a prompt greedily by exactly `max_tokens` tokens, past any end of sequence."""
        ...

    async def drafts(self) -> tuple[int, int] | None:
        """Tokens guessed ahead since it started, and how many of them were right, where it tells. Not under load."""
        ...


@dataclass(frozen=True, slots=True)
class Measure:
    """One scenario on one server in one round. Medians are over the scenario's requests."""

    ttft_ms: float  # time to first token, median
    tpot_ms: float  # time per output token, median
    tokens_per_s: float  # output tokens of all requests over the wall time
    wall_s: float
    cached: int | None  # prompt tokens of the last request found in a cache
    drafted: int | None = None  # tokens guessed ahead in the whole scenario, where the server tells
    accepted: int | None = None  # of these, how many were right


class Load:
    """Draws prompts and sends them. One for each scenario, round and server; equal seeds draw equal prompts."""

    def __init__(self, target: Target, vocab_size: int, seed: str) -> None:
        self._target = target
        self._ids = range(5, vocab_size)  # the first few are special tokens in most vocabularies
        self._random = random.Random(seed)

    def tokens(self, count: int) -> Tokens:
        """So many random token ids."""
        return self._random.choices(self._ids, k=count)

    async def send(self, prompts: Sequence[Tokens], max_tokens: int) -> Measure:
        """All prompts at once; returns when all are answered."""
        begin = time.perf_counter()
        answers = await asyncio.gather(*(self._target.complete(prompt, max_tokens) for prompt in prompts))
        wall_s = time.perf_counter() - begin
        return Measure(
            ttft_ms=statistics.median(answer.first_s for answer in answers) * 1e3,
            tpot_ms=statistics.median(answer.per_token_s for answer in answers) * 1e3,
            tokens_per_s=sum(answer.tokens for answer in answers) / wall_s,
            wall_s=wall_s,
            cached=answers[-1].cached,
        )


Results = Mapping[str, Measure]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` returns its measures by name; `longest` is its longest sequence in tokens, prompt and output together."""

    about: str
    longest: int
    run: Callable[[Load], Awaitable[Results]]


async def warm_up(load: Load) -> None:
    """Two small requests, so that connections and first-time work are behind us."""
    for _ in range(2):
        await load.send([load.tokens(64)], 8)


async def _single(load: Load) -> Results:
    return {"single": await load.send([load.tokens(128)], 64)}


def _batch(streams: int) -> Callable[[Load], Awaitable[Results]]:
    async def run(load: Load) -> Results:
        await load.send([load.tokens(128) for _ in range(streams)], 8)
        return {f"batch{streams}": await load.send([load.tokens(128) for _ in range(streams)], 64)}

    return run


async def _prefill1k(load: Load) -> Results:
    await load.send([load.tokens(1024)], 2)
    return {"prefill1k": await load.send([load.tokens(1024)], 2)}


async def _prefix2k(load: Load) -> Results:
    prefix = load.tokens(2048)
    cold = await load.send([prefix + load.tokens(16)], 2)
    await load.send([prefix + load.tokens(16)], 2)
    return {"prefix2k-cold": cold, "prefix2k-hit": await load.send([prefix + load.tokens(16)], 2)}


def _fanout(name: str, streams: int, prefix_tokens: int, max_tokens: int) -> Callable[[Load], Awaitable[Results]]:
    async def run(load: Load) -> Results:
        prefix = load.tokens(prefix_tokens)
        await load.send([prefix + load.tokens(8)], 2)
        return {name: await load.send([prefix + load.tokens(16) for _ in range(streams)], max_tokens)}

    return run


async def _unshared2k(load: Load) -> Results:
    prompts = [load.tokens(2048) for _ in range(16)]
    await load.send(prompts, 2)
    return {"unshared2k": await load.send([prompt + load.tokens(8) for prompt in prompts], 64)}


async def _multiturn(load: Load) -> Results:
    prompt = load.tokens(256)
    turns = []
    for _ in range(6):
        turns.append(await load.send([prompt], 64))
        prompt = prompt + load.tokens(64 + 128)
    wall_s = sum(turn.wall_s for turn in turns)
    return {
        "multiturn": Measure(
            ttft_ms=statistics.median(turn.ttft_ms for turn in turns[1:]),
            tpot_ms=statistics.median(turn.tpot_ms for turn in turns),
            tokens_per_s=len(turns) * 64 / wall_s,
            wall_s=wall_s,
            cached=turns[-1].cached,
        )
    }


def _quotations(load: Load) -> Tokens:
    """A passage of 96 tokens, quoted five times between other words and then begun once more."""
    passage = load.tokens(96)
    prompt = [token for _ in range(5) for token in load.tokens(8) + passage]
    return prompt + load.tokens(8) + passage[:24]


async def _repeat(load: Load) -> Results:
    """What was said before is likely to be said again, so guesses from the text so far can be right.

    A model of random weights does not quote, but under greedy decoding it soon runs in circles, which is as good.
    """
    await load.send([_quotations(load)], 16)
    return {"repeat": await load.send([_quotations(load)], 256)}


SCENARIOS: Mapping[str, Scenario] = {
    "single": Scenario("one stream: 128 tokens in, 64 out", 192, _single),
    "batch8": Scenario("8 streams: 128 in, 64 out each", 192, _batch(8)),
    "batch16": Scenario("16 streams: 128 in, 64 out each", 192, _batch(16)),
    "prefill1k": Scenario("one prompt of 1024 tokens", 1026, _prefill1k),
    "prefix2k": Scenario("one prompt of 2048 + 16 tokens: unknown, then its first 2048 known", 2066, _prefix2k),
    "fanout16": Scenario(
        "16 branches off one cached prefix of 2048, 64 out each", 2128, _fanout("fanout16", 16, 2048, 64)
    ),
    "fanout32x8k": Scenario(
        "32 branches off one cached prefix of 8192, 32 out each", 8240, _fanout("fanout32x8k", 32, 8192, 32)
    ),
    "unshared2k": Scenario("16 streams, each with its own cached 2048 tokens, 64 out each", 2120, _unshared2k),
    "multiturn": Scenario("6 turns: 192 new tokens in, 64 out, the history sent again", 1280, _multiturn),
    "repeat": Scenario("one stream that repeats itself: 552 tokens in, a passage five times, 256 out", 808, _repeat),
}
