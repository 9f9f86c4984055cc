"""Calls of the store from an event loop: they run to their end, or what they made is undone."""

import asyncio
import threading

import pytest

from jaxctx.engine.snapshots.store_calls import TenantRefresher, complete_or_undo, refresh_name


class Store:
    """In place of a store: which names are looked up, and on which thread."""

    def __init__(self, durable: bool) -> None:
        self.durable = durable
        self.looked: list[tuple[str, ...]] = []
        self.threads: list[threading.Thread] = []
        self.refreshed, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def refresh_name(self, tenant: str, name: str) -> None:
        self.looked.append((tenant, name))
        self.threads.append(threading.current_thread())

    def refresh_tenant(self, tenant: str) -> None:
        self.looked.append((tenant,))
        self.threads.append(threading.current_thread())
        assert self.may_end.wait(10)
        self.refreshed.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_made_for_a_caller_who_left_is_undone_before_it_goes(fails: bool) -> None:
    """Opens, saves, takes and deletes of snapshots: the thread that a cancelled one waits for cannot be stopped."""
    begun, release = threading.Event(), threading.Event()
    results: list[str] = []

    def make(name: str) -> str:
        begun.set()
        assert release.wait(10)
        if fails:
            raise OSError("nothing was made")
        return name

    making = asyncio.create_task(complete_or_undo(asyncio.to_thread(make, "a reader"), results.append))
    await asyncio.to_thread(begun.wait, 10)
    making.cancel()
    await asyncio.sleep(0.05)
    assert not making.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert results == ([] if fails else ["a reader"])
    assert await complete_or_undo(asyncio.to_thread(str, 7), results.append) == "7"
    assert len(results) == (not fails), "what its caller got is the caller's"


async def test_what_is_made_is_undone_though_its_caller_is_cancelled_twice() -> None:
    begun, release, undone = threading.Event(), threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        assert release.wait(10)

    making = asyncio.create_task(complete_or_undo(asyncio.to_thread(make), lambda _: undone.set()))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(2):
        making.cancel()
        await asyncio.sleep(0.05)
    assert making.done()
    release.set()
    assert await asyncio.to_thread(undone.wait, 10)
    await asyncio.sleep(0.05)  # so that the loop is still there when its thread says that it is done


async def test_an_error_of_the_call_is_the_caller_s() -> None:
    def fail() -> None:
        raise OSError("no")

    undone: list[None] = []
    with pytest.raises(OSError, match="no"):
        await complete_or_undo(asyncio.to_thread(fail), undone.append)
    assert undone == []


async def test_names_are_refreshed_off_the_event_loop_and_only_where_something_is_durable() -> None:
    durable, in_memory = Store(True), Store(False)
    for store in (durable, in_memory):
        await refresh_name(store, "t", "n")  # type: ignore[arg-type]
        await TenantRefresher(store).refresh("t")  # type: ignore[arg-type]
    assert (durable.looked, in_memory.looked) == ([("t", "n"), ("t",)], [])
    assert threading.current_thread() not in durable.threads


async def test_a_refresh_may_begin_without_being_waited_for() -> None:
    durable, in_memory = Store(True), Store(False)
    for store in (durable, in_memory):
        TenantRefresher(store).begin("t")  # type: ignore[arg-type]
    assert await asyncio.to_thread(durable.refreshed.wait, 10)
    assert (durable.looked, in_memory.looked) == ([("t",)], [])
    assert threading.current_thread() not in durable.threads


async def test_who_asks_for_a_refresh_that_is_under_way_waits_for_it() -> None:
    """Also if it began for someone who does not wait, or who leaves."""
    store = Store(True)
    tenants = TenantRefresher(store)  # type: ignore[arg-type]
    store.may_end.clear()
    tenants.begin("t")
    first, other = (asyncio.create_task(tenants.refresh("t")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    assert first.cancelled()
    assert not other.done()
    store.may_end.set()
    await other
    assert store.refreshed.is_set()
    assert store.looked == [("t",)]
    await tenants.refresh("t")
    await tenants.refresh("u")
    assert store.looked == [("t",), ("t",), ("u",)], "each look ends"
