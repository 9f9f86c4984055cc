"""Errors at every call below the store: typed, and nothing half visible."""

import copy

import pytest

from jaxctx.errors import (
    Unavailable,
)

from .builders import (
    Clock,
    MemoryObjects,
    expired,
    open_store,
    save,
)
from .fault_injection import SCENARIOS, Interrupted, check_no_garbage, prepare, state


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_at_every_call(scenario):
    """One call fails: the caller is told and nothing has changed, or does not need to know."""
    start = MemoryObjects()
    prepare(start)
    old, whole = state(start), copy.deepcopy(start)
    SCENARIOS[scenario](open_store(whole, seed="now"))
    new, errors = state(whole), 0
    for count in range(100):
        objects = copy.deepcopy(start)
        calls = [0]

        def point(calls=calls, count=count):
            calls[0] += 1
            if calls[0] == count + 1:
                raise Unavailable("broken", reason="STORE_FAILED")

        try:
            store = open_store(Interrupted(objects, point), clock := Clock(), seed="now")
        except Unavailable:
            continue  # it does not start
        try:
            SCENARIOS[scenario](store)
            found = state(objects)
            assert found == new
        except Unavailable:
            errors += 1
            found = state(objects)
            # Deleting is done once the name is gone, even if the space was not given back yet.
            assert found == old or (scenario in ("delete", "take") and found == new)
        reached, calls[0] = calls[0] > count, 1000
        assert state(objects, "again") == {
            latest.name: {one.version: found[latest.name][one.version] for one in store.history("t", latest.name)}
            for latest in store.list("t")
        }
        check_no_garbage(objects, store, clock)
        if not reached:
            assert errors
            return
    raise AssertionError("there are more calls")


def test_expiry_is_tried_again():
    objects, clock, broken, tries = MemoryObjects(), Clock(), [], []

    def point():
        if broken:
            tries.append(clock.now)
            raise Unavailable("broken", reason="STORE_FAILED")

    store = open_store(Interrupted(objects, point), clock)
    save(store, range(8), seconds=5, clock=clock)
    store.expire()
    clock.now += 5
    broken.append(True)
    assert expired(store) == []
    assert store.list("t") == []
    clock.now += 9.9
    assert expired(store) == []
    assert set(tries) == {clock.now - 9.9}  # not at once
    broken.clear()
    clock.now += 0.1
    assert [one.name for one in expired(store)] == ["a"]
    assert not objects.values
