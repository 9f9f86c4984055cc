"""Lifetimes and alarms: when things end, and who is due when."""

import random
import weakref

import pytest

from jaxctx.lifetime import FOREVER, DeadlineQueue, Lifetime
from tests.jaxctx.cache.mutations import Mutation


@pytest.mark.parametrize("sliding", [False, True])
def test_a_lifetime_is_over_at_its_end_and_not_before(sliding: bool) -> None:
    lifetime = Lifetime.begin(10, sliding, now=100)
    assert [lifetime.over(now) for now in (100, 109.999, 110, 111)] == [False, False, True, True]
    assert lifetime.used(105).at == (115 if sliding else 110)
    assert lifetime.used(110) is lifetime  # over stays over
    assert lifetime.anew(200) == Lifetime.begin(10, sliding, now=200)


def test_for_ever() -> None:
    assert Lifetime.begin(None, True, now=3) is FOREVER
    assert FOREVER.used(5) is FOREVER.anew(5) is FOREVER
    assert not FOREVER.over(1e300)


def test_alarms_against_a_plain_dict() -> None:
    source, alarms, plain = random.Random(7), DeadlineQueue[int](), {}
    for turn in range(3000):
        now, owner = turn // 16, source.randrange(40)
        at = source.choice([None, now + 0.5 + source.randrange(60)])
        alarms.set(owner, at)
        plain.pop(owner, None)
        if at is not None:
            plain[owner] = at
        due = sorted((at, owner) for owner, at in plain.items() if at <= now)
        rung = alarms.due(now)
        assert sorted(rung) == sorted(owner for _, owner in due)
        assert [plain.pop(owner) for owner in rung] == [at for at, _ in due]
        assert (alarms.next is None) <= (not plain)
        assert alarms.next is None or now < alarms.next <= min(plain.values(), default=alarms.next)


def test_alarms_keep_nothing_of_what_was_set_anew() -> None:
    alarms = DeadlineQueue[str]()
    for at in range(10_000):
        alarms.set("a", 1e9 - at)
    alarms.set("a", None)
    assert len(alarms._heap) < 100
    assert not alarms._numbers
    assert not alarms._owners
    assert alarms.due(1e9) == []
    assert alarms.next is None


class Owner:
    """Something that holds memory."""


def test_an_owner_without_deadline_is_not_held_in_memory() -> None:
    """Else a request that ended would be, with its tokens, until its deadline, which may be a day."""
    alarms = DeadlineQueue[Owner]()
    ended, due, waiting = Owner(), Owner(), Owner()
    alarms.set(waiting, 3e9)
    for owner, at in ((ended, 1e9), (ended, 2e9), (due, 5.0)):
        alarms.set(owner, at)
    alarms.set(ended, None)
    assert alarms.due(5.0) == [due]
    gone = [weakref.ref(ended), weakref.ref(due)]
    del ended, due, owner
    assert [reference() for reference in gone] == [None, None]
    assert alarms.due(4e9) == [waiting]


MUTATIONS = [
    Mutation(
        "the alarm before rings too",
        DeadlineQueue,
        "due",
        "if number in self._owners",
        "if True",
    ),
    Mutation("what was called off rings", DeadlineQueue, "set", "del self._owners[self._numbers.pop(owner)]", "pass"),
    Mutation("late", DeadlineQueue, "due", "<= now", "< now - 1"),
    Mutation("one at a time", DeadlineQueue, "due", "while self._heap and", "if self._heap and"),
    Mutation(
        "who is due stays due",
        DeadlineQueue,
        "due",
        "heapq.heappop(self._heap)",
        "self._heap[0]; self._heap = self._heap[1:]",
    ),
    Mutation(
        "what was set anew is never dropped",
        DeadlineQueue,
        "set",
        "if len(self._heap) > 2 * len(self._owners) + 64:",
        "if False:",
    ),
    Mutation("no order after a clearing", DeadlineQueue, "set", "heapq.heapify(self._heap)", "self._heap.reverse()"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        test_alarms_against_a_plain_dict()
        test_alarms_keep_nothing_of_what_was_set_anew()
