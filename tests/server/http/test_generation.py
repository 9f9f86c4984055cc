"""One prompt and its outputs: where it begins, what it costs, and that no context is left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import snapshot_service_pb2
from jaxctx.v1.generation_pb2 import OutputFormat, SamplingParams
from jaxctx_server.auth import LOCAL
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import ForkOf, Generation, OpenedFrom, PromptScoring, run
from jaxctx_server.services import Backend
from tests.echo import echo_logprobs
from tests.server.http.calls import call_of
from tests.server.http.openai.harness import no_context_left

PROMPT = "Tell a story of a page that is shared by many. " * 4
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def call(backend: Backend) -> HttpCall:
    return call_of(backend, LOCAL)


def generation_of(text: str | None = PROMPT, tokens: int = 8, **fields: Any) -> Generation:
    generate = pb.GenerateRequest(max_tokens=tokens, sampling=GREEDY, ignore_eos=True, n=fields.pop("n", None))
    fill = None if text is None else pb.FillRequest(text=text)
    return Generation(create=pb.CreateContextRequest(), fill=fill, generate=generate, **fields)


async def texts(call: HttpCall, generation: Generation) -> list[str]:
    """The text of each output."""
    found: dict[int, str] = {}
    async with aclosing(run(call, generation)) as parts:
        async for part in parts:
            found[part.index] = found.get(part.index, "") + part.text
    return [found[index] for index in sorted(found)]


async def alone(client: jaxctx.aio.Client, text: str, tokens: int = 8) -> str:
    async with await client.create(text, salt="alone") as context:
        return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))


async def test_a_new_context(call: HttpCall, client: jaxctx.aio.Client) -> None:
    first, second = generation_of(), generation_of()
    assert await texts(call, first) == [await alone(client, PROMPT)]
    assert (first.model_id, first.usage.cached_tokens, first.usage.completion_tokens) == ("echo", 0, 8)
    await texts(call, second)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert 0 < second.usage.cached_tokens < second.usage.prompt_tokens
    assert second.usage.cached_tokens + second.usage.computed_tokens == second.usage.prompt_tokens
    await no_context_left(client)


async def test_several_outputs_have_one_prompt(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generation = generation_of(n=3)
    assert await texts(call, generation) == [await alone(client, PROMPT)] * 3
    assert generation.usage.completion_tokens == 24
    assert generation.usage.cached_tokens == 0
    assert len(generation.context_ids) == 4
    await no_context_left(client)


async def test_a_fork_leaves_its_parent_as_it_is(call: HttpCall, client: jaxctx.aio.Client) -> None:
    async with await client.create(PROMPT) as parent:
        before = (await parent.refresh()).seq_len
        generation = generation_of(" And then", source=ForkOf(parent.id))
        assert await texts(call, generation) == [await alone(client, PROMPT + " And then")]
        assert generation.usage.computed_tokens <= len(" And then") + 1
        assert (await parent.refresh()).seq_len == before
    await no_context_left(client)


async def test_a_snapshot(call: HttpCall, client: jaxctx.aio.Client) -> None:
    async with await client.create(PROMPT) as parent:
        saving = snapshot_service_pb2.SaveRequest(context_id=parent.id, name="kept")
        await call.unary(call.services.snapshots.save, saving)
    generation = generation_of(" And then", source=OpenedFrom("kept"))
    assert await texts(call, generation) == [await alone(client, PROMPT + " And then")]
    assert generation.usage.computed_tokens <= len(" And then") + 1
    await no_context_left(client)


@pytest.mark.parametrize(("found", "cached"), [(48, 32), (32, 32), (16, 16), (0, 0)])
async def test_a_part_of_a_snapshot_whose_end_was_computed_again(
    call: HttpCall, client: jaxctx.aio.Client, monkeypatch: pytest.MonkeyPatch, found: int, cached: int
) -> None:
    """What was computed behind the part that is used costs none of the prompt."""
    async with await client.create(PROMPT) as parent:
        await call.unary(
            call.services.snapshots.save, snapshot_service_pb2.SaveRequest(context_id=parent.id, name="kept")
        )
    open_snapshot = call.services.snapshots.open

    async def opened(*arguments: Any) -> Any:
        response = await open_snapshot(*arguments)
        response.computed = response.context.seq_len - found
        return response

    monkeypatch.setattr(call.services.snapshots, "open", opened)
    generation = generation_of(" And then", source=OpenedFrom("kept"), rewind_to=32)
    await texts(call, generation)
    usage = generation.usage
    assert (usage.cached_tokens, usage.computed_tokens) == (cached, usage.prompt_tokens - cached)
    assert usage.reopened_tokens > 64  # what it did cost
    await no_context_left(client)


async def test_a_format_that_cannot_be_followed_gives_way_to_a_looser_one(
    call: HttpCall, client: jaxctx.aio.Client
) -> None:
    def asking(grammar: str, looser: str | None) -> Generation:
        generation = generation_of()
        assert generation.generate is not None
        generation.generate.output_format.grammar = grammar
        generation.looser_format = None if looser is None else OutputFormat(grammar=looser)
        return generation

    assert await texts(call, asking('start: "ab"', 'start: "x"')) == ["ab"]
    assert await texts(call, asking('start: %json {"type": "any"}', 'start: "x"')) == ["x"]
    for looser in (None, "start: nothing"):
        with pytest.raises(errors.InvalidArgument) as refused:
            await texts(call, asking('start: %json {"type": "any"}', looser))
        assert [each.field for each in refused.value.violations] == ["output_format.grammar"]
    await no_context_left(client)


async def test_only_filling_computes_the_prompt(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generation = generation_of()
    generation.generate = None
    assert await texts(call, generation) == []
    assert generation.usage.computed_tokens == generation.usage.prompt_tokens > 0
    again = generation_of()
    await texts(call, again)
    assert again.usage.cached_tokens > 0
    await no_context_left(client)


async def test_contexts_that_are_kept_are_left_to_the_caller(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generation = generation_of(keep=True)
    await texts(call, generation)
    assert [each.id async for each in client.contexts()] == [generation.context_id]
    await (await client.context(generation.context_id)).close()


@pytest.mark.parametrize("keep", [False, True])
async def test_what_ends_early_leaves_no_context(call: HttpCall, client: jaxctx.aio.Client, keep: bool) -> None:
    parts = run(call, generation_of(tokens=500, keep=keep))
    await anext(parts)
    await parts.aclose()
    with pytest.raises(errors.InvalidArgument):
        await texts(call, generation_of(tokens=-1, keep=keep))
    with pytest.raises(errors.NotFound):
        await texts(call, generation_of(source=ForkOf("none"), keep=keep))
    task = asyncio.create_task(texts(call, generation_of(tokens=1000, keep=keep)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await no_context_left(client)


async def test_the_first_part_says_what_the_prompt_cost(call: HttpCall) -> None:
    await texts(call, generation_of())
    generation = generation_of(tokens=40)
    async with aclosing(run(call, generation)) as parts:
        first = await anext(parts)
        assert not first.finish
        assert first.usage.cached_tokens == generation.usage.cached_tokens > 0
        early = generation.usage.cached_tokens, generation.usage.computed_tokens, generation.usage.prompt_tokens
        async for part in parts:
            assert part.HasField("usage") == bool(part.finish)
    usage = generation.usage
    assert (usage.cached_tokens, usage.computed_tokens, usage.prompt_tokens) == early
    assert usage.completion_tokens == 40
    assert 0 <= usage.written_tokens <= usage.computed_tokens


@pytest.mark.parametrize("n", [None, 2])
async def test_a_prompt_that_is_scored(call: HttpCall, client: jaxctx.aio.Client, n: int | None) -> None:
    """In several passes; the same outputs follow, and all of the prompt is counted as computed."""
    ids = list(await client.tokenize(PROMPT * 3))
    assert len(ids) > 256
    generation = generation_of(None, n=n, scoring=PromptScoring(top=2))
    generation.fill = pb.FillRequest(tokens={"ids": ids})
    assert await texts(call, generation) == [await alone(client, PROMPT * 3)] * (n or 1)
    assert generation.scoring is not None
    scored = generation.scoring.logprobs
    assert [each.token_id for each in scored] == ids[1:]
    for place in (1, 255, 256, 257, len(ids) - 1):
        expected = echo_logprobs(ids[:place])
        assert scored[place - 1].logprob == pytest.approx(expected[ids[place]], abs=1e-4)
        best = sorted(range(512), key=lambda token: -expected[token])[:2]
        assert [each.token_id for each in scored[place - 1].top] == best
    usage = generation.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (len(ids), 0, len(ids))
    await no_context_left(client)


async def test_a_scored_prompt_whose_tokens_are_wrong(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generation = generation_of(None, scoring=PromptScoring(top=0))
    generation.fill = pb.FillRequest(tokens={"ids": [1, 512, 3]})
    with pytest.raises(errors.InvalidArgument) as refused:
        await texts(call, generation)
    assert refused.value.violations[0].field == "tokens[1]"
    await no_context_left(client)
