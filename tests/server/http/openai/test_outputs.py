"""Several prompts at once: all parts come, few prompts run at once, and the first error ends all."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest

import jaxctx
from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import CreateContextRequest, FillRequest, GenerateRequest
from jaxctx.v1.generation_pb2 import SamplingParams
from jaxctx_server.auth import LOCAL
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.generation import Generation
from jaxctx_server.http.openai.outputs import run_prompts
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of
from tests.server.http.openai.harness import no_context_left


@pytest.fixture
def call(backend: Backend) -> HttpCall:
    return call_of(backend, LOCAL)


def generation_of(text: str, tokens: int = 4, n: int | None = None) -> Generation:
    generate = GenerateRequest(max_tokens=tokens, sampling=SamplingParams(temperature=0), ignore_eos=True, n=n)
    return Generation(create=CreateContextRequest(), fill=FillRequest(text=text), generate=generate)


async def test_all_parts_come(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generations = [generation_of(f"{number}: ", n=2) for number in range(12)]
    counts: Counter[tuple[int, int]] = Counter()
    running: set[int] = set()
    most_running = 0
    async with aclosing(run_prompts(call, generations, 2)) as parts:
        async for each in parts:
            counts[each.prompt, each.part.index] += len(each.part.token_ids)
            running.add(each.prompt)
            most_running = max(most_running, len(running))
            if counts[each.prompt, 0] == counts[each.prompt, 1] == 4:
                running.remove(each.prompt)
    assert counts == {(prompt, index): 4 for prompt in range(12) for index in range(2)}
    assert 1 < most_running <= 8
    await no_context_left(client)


async def test_the_first_error_ends_all(call: HttpCall, client: jaxctx.aio.Client) -> None:
    generations = [generation_of(text, 1000) for text in ("a", "~" * 2000, "b")]
    with pytest.raises(InvalidArgument):
        async with aclosing(run_prompts(call, generations, 1)) as parts:
            async for _ in parts:
                pass
    await no_context_left(client)


async def test_who_stops_reading_ends_all(call: HttpCall, client: jaxctx.aio.Client) -> None:
    """Also while more parts wait than are kept."""
    generations: Any = [generation_of(f"{number}: ", 400) for number in range(10)]
    parts = run_prompts(call, generations, 1)
    await anext(parts)
    await parts.aclose()
    await no_context_left(client)
