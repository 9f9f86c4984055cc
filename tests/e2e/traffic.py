"""Random clients: requests of every kind, all lengths and all options, valid or not, some of them given up half way."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jaxctx
from jaxctx.aio import Context
from jaxctx.client.options import ForwardOutputOptions
from jaxctx.errors import BY_CODE, DataLoss, Internal, InvalidArgument

VOCABULARY = 512  # of the echo model, and of others that are served with its text
ANSWER_S = 120.0  # in which every request must have ended, however busy the machine
KEPT = 5  # contexts of one client
ERRORS = {*BY_CODE.values()} - {Internal, DataLoss}  # that requests may end with
FORMATS = [
    jaxctx.OutputFormat(json_object=True),
    jaxctx.OutputFormat(json_schema='{"type": "array", "items": {"type": "integer"}}'),
    jaxctx.OutputFormat(regex="[a-z]{3,9}( [a-z]{3,9})*"),
    jaxctx.OutputFormat(grammar='start: "call " /[xyz]+/ <|im_start|> %json {"type": "object"}'),
    jaxctx.OutputFormat(choices=["yes", "no", "né"]),
    jaxctx.OutputFormat(regex="[a"),  # refused
]
WORDS = ["the ", "rain", " in Spain", "\n", "e", "né", "日本", "", "  ", "stop"]


class Visitor:
    """One client, which does one thing after another and notes how each ended in `endings`."""

    def __init__(self, client: jaxctx.aio.Client, seed: int, longest: int, endings: Counter[tuple[str, str]]) -> None:
        self.client, self.longest, self.endings = client, longest, endings
        self.random = random.Random(seed)
        self.contexts: list[Context] = []
        self.names = [f"{name}{seed % 3}" for name in "ab"]  # others save under them too

    async def run(self, requests: int) -> None:
        """So many requests, and those that close what is too much."""
        kinds = [self.fill] * 4 + [self.generate] * 6 + [self.forward] * 3 + [self.fork, self.rewind, self.truncate]
        kinds += [self.create, self.save, self.open, self.look, self.pages, self.settings, self.wrong]
        for _ in range(requests):
            kind = self.random.choice(kinds) if self.contexts else self.create
            given_up = 0.03 * self.random.random() if self.random.random() < 0.1 else None
            await self.ended(kind.__name__, kind(), given_up)
            while len(self.contexts) > KEPT:
                context = self.contexts.pop(self.random.randrange(len(self.contexts)))
                await self.ended("close", context.close())

    async def ended(self, kind: str, request: Awaitable[object], given_up_s: float | None = None) -> None:
        """Wait for the end of a request, and note it. Raises what is neither an answer nor an error of ours."""
        task = asyncio.ensure_future(request)
        if given_up_s is not None:
            await asyncio.wait([task], timeout=given_up_s)
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=ANSWER_S)
        assert done, f"{kind} has not ended"
        if task.cancelled():
            assert given_up_s is not None, f"{kind} was cancelled, but not by us"
            ending = "given up"
        elif error := task.exception():
            if type(error) not in ERRORS:
                raise error
            ending = type(error).__name__
        else:
            ending = "answer"
        self.endings[kind, ending] += 1

    def tokens(self) -> list[int]:
        """Short, around the size of a page or of a step, long, or too long; often with a beginning that others have."""
        edges = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65]
        count = self.random.choice(edges) if self.random.random() < 0.5 else self.random.randint(1, 300)
        if self.random.random() < 0.03:
            count = self.random.randint(self.longest // 2, self.longest + 20)
        if self.random.random() < 0.4:
            return [(7 * i) % 256 for i in range(count)]
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def some(self, **options: Callable[[], Any]) -> dict[str, Any]:
        """Each of the options with a chance of one in three."""
        return {name: choose() for name, choose in options.items() if self.random.random() < 1 / 3}

    def sampling(self) -> dict[str, Any]:
        choose = self.random
        ids = range(VOCABULARY)
        return self.some(
            temperature=lambda: choose.choice([0, 0, 0.3, 1, 2]),
            top_k=lambda: choose.choice([1, 5, 64, 65, VOCABULARY]),
            top_p=lambda: choose.choice([0.1, 0.9, 1]),
            min_p=lambda: choose.choice([0, 0.05, 1]),
            repetition_penalty=lambda: choose.choice([0.5, 1, 1.3]),
            presence_penalty=lambda: choose.uniform(-2, 2),
            frequency_penalty=lambda: choose.uniform(-2, 2),
            logit_bias=lambda: {i: choose.uniform(-100, 100) for i in choose.sample(ids, choose.choice([1, 300]))},
            seed=lambda: choose.getrandbits(62),
            allowed_token_ids=lambda: choose.sample(ids, choose.choice([2, 300])),
            bad_words=lambda: choose.choice([["e"], ["th", "and so"]]),
        )

    def deadline(self) -> dict[str, float]:
        return {"timeout_s": self.random.choice([0.001, 0.02, 0.1])} if self.random.random() < 0.05 else {}

    def context(self) -> Context:
        return self.random.choice(self.contexts)

    async def create(self) -> None:
        options = self.some(
            tokens=self.tokens,
            salt=lambda: self.random.choice("xy"),
            manual_commit=lambda: True,
            priority=lambda: self.random.randint(-100, 100),
            labels=lambda: {"of": "traffic"},
            ttl_s=lambda: self.random.choice([0.05, 60]),
        )
        self.contexts.append(await self.client.create(**options, **self.deadline()))

    async def fill(self) -> None:
        match self.random.randrange(8):
            case 0:
                content: dict[str, Any] = {"text": "".join(self.random.choices(WORDS, k=20))}
            case 1:
                content = {"messages": [{"role": "user", "content": "".join(self.random.choices(WORDS, k=9))}]}
            case _:
                content = {"tokens": self.tokens()}
        context, defer = self.context(), self.random.random() < 0.3
        await context.fill(**content, defer=defer, **self.deadline())
        if defer and self.random.random() < 0.3:
            await context.flush()

    async def generate(self) -> None:
        choose, context = self.random, self.context()
        options = self.sampling() | self.some(
            max_tokens=lambda: choose.choice([1, 2, 17, 60]),
            min_tokens=lambda: choose.choice([1, 5]),
            logprobs=lambda: True,
            stop=lambda: choose.sample(["e", "th", "\n", "né", "not said"], choose.randint(1, 3)),
            stop_token_ids=lambda: choose.sample(range(VOCABULARY), choose.choice([1, 20])),
            ignore_eos=lambda: True,
            include_stop=lambda: True,
            output_format=lambda: choose.choice(FORMATS),
        )
        options.setdefault("max_tokens", 20)
        if options.get("logprobs"):
            options["top_logprobs"] = choose.choice([0, 1, 20])
        n = choose.choice([1] * 8 + [2, 3])
        if n == 1 and choose.random() < 0.15:  # leave it
            pieces = context.generate(**options)
            async for _ in pieces:
                if choose.random() < 0.3:
                    break
            pieces.close()
            return
        outputs = await context.completions(n, **options, **self.deadline())
        assert len(outputs) == n
        self.contexts += [output.context for output in outputs if output.context is not context]

    async def forward(self) -> None:
        """In the middle of a page, marked or not, asked about or not, in one step or several."""
        choose, context = self.random, self.context()
        start = (await context.refresh()).seq_len + context.buffered_tokens
        count = choose.choice([1, 3, 16, 17, 64, 65, 130])
        indices = range(start, start + count)
        options = self.some(
            positions=lambda: [index + choose.choice([0, 0, 0, 5]) for index in indices],
            masks=lambda: [self.mask(index) for index in indices],
            keep_working=lambda: True,
        )
        outputs = []
        for index in sorted(choose.sample(range(count), choose.choice([0, 1, min(count, 16), min(count, 40)]))):
            asked = self.some(
                sample=lambda: {"temperature": choose.choice([0, 1.0]), "seed": 1},
                logprob_ids=lambda: choose.sample(range(VOCABULARY), 3),
                top=lambda: choose.choice([1, 64]),
                logits=lambda: True,
            )
            outputs.append(ForwardOutputOptions(index=index, **{"entropy": True, **asked}))
        tokens = [choose.randrange(VOCABULARY) for _ in indices]
        result = await context.forward(tokens, outputs=outputs, **options, **self.deadline())
        told = [output.index for output in result.outputs]
        assert told == [output.index for output in outputs]

    def mask(self, index: int) -> list[tuple[int, int]]:
        """Of the token at `index`: everything, sinks and a window, or some tokens."""
        match self.random.randrange(3):
            case 0:
                return []
            case 1 if index > 20:
                return [(0, 4), (index - 10, index + 1)]
            case _:
                first = self.random.randint(0, index)
                return [(first, self.random.randint(first + 1, index + 1))]

    async def fork(self) -> None:
        self.contexts += await self.context().fork(self.random.choice([1, 1, 2, 4]))

    async def rewind(self) -> None:
        context = self.context()
        length = (await context.refresh()).seq_len + context.buffered_tokens
        await context.rewind(self.random.randint(0, length + 1))

    async def truncate(self) -> None:
        await self.context().truncate(self.random.choice([0, 1, 7, 16, 40]))

    async def save(self) -> None:
        options = self.some(durable=lambda: True, overwrite_version=lambda: self.random.randint(1, 9))
        await self.context().save(self.random.choice(self.names), **options)

    async def open(self) -> None:
        name = self.random.choice(self.names)
        match self.random.randrange(4):
            case 0:
                await self.client.delete_snapshot(name)
            case 1:
                self.contexts.append(await self.client.take(name))
            case _:
                self.contexts.append(await self.client.open(name))

    async def look(self) -> None:
        context = self.context()
        ask: Sequence[Callable[[], Awaitable[object]]] = [
            context.tokens,
            context.pages,
            context.ancestors,
            lambda: context.plan(tokens=self.tokens()),
            lambda: context.compare(self.context()),
            self.client.stats,
        ]
        await self.random.choice(ask)()

    async def pages(self) -> None:
        context, count = self.context(), self.random.choice([1, 1, 2, 20])
        await self.random.choice([context.reserve, context.commit, context.release])(count, timeout_s=2)

    async def settings(self) -> None:
        match self.random.randrange(6):
            case 0:
                await self.client.clear_cache()
            case 1:
                publication = await self.context().publish(ttl_s=60)
                await self.client.unpublish(publication.publication_id)
            case _:
                await self.context().update(priority=self.random.randint(-100, 100), pinned=self.random.random() < 0.1)

    async def wrong(self) -> None:
        """What no server takes."""
        context = self.context()
        bad: Sequence[Callable[[], Awaitable[object]]] = [
            lambda: context.fill(tokens=[VOCABULARY]),
            lambda: context.complete(temperature=-1.0),
            lambda: context.complete(logit_bias={VOCABULARY: 1.0}),
            lambda: context.complete(top_logprobs=21, logprobs=True),
            lambda: context.forward([1], masks=[[(5, 2)]]),
            lambda: context.update(priority=101),
        ]
        try:
            await self.random.choice(bad)()
        except InvalidArgument:
            return
        raise AssertionError("it was taken")
