"""Asking again for pages: in time, in turn, and with a small share of the step thread."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jaxctx.engine import engine as engine_module
from jaxctx.engine import page_waits
from jaxctx.engine.contexts.operations import ContextOperations
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.page_waits import LONGEST_PAUSE_S, RETRY_S, SHARE, PageWaits, timed
from jaxctx.errors import ResourceExhausted
from jaxctx.types import ContextInfo, CreateContextRequest
from tests.engines import ME, SMALL, Caller


class Pages:
    """In place of a step thread's answers: which tenants asked, and who is granted what they ask for."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.took_s = took_s
        self.asked: list[str] = []
        self.granted: set[str] = set()
        self.asking, self.most_asking = 0, 0

    def ask(self, waits: PageWaits, name: str, wait_s: float = 30.0) -> "asyncio.Task[str | None]":
        """Ask in the name of a waiter, whose first letter is its tenant, for up to `wait_s`."""

        async def question() -> tuple[str | None, float]:
            self.asked.append(name)
            self.asking += 1
            self.most_asking = max(self.most_asking, self.asking)
            await asyncio.sleep(0)
            self.asking -= 1
            return (name if name in self.granted else None), self.took_s

        return asyncio.create_task(waits.ask(name[0], question, time.monotonic() + wait_s))


async def asked(pages: Pages, count: int) -> list[str]:
    """The first so many names that asked, once there are so many."""
    async with asyncio.timeout(20):
        while len(pages.asked) < count:
            await asyncio.sleep(0.001)
    return pages.asked[:count]


async def end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_waits_asks_until_it_is_granted() -> None:
    waits, pages = PageWaits(time.monotonic), Pages()
    waiting = pages.ask(waits, "a")
    assert await asked(pages, 5) == ["a"] * 5
    pages.granted.add("a")
    assert await waiting == "a"


async def test_without_a_time_to_wait_it_is_asked_once() -> None:
    waits, pages = PageWaits(time.monotonic), Pages()

    async def question() -> tuple[str | None, float]:
        pages.asked.append("a")
        return None, 0.0

    assert await waits.ask("a", question, None) is None
    assert await waits.ask("a", question, time.monotonic() - 1) is None
    assert pages.asked == ["a", "a"]


async def test_tenants_take_turns_and_one_asks_at_a_time() -> None:
    """However many reservations another tenant has that can never be granted."""
    waits, pages = PageWaits(time.monotonic), Pages()
    others = [pages.ask(waits, f"a{number}") for number in range(50)]
    mine = pages.ask(waits, "b0")
    await asked(pages, 51)
    pages.most_asking = 0
    again = (await asked(pages, 57))[51:]
    assert again == ["a0", "b0", "a1", "b0", "a2", "b0"]
    assert pages.most_asking == 1
    pages.granted.add("b0")
    assert await mine == "b0"
    await end(*others)


async def test_all_who_wait_take_a_share_together() -> None:
    """The time between two who ask follows from what the answer took, up to a limit."""
    waits, pauses = PageWaits(time.monotonic), []
    loop = asyncio.get_running_loop()

    def call_later(seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        pauses.append(seconds)
        return loop.call_at(loop.time(), function)

    pages = Pages(took_s=0.004)
    with pytest.MonkeyPatch.context() as patch:
        patched = Loop(loop, call_later)
        patch.setattr(page_waits.asyncio, "get_running_loop", lambda: patched)
        waiting = [pages.ask(waits, name) for name in ("a0", "a1", "b0")]
        await asked(pages, 6)
        assert pauses[:3] == pytest.approx([RETRY_S, 0.004 / SHARE, 0.004 / SHARE])
        pages.took_s = 1000.0
        count = len(pages.asked)
        await asked(pages, count + 2)
        assert pauses[-1] == LONGEST_PAUSE_S
        pages.took_s = 0.0
        count = len(pages.asked)
        await asked(pages, count + 2)
        assert pauses[-1] == RETRY_S
        await end(*waiting)


class Loop:
    """The event loop, with another `call_later`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call_later: Callable[..., asyncio.TimerHandle]) -> None:
        self._loop, self.call_later = loop, call_later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


async def test_who_had_no_turn_in_time_asks_a_last_time() -> None:
    """One slow answer, of whomever, makes nobody miss pages that have become free since."""
    waits, pages = PageWaits(time.monotonic), Pages(took_s=1000.0)
    first = pages.ask(waits, "a0")
    await asked(pages, 2)  # a second from now until the next turn
    lucky, unlucky = pages.ask(waits, "b0", wait_s=0.2), pages.ask(waits, "c0", wait_s=0.2)
    await asked(pages, 4)
    pages.granted.add("b0")
    assert await lucky == "b0"
    assert await unlucky is None
    assert pages.asked.count("b0") == pages.asked.count("c0") == 2
    await end(first)


async def test_one_that_is_cancelled_or_fails_holds_nobody_up() -> None:
    waits, pages = PageWaits(time.monotonic), Pages()

    async def fail() -> tuple[str | None, float]:
        pages.asked.append("failing")
        if pages.asked.count("failing") > 1:
            raise ZeroDivisionError
        return None, 0.0

    failing = asyncio.create_task(waits.ask("a", fail, time.monotonic() + 30))
    await asked(pages, 1)
    cancelled, last = pages.ask(waits, "a1"), pages.ask(waits, "b0")
    await asked(pages, 3)
    cancelled.cancel()
    with pytest.raises(ZeroDivisionError):
        await failing
    count = len(pages.asked)
    await asked(pages, count + 3)
    assert set(pages.asked[count:]) == {"b0"}
    await end(last)


def test_an_engine_may_be_used_from_one_event_loop_after_another() -> None:
    """A turn that was to come on a loop that has ended keeps nobody from asking on the next one."""
    waits, pages = PageWaits(time.monotonic), Pages(took_s=1000.0)

    async def wait_in_vain() -> None:
        waiting = pages.ask(waits, "a")
        await asked(pages, 2)  # and the next turn is a second away
        await end(waiting)

    async def wait_again() -> None:
        pages.took_s = 0.0
        waiting, count = pages.ask(waits, "b"), len(pages.asked)
        await asked(pages, count + 3)
        await end(waiting)

    asyncio.run(wait_in_vain())
    asyncio.run(wait_again())


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
    reserve = ContextOperations.reserve_pages

    def counted(self: ContextOperations, caller: Caller, context_id: str, pages: int) -> ContextInfo | None:
        nonlocal answers
        answers += 1
        return reserve(self, caller, context_id, pages)

    def a_second(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        return function(*args), 1.0

    monkeypatch.setattr(ContextOperations, "reserve_pages", counted)
    monkeypatch.setattr(engine_module, "timed", a_second)
    waiting = [
        asyncio.create_task(engine.reserve_pages(Caller(deadline=clock() + 0.5), context_id, 5))
        for context_id in contexts
    ]
    refused = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in refused} == {ResourceExhausted}
    assert answers <= 2 * len(contexts) + 1  # each at once and at the end, and one between
    await engine.close(ME, pinned.context_id)
    assert (await engine.reserve_pages(Caller(deadline=clock() + 5), contexts[0], 5)).working_pages == 5
