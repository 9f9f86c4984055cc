"""Ray as the fleet and its actors see it, without a cluster: results are there when a test puts them there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jaxctx_server.deploy.ray.actor import EngineState


class RayError(Exception):
    """An error of Ray."""


class ActorUnavailableError(RayError):
    """An actor does not answer now, and may again."""


class ActorDiedError(RayError):
    """An actor is gone."""


class PendingState:
    """The result of `state()`, which a test sets."""

    def __init__(self) -> None:
        self.result: EngineState | Exception | None = None


class RemoteMethod:
    """A method of an actor; its calls are counted."""

    def __init__(self, actor: FakeActor) -> None:
        self._actor = actor
        self.calls = 0

    def remote(self) -> PendingState:
        self.calls += 1
        self._actor.pending = PendingState()
        return self._actor.pending


class FakeActor:
    """The handle of an actor."""

    def __init__(self) -> None:
        self.state = RemoteMethod(self)
        self.drain = RemoteMethod(self)
        self.pending = PendingState()  # the latest result

    def say(
        self, *, address: str = "", node_id: str = "node", exit_status: int | None = None, last_line: str = ""
    ) -> None:
        """Have the actor answer the question after its state."""
        self.pending.result = EngineState(node_id, address, exit_status, last_line)

    def fail(self, error: Exception) -> None:
        """Have the question after its state end with an error."""
        self.pending.result = error


class FakeRay(ModuleType):
    """The module `ray`."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.killed: list[FakeActor] = []
        self.alive_nodes = {"node"}
        self.addresses = ["127.0.0.1"]  # of the nodes
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.5")
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.ActorUnavailableError = ActorUnavailableError  # type: ignore[attr-defined]
        self.exceptions.RayError = RayError  # type: ignore[attr-defined]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")

    def wait(self, pending: list[PendingState], timeout: float) -> tuple[list[PendingState], list[PendingState]]:
        assert timeout == 0, "the fleet never waits"
        return [each for each in pending if each.result is not None], []

    def get(self, pending: PendingState) -> EngineState:
        assert pending.result is not None
        if isinstance(pending.result, Exception):
            raise pending.result
        return pending.result

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)

    def nodes(self) -> list[dict[str, Any]]:
        nodes = [{"NodeID": node_id, "Alive": True, "NodeManagerAddress": "127.0.0.1"} for node_id in self.alive_nodes]
        nodes += [{"NodeID": "x", "Alive": True, "NodeManagerAddress": address} for address in self.addresses]
        return [*nodes, {"NodeID": "gone", "Alive": False, "NodeManagerAddress": "10.0.0.9"}]


def install_fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Have `import ray` find a fake, for as long as a test runs."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    return ray
