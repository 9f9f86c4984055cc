"""`jaxctx-serve ray`: its arguments, the router's loads, and what it does until a signal."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx.errors import JaxctxError, Unavailable
from jaxctx.types import EngineStatus
from jaxctx_server.config import RayConfig, read_config
from jaxctx_server.deploy.ray import supervisor
from jaxctx_server.deploy.ray.autoscaling import EngineLoad
from jaxctx_server.deploy.ray.supervisor import (
    RouterLoads,
    check_nodes_are_here,
    check_router,
    engine_arguments,
    is_on_loopback,
    set_on_signals,
    supervise,
)
from jaxctx_server.engine_bounds import EngineBounds
from jaxctx_server.errors import StartError
from jaxctx_server.signals import SAME_SIGNAL_S
from tests.server.deploy.ray.fake_ray import FakeRay
from tests.server.fake_engine import INFO, STATS


def ray_config(*argv: str) -> RayConfig:
    config = read_config(["ray", *argv], {}, "jaxctx-serve")
    assert isinstance(config, RayConfig)
    return config


def test_arguments() -> None:
    command = ("--engine-command", "python -m that")
    config = ray_config("--router", "127.0.0.1:1", "--engines", "2:5", *command, "--", "model", "--max-batch", "4")
    assert EngineBounds.parse(config.engines) == EngineBounds(2, 5)
    assert check_router(config)
    assert config.engine_command_words() == ["python", "-m", "that"]
    assert engine_arguments(config) == [
        *("model", "--max-batch", "4"),
        *("--role", "engine", "--router", "127.0.0.1:1"),
    ]


def test_a_router_elsewhere_needs_a_key() -> None:
    with pytest.raises(StartError, match="--cluster-key"):
        check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1"))
    assert not check_router(ray_config("--router", "192.0.2.1:1", "--engines", "1", "--cluster-key", "secret"))


def test_an_argument_that_makes_no_sense() -> None:
    with pytest.raises(StartError, match="--engines: must be MIN or MIN:MAX"):
        ray_config("--router", "127.0.0.1:1", "--engines", "0:2")


# --- the router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "is_loopback"), [("127.0.0.1:1", True), ("[::1]:1", True), ("192.0.2.1:1", False), ("10.0.0.1:1", False)]
)
def test_whether_a_router_is_on_this_machine_only(router: str, is_loopback: bool) -> None:
    assert is_on_loopback(router) == is_loopback


def test_a_router_of_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: str, port: None) -> Any:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    with pytest.raises(StartError, match="--router elsewhere:1: Name or service not known"):
        check_router(ray_config("--router", "elsewhere:1", "--engines", "1"))


def test_a_name_is_on_this_machine_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for addresses, is_loopback in ((["127.0.0.1", "::1"], True), (["127.0.0.1", "192.0.2.1"], False)):
        infos = [(0, 0, 0, "", (address, 0)) for address in addresses]
        monkeypatch.setattr("socket.getaddrinfo", lambda host, port, infos=infos: infos)
        assert is_on_loopback("name:1") == is_loopback


def test_engines_get_the_clusters_key() -> None:
    config = ray_config("--router", "192.0.2.1:1", "--engines", "1", "--cluster-key", "secret")
    assert engine_arguments(config)[-2:] == ["--cluster-key", "secret"]


def test_a_router_on_loopback_is_out_of_reach_for_other_machines(ray: FakeRay) -> None:
    check_nodes_are_here("127.0.0.1:1")
    ray.addresses = ["10.0.0.5"]  # this machine's own
    check_nodes_are_here("127.0.0.1:1")
    ray.addresses = ["10.0.0.7", "10.0.0.6"]
    with pytest.raises(StartError, match=r"out of reach for 10.0.0.6, 10.0.0.7"):
        check_nodes_are_here("127.0.0.1:1")


# --- loads ------------------------------------------------------------------------------------------------------------


class FakeClient:
    """A client of the router."""

    def __init__(self, *engines: EngineStatus) -> None:
        self.answer: list[EngineStatus] | JaxctxError = list(engines)

    def engines(self, *, timeout_s: float) -> list[EngineStatus]:
        if isinstance(self.answer, JaxctxError):
            raise self.answer
        return self.answer


def status(address: str, running: int = 0, waiting: int = 0, draining: bool = False) -> EngineStatus:
    stats = replace(STATS, running=running, waiting=waiting, draining=draining)
    return EngineStatus(info=INFO, stats=stats, address=address, epoch=1)


def loads_of(client: Any, full: int | None = None) -> RouterLoads:
    return RouterLoads(client, full)


def test_loads_are_those_of_the_engines_that_take_work() -> None:
    loads = loads_of(FakeClient(status("a", running=3, waiting=1), status("b", draining=True))).get()
    assert loads == {"a": EngineLoad(3, 1, 4)}


@pytest.mark.parametrize(("full", "max_running"), [(None, 4), (2, 2), (9, 4)])
def test_an_engine_is_full_at_what_it_serves_at_once_or_at_fewer(full: int | None, max_running: int) -> None:
    loads = loads_of(FakeClient(status("a")), full).get()
    assert loads == {"a": EngineLoad(0, 0, max_running)}


def test_that_the_router_does_not_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxctx.ray")
    client = FakeClient()
    loads = loads_of(client)
    client.answer = Unavailable("it is gone")
    assert [loads.get(), loads.get()] == [None, None]
    assert caplog.text.count("does not answer") == 1
    client.answer = []
    assert [loads.get(), loads.get()] == [{}, {}]
    assert caplog.text.count("answers again") == 1


# --- the fleet --------------------------------------------------------------------------------------------------------


class FakeFleet:
    """A fleet that does at once what is wanted, and records it."""

    def __init__(self, wanted: int, stop: threading.Event, looks: int) -> None:
        self.wanted = wanted
        self.seen: list[tuple[int, Mapping[str, EngineLoad]]] = []
        self.engines: list[Any] = []
        self.ended = False
        self.hurry: threading.Event | None = None  # set at the first look of a drain
        self._stop = stop
        self._looks = looks  # until the signal to stop

    @property
    def staying(self) -> list[Any]:
        return self.engines

    def reconcile(self, loads: Mapping[str, EngineLoad], now: float) -> None:
        self.seen.append((self.wanted, loads))
        if self.hurry is not None and self._stop.is_set():
            self.hurry.set()
        elif self.wanted < len(self.engines):
            del self.engines[self.wanted :]
        if len(self.seen) >= self._looks:
            self._stop.set()

    def end_now(self) -> None:
        self.ended = True


def run_supervisor(
    monkeypatch: pytest.MonkeyPatch, client: Any, fleet: Any, stop: threading.Event, hurry: threading.Event
) -> None:
    """Supervise until the end, with looks at once after another that are a second apart for the clock."""
    seconds = itertools.count(100)
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("time.monotonic", lambda: float(next(seconds)))
    supervise(loads_of(client), fleet, EngineBounds(1, 3), stop, hurry)


def engines(*addresses: str) -> list[Any]:
    return [SimpleNamespace(address=address) for address in addresses]


def test_an_engine_more_is_wanted_when_all_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    fleet = FakeFleet(1, stop, looks=8)
    fleet.engines = engines("a")
    run_supervisor(monkeypatch, FakeClient(status("a", running=4)), fleet, stop, threading.Event())
    assert [wanted for wanted, _ in fleet.seen[:8]] == [1] * 5 + [2] * 3


def test_no_engine_more_is_wanted_while_one_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    fleet = FakeFleet(2, stop, looks=20)
    fleet.engines = engines("a", "")
    run_supervisor(monkeypatch, FakeClient(status("a", running=4)), fleet, stop, threading.Event())
    assert {wanted for wanted, _ in fleet.seen[:20]} == {2}


def test_nothing_is_decided_while_the_router_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    fleet = FakeFleet(2, stop, looks=20)
    fleet.engines = engines("a", "b")
    client = FakeClient()
    client.answer = Unavailable("it is gone")
    run_supervisor(monkeypatch, client, fleet, stop, threading.Event())
    assert fleet.seen[:20] == [(2, {})] * 20, "what died is replaced all the same"


def test_a_signal_drains_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    fleet = FakeFleet(2, stop, looks=1)
    fleet.engines = engines("a", "b")
    run_supervisor(monkeypatch, FakeClient(status("a"), status("b")), fleet, stop, threading.Event())
    assert [wanted for wanted, _ in fleet.seen] == [2, 0]
    assert (fleet.engines, fleet.ended) == ([], True)


def test_a_second_signal_ends_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, hurry = threading.Event(), threading.Event()
    fleet = FakeFleet(2, stop, looks=1)
    fleet.engines, fleet.hurry = engines("a", "b"), hurry
    run_supervisor(monkeypatch, FakeClient(status("a"), status("b")), fleet, stop, hurry)
    assert len(fleet.seen) == 2
    assert (len(fleet.engines), fleet.ended) == (2, True)


def test_signals_that_come_soon_after_each_other_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    now = [100.0]
    monkeypatch.setattr("signal.signal", handlers.__setitem__)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop, hurry = threading.Event(), threading.Event()
    set_on_signals(stop, hurry)
    assert handlers.keys() == {signal.SIGINT, signal.SIGTERM}
    handlers[signal.SIGTERM]()
    assert (stop.is_set(), hurry.is_set()) == (True, False)
    now[0] += SAME_SIGNAL_S
    handlers[signal.SIGINT]()
    assert not hurry.is_set()
    now[0] += 0.01
    handlers[signal.SIGINT]()
    assert hurry.is_set()
