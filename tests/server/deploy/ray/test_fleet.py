"""The engines that were asked for on a cluster, and what becomes of each."""

from __future__ import annotations

import logging

import pytest

from jaxctx_server.deploy.ray.autoscaling import EngineLoad
from jaxctx_server.deploy.ray.fleet import PLACEMENT_WARNING_S, SOUND_AFTER_S, Fleet
from tests.server.deploy.ray.fake_ray import ActorDiedError, ActorUnavailableError, FakeActor, FakeRay

pytestmark = pytest.mark.usefixtures("ray")


class TestedFleet(Fleet):
    """A fleet, the actors that it has started, and its own clock."""

    __test__ = False

    def __init__(self, wanted: int) -> None:
        self.actors: list[FakeActor] = []
        self.now = 100.0
        super().__init__(self._start_fake_actor, wanted)

    def _start_fake_actor(self) -> FakeActor:
        self.actors.append(FakeActor())
        return self.actors[-1]

    def look(self, after_s: float = 0.0, **loads: int) -> None:
        """Reconcile, so many seconds later; the requests of engines by address."""
        self.now += after_s
        self.reconcile({address: EngineLoad(running, 0, 4) for address, running in loads.items()}, self.now)

    def ready(self, *addresses: str) -> None:
        """Have the first actors report these addresses."""
        for actor, address in zip(self.actors, addresses, strict=False):
            actor.say(address=address)
        self.look()

    @property
    def addresses(self) -> list[str]:
        return [engine.address for engine in self.engines]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="jaxctx.ray")
    return caplog


def test_as_many_engines_are_asked_for_as_are_wanted(log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(2)
    fleet.look()
    fleet.look()
    assert len(fleet.actors) == 2
    assert [engine.number for engine in fleet.engines] == [1, 2]
    fleet.wanted = 3
    fleet.look()
    assert len(fleet.actors) == 3
    assert log.text.count("requested") == 3


def test_an_engine_is_ready_when_it_has_an_address(log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.actors[0].say()
    fleet.look(5.0)
    (engine,) = fleet.engines
    assert (engine.node_id, engine.address, engine.since) == ("node", "", 100.0)
    fleet.actors[0].say(address="a")
    fleet.look(5.0)
    assert (engine.address, engine.since) == ("a", 110.0)
    fleet.actors[0].say(address="a")
    fleet.look(5.0)
    assert engine.since == 110.0
    assert log.text.count("ready at a, on node node") == 1


def test_an_engine_is_asked_again_only_when_it_has_answered() -> None:
    fleet = TestedFleet(1)
    for _ in range(3):
        fleet.look()
    assert fleet.actors[0].state.calls == 1
    fleet.ready("a")
    assert fleet.actors[0].state.calls == 2


def test_an_engine_that_no_node_has_place_for_is_warned_of_once(log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.look(PLACEMENT_WARNING_S - 1)
    assert "no node" not in log.text
    fleet.look(1.0)
    fleet.look(1.0)
    assert log.text.count("no node") == 1
    assert len(fleet.engines) == 1


def test_an_engine_whose_process_ended_is_replaced_after_a_pause(ray: FakeRay, log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.actors[0].say(exit_status=3, last_line="no such model")
    fleet.look()
    assert fleet.engines == []
    assert ray.killed == [fleet.actors[0]]
    assert "its process ended with status 3: no such model; another in 2 s" in log.text
    fleet.look(1.9)
    assert len(fleet.actors) == 1
    fleet.look(0.1)
    assert len(fleet.actors) == 2


def test_pauses_grow_while_engines_fail_to_start(log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(1)
    for _ in range(3):
        fleet.look(60.0)
        fleet.actors[-1].say(exit_status=1)
        fleet.look()
    assert [f"another in {pause} s" in log.text for pause in (2, 4, 8)] == [True] * 3


@pytest.mark.parametrize(("ready_for_s", "pause"), [(SOUND_AFTER_S, 1), (SOUND_AFTER_S - 1, 4)])
def test_an_engine_that_was_ready_for_long_did_not_fail_to_start(
    log: pytest.LogCaptureFixture, ready_for_s: float, pause: int
) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.actors[0].say(exit_status=1)
    fleet.look()
    fleet.look(2.0)
    fleet.actors[1].say(address="a")
    fleet.look()
    fleet.actors[1].fail(ActorDiedError())
    fleet.look(ready_for_s)
    assert f"another in {pause} s" in log.text


@pytest.mark.parametrize(
    ("alive", "reason"), [({"node"}, "its actor is gone (ActorDiedError)"), ({"other"}, "its node is gone")]
)
def test_a_lost_engine_is_replaced_and_why_is_logged(
    ray: FakeRay, log: pytest.LogCaptureFixture, alive: set[str], reason: str
) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.ready("a")
    ray.alive_nodes = alive
    fleet.actors[0].fail(ActorDiedError())
    fleet.look()
    assert reason in log.text
    assert fleet.engines == []
    fleet.look(2.0)
    assert len(fleet.actors) == 2


def test_an_engine_that_does_not_answer_now_may_again(ray: FakeRay) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.actors[0].fail(ActorUnavailableError())
    fleet.look()
    assert (len(fleet.engines), ray.killed) == (1, [])
    assert fleet.actors[0].state.calls == 2, "it is asked again"
    fleet.ready("a")
    assert fleet.addresses == ["a"]


def test_the_least_useful_engine_drains_first() -> None:
    """One that serves nobody yet, else the one with the fewest requests, the youngest of several."""
    fleet = TestedFleet(4)
    fleet.look()
    fleet.ready("a", "b", "c")
    fleet.actors[3].say()  # on a node, and not ready
    fleet.look()
    drained = []
    for wanted in (3, 2, 1):
        fleet.wanted = wanted
        fleet.look(a=1, b=0, c=1)
        (engine,) = [engine for engine in fleet.engines if engine.is_draining and engine.number not in drained]
        drained.append(engine.number)
    assert drained == [4, 2, 3]


def test_an_engine_that_drains_is_told_so_once_and_not_replaced(ray: FakeRay, log: pytest.LogCaptureFixture) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.ready("a")
    actor = fleet.actors[0]
    state = actor.pending
    fleet.wanted = 0
    fleet.look()
    fleet.look()
    assert actor.drain.calls == 1
    assert (fleet.staying, len(fleet.engines), ray.killed) == ([], 1, [])
    actor.pending = state
    actor.say(address="a", exit_status=0)
    fleet.look()
    assert fleet.engines == []
    assert "engine 1: gone" in log.text
    assert "another in" not in log.text
    fleet.wanted = 1
    fleet.look()
    assert len(fleet.actors) == 2, "without a pause"


def test_an_engine_without_a_node_is_no_longer_asked_for(ray: FakeRay) -> None:
    fleet = TestedFleet(1)
    fleet.look()
    fleet.wanted = 0
    fleet.look()
    assert ray.killed == fleet.actors
    assert fleet.actors[0].drain.calls == 0


def test_all_engines_end_at_once(ray: FakeRay) -> None:
    fleet = TestedFleet(2)
    fleet.look()
    fleet.end_now()
    assert ray.killed == fleet.actors
    assert fleet.engines == []
