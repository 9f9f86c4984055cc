"""Asking again for pages: in time, in turn, and with a small share of the step thread."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jaxctx.engine import page_waits
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.page_waits import RETRY_S, SHARE, PageWaits, timed
from jaxctx.errors import ResourceExhausted
from jaxctx.types import ContextInfo, CreateContextRequest
from tests.engines import ME, SMALL, Caller


class Sleeps:
    """In place of the event loop's sleep and of the clock: time passes by sleeping only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(page_waits.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now


async def test_who_waits_alone_asks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = Sleeps(monkeypatch)
    waits = PageWaits(sleeps.clock)
    for asked in range(1, 4):
        assert await waits.again(0.0, give_up_at=2000)
        assert sleeps.now == pytest.approx(1000 + asked * RETRY_S)


async def test_all_who_wait_take_a_share_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: the slots that they get are as far from each other as answers take, by the share."""
    sleeps = Sleeps(monkeypatch)
    waits = PageWaits(sleeps.clock)
    asked_at = []
    for _ in range(50):
        sleeps.now = 1000.0  # all of them were refused at the same time
        assert await waits.again(0.004, give_up_at=2000)
        asked_at.append(sleeps.now)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert asked_at[0] == pytest.approx(1000 + RETRY_S)
    assert gaps == pytest.approx([0.004 / SHARE] * 49)


async def test_it_is_given_up_when_asking_would_be_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = Sleeps(monkeypatch)
    waits = PageWaits(sleeps.clock)
    assert await waits.again(100.0, give_up_at=1000 + 2 * RETRY_S)
    assert not await waits.again(0.0, give_up_at=1001)
    assert sleeps.now == 1001
    assert not await waits.again(0.0, give_up_at=900)
    assert sleeps.now == 1001
    sleeps.now += 100 / SHARE  # who gave up has taken no slot from others
    assert await waits.again(0.0, give_up_at=9e9)


def test_an_answer_comes_with_its_time() -> None:
    result, seconds = timed(sorted, [2, 1], reverse=False)
    assert result == [1, 2]
    assert seconds >= 0


async def test_many_who_wait_for_pages_ask_seldom(
    make_engine: Callable[..., Any], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's reservations that have to wait take no time from others: each answer is said to take a second."""
    engine: LocalEngine = make_engine(replace(SMALL, pages=8, max_context_tokens=128))
    pinned = await engine.create(ME, CreateContextRequest(pinned=True))
    await engine.fill(ME, pinned.context_id, [5] * 16 * 4)
    contexts = [(await engine.create(ME, CreateContextRequest())).context_id for _ in range(16)]
    answers = 0
    reserve, again = ContextOperations.reserve_pages, PageWaits.again

    def counted(self: ContextOperations, caller: Caller, context_id: str, pages: int) -> ContextInfo | None:
        nonlocal answers
        answers += 1
        return reserve(self, caller, context_id, pages)

    async def after_a_second(self: PageWaits, took_s: float, give_up_at: float) -> bool:
        return await again(self, 1.0, give_up_at)

    monkeypatch.setattr(ContextOperations, "reserve_pages", counted)
    monkeypatch.setattr(PageWaits, "again", after_a_second)
    waiting = [
        asyncio.create_task(engine.reserve_pages(Caller(deadline=clock() + 0.5), context_id, 5))
        for context_id in contexts
    ]
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in refused} == {ResourceExhausted}
    assert answers == len(contexts) + 1
    await engine.close(ME, pinned.context_id)
    assert (await engine.reserve_pages(Caller(deadline=clock() + 5), contexts[0], 5)).working_pages == 5
