"""How every decoding algorithm begins and ends: what it leaves in the context."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx import errors
from jaxctx.client._sync.decoding import continuing as blocking_continuing
from jaxctx.client.decoding import continuing as aio_continuing

PROMPT = [1, 5, 2, 6, 0, 3]


@pytest.fixture
def continuing(either: Any) -> Any:
    """The module under test, for the client of this test."""
    return blocking_continuing if either.kind == "blocking" else aio_continuing


async def test_begin_returns_all_tokens_and_removes_the_last_one(either: Any, client: Any, continuing: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    assert await either(continuing.begin(context)) == PROMPT
    assert await either(context.tokens()) == PROMPT[:-1]


async def test_begin_leaves_a_context_of_one_token_empty(either: Any, client: Any, continuing: Any) -> None:
    context = await either(client.create(tokens=[7]))
    assert await either(continuing.begin(context)) == [7]
    assert await either(context.tokens()) == []


async def test_begin_refuses_an_empty_context(either: Any, client: Any, continuing: Any, fake: Any) -> None:
    context = await either(client.create())
    with pytest.raises(errors.FailedPrecondition) as raised:
        await either(continuing.begin(context))
    assert raised.value.reason == "CONTEXT_EMPTY"
    assert not fake.requests["Rewind"]


@pytest.mark.parametrize(
    "left_by_the_last_pass", [[], [4], [4, 2], [4, 2, 7, 7]], ids=["prompt only", "one computed", "both", "too many"]
)
async def test_end_leaves_these_tokens_and_the_last_one_buffered(
    either: Any, client: Any, continuing: Any, fake: Any, left_by_the_last_pass: list[int]
) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(continuing.begin(context))
    await either(context.forward([PROMPT[-1], *left_by_the_last_pass]))
    tokens = [*PROMPT, *left_by_the_last_pass[:2]]
    await either(continuing.end(context, tokens))
    assert await either(context.tokens()) == tokens
    buffered = fake.requests["Fill"][-1]
    assert (buffered.defer, list(buffered.tokens.ids)) == (True, tokens[-1:])


async def test_begin_and_end_change_no_token(either: Any, client: Any, continuing: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    await either(continuing.end(context, await either(continuing.begin(context))))
    assert await either(context.tokens()) == PROMPT


# --- What every algorithm makes of it


async def test_every_algorithm_refuses_an_empty_context(either: Any, client: Any) -> None:
    context = await either(client.create())
    for call in (
        lambda: either.decoding.speculative(context, lambda _: [], max_tokens=1),
        lambda: either.decoding.windowed(context, max_tokens=1),
        lambda: either.decoding.beam_search(context, width=2, max_tokens=1),
    ):
        with pytest.raises(errors.FailedPrecondition) as raised:
            await either(call())
        assert raised.value.reason == "CONTEXT_EMPTY"


async def test_an_output_of_no_tokens_changes_nothing(either: Any, client: Any) -> None:
    context = await either(client.create(tokens=PROMPT))
    assert await either(either.decoding.speculative(context, lambda _: [1], max_tokens=0)) == []
    assert await either(either.decoding.windowed(context, max_tokens=0)) == []
    assert await either(context.tokens()) == PROMPT
