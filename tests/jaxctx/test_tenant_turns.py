"""Turns of tenants: in which order they come, and what becomes of those who are cancelled."""

import asyncio

import pytest

from jaxctx.tenant_turns import TenantTurns


class Waiters:
    """Tasks that wait for their turns, and the order in which they had it. Their first letters are their tenants."""

    def __init__(self) -> None:
        self.joined = 0
        self.unused: list[str] = []
        self.turns = TenantTurns(self._join, self.unused.append)
        self.had: list[str] = []

    def wait(self, name: str) -> "asyncio.Task[None]":
        async def wait() -> None:
            await self.turns.wait(name[0])
            self.had.append(name)

        return asyncio.create_task(wait())

    def _join(self) -> None:
        self.joined += 1
        assert len(self.turns) >= 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_each_goes_in_order() -> None:
    waiters = Waiters()
    tasks = [waiters.wait(name) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    await settle()
    assert len(waiters.turns) == waiters.joined == 6
    given = [waiters.turns.give() for _ in range(7)]
    assert given == ["a", "b", "c", "a", "b", "a", None]
    await asyncio.gather(*tasks)
    assert waiters.had == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(waiters.turns) == 0


async def test_a_tenant_that_is_not_allowed_is_passed_by() -> None:
    waiters = Waiters()
    first = waiters.wait("a1")
    second = waiters.wait("b1")
    await settle()
    assert waiters.turns.give(lambda tenant: tenant != "a") == "b"
    assert waiters.turns.give(lambda tenant: tenant != "a") is None
    assert waiters.turns.give() == "a"
    await asyncio.gather(first, second)


@pytest.mark.parametrize("has_run_since", [False, True])
async def test_one_that_was_cancelled_is_passed_over(has_run_since: bool) -> None:
    """Also where its coroutine did not run since, as when a session is deleted while another's turn ends."""
    waiters = Waiters()
    cancelled, alone, last = (waiters.wait(name) for name in ("a1", "b1", "a2"))
    await settle()
    cancelled.cancel()
    alone.cancel()
    if has_run_since:
        await settle()
    assert waiters.turns.give() == "a"
    assert waiters.turns.give() is None
    await last
    await asyncio.wait([cancelled, alone])
    assert cancelled.cancelled()
    assert alone.cancelled()
    assert waiters.had == ["a2"]
    assert waiters.unused == []
    assert len(waiters.turns) == 0


async def test_a_turn_that_its_task_cannot_use_any_more_is_told_of() -> None:
    waiters = Waiters()
    task = waiters.wait("a1")
    await settle()
    assert waiters.turns.give() == "a"
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert waiters.unused == ["a"]
    assert waiters.had == []
