#!/usr/bin/env python3
"""Engines of a router on a Ray cluster that is there: as many as the load asks for, and others for those that die.

    scripts/ray_engines.py --router HOST:PORT --engines LEAST[:MOST] [-- ARGUMENTS OF jaxctx-serve]

Each engine is a process of `jaxctx-serve --role engine` that an actor begins on its node and takes along when it dies.
Ray decides which node that is, and knows when an actor or a node is gone; this script asks for another one then, and
compares what the router says of its engines with LEAST and MOST, until a signal lets it drain all engines and end; a
second one ends them at once. It never starts or stops Ray, a node of it, or the router, and sends no engine any work:
engines register with the router by themselves. If this script dies, its engines do too, and their work waits at the router.

Paths (a model, a cluster key, a compilation cache) are those of the nodes, and have to be the same on all of them.

    asked for ──placed──▶ starting ──banner──▶ ready ──SIGTERM──▶ draining ──▶ ended
        ▲                     │                  │
        └──────── pause ──────┴──── it died ─────┘
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 1.0  # the router's figures are of its last beat, and a beat takes as long
ADD_AFTER_S = 5.0  # some beats: work that comes and goes sooner is done before another engine has loaded its weights
REMOVE_AFTER_S = 300.0  # much longer: an engine takes minutes to come back, with nothing in its cache
FIT = 0.75  # of the places of one engine less: at all of them it would be added again at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before another is begun for one that died; doubled for each in turn
SOUND_S = 60.0  # of being ready: one that dies later than that did not fail to start
PLACED_S = 30.0  # Ray places within a second or two where there is room
CORE_S = 5.0  # for the router to say what it knows
SAME_SIGNAL_S = 0.3  # supervisors signal a process and its group: what comes so soon after the first is no second one
# The kernel ends an engine when whoever began it is killed: two of them would not fit on one device.
BOUND = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None); "
    "hasattr(libc, 'prctl') and libc.prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)
log = logging.getLogger("jaxctx.ray")


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine has, in requests; `most`: how many of them it serves at once."""

    running: int
    waiting: int
    most: int

    @property
    def asked(self) -> int:
        return self.running + self.waiting

    @property
    def is_full(self) -> bool:
        return self.waiting > 0 or self.running >= self.most


@dataclass(frozen=True, slots=True)
class Trend:
    """Since when all engines are full, and since when there is one too many; None: it is not so."""

    full_since: float | None = None
    spare_since: float | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many engines there may be."""

    least: int
    most: int

    @staticmethod
    def of(text: str) -> Bounds:
        """Of LEAST or LEAST:MOST. ValueError for anything else, and for no engines at all."""
        least, _, most = text.partition(":")
        bounds = Bounds(int(least), int(most or least))
        if not 1 <= bounds.least <= bounds.most:
            raise ValueError(text)
        return bounds


def decide(
    loads: Collection[Load], starting: int, wanted: int, bounds: Bounds, trend: Trend, now: float
) -> tuple[int, Trend]:
    """How many engines are wanted from now on, and what to remember until the next look.

    `loads` are of those that the router has and that take work; `starting` others of ours are on their way. None is added
    while one is on its way, as it may be what is missing. After a change both times are counted anew.
    """
    full = bool(loads) and not starting and all(load.is_full for load in loads)
    places = [load.most for load in loads]
    fewer = sum(places) if starting else sum(places) - max(places, default=0)
    spare = bool(loads) and sum(load.asked for load in loads) <= FIT * fewer

    def since(before: float | None, holds: bool) -> float | None:
        return (now if before is None else before) if holds else None

    trend = Trend(since(trend.full_since, full), since(trend.spare_since, spare))
    if wanted < bounds.most and trend.full_since is not None and now - trend.full_since >= ADD_AFTER_S:
        return wanted + 1, Trend()
    if wanted > bounds.least and trend.spare_since is not None and now - trend.spare_since >= REMOVE_AFTER_S:
        return wanted - 1, Trend()
    return wanted, trend


def pause_s(failures: int) -> float:
    """How long to wait after so many engines in turn of which none was sound. A sound one that died is none of them."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))


def on_loopback(router: str) -> bool:
    """Whether HOST:PORT can be reached on its own machine only. OSError for a name that nobody knows."""
    host = router.rpartition(":")[0].strip("[]")
    found = {str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(each).is_loopback for each in found)


class Engine:
    """An actor: one process of an engine on the actor's node, which ends with it."""

    def __init__(self, command: Sequence[str], arguments: Sequence[str], loopback: bool) -> None:
        """No `command`: that of the Python that runs the actor."""
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        command = command or (sys.executable, "-m", "jaxctx_server.cli")
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOUND, *command, *arguments, "--host", host, "--grpc-port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._address, self._said = "", ""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def state(self) -> tuple[str, str, int | None, str]:
        """Its node; where it listens, once it is ready; its exit status, once it has one; the last that it said."""
        status = self._process.poll()
        if status is not None:
            self._listener.join(1.0)
        return self._node, self._address, status, self._said

    def drain(self) -> None:
        """Let it finish what it has, and end."""
        self._process.terminate()

    def _listen(self) -> None:
        """Its words go into Ray's log of the actor."""
        address = ""
        for line in self._process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            self._said = line.strip()[:200] or self._said
            if found := re.search(r"gRPC +(\S+:\d+)", line):
                address = found[1]
            if line.startswith("ready"):
                self._address = address


@dataclass(slots=True)
class Place:
    """One engine, from when it is asked for until it is gone."""

    number: int
    actor: Any
    asked: Any  # its state, on its way
    since: float  # it was asked for, and then: it is ready
    node: str = ""  # none: not placed yet, as far as is known
    address: str = ""  # none: not ready
    draining: bool = False
    is_late: bool = False  # nothing was known of it in PLACED_S


class Fleet:
    """The engines on the cluster, kept at `wanted`. `begin` asks Ray for one more."""

    def __init__(self, begin: Callable[[], Any], wanted: int) -> None:
        self.wanted = wanted
        self.places: list[Place] = []
        self._begin = begin
        self._begun = 0
        self._failures = 0  # in turn
        self._not_before = 0.0  # another is begun

    @property
    def kept(self) -> list[Place]:
        """Those that are to stay."""
        return [place for place in self.places if not place.draining]

    def tend(self, loads: Mapping[str, Load], now: float) -> None:
        """Look after each engine once; begin and drain some, if there are not as many as wanted. Waits for none."""
        for place in tuple(self.places):
            self._look_after(place, now)
        while len(self.kept) > self.wanted:
            # First those that serve nobody yet, then those with the least to do, the youngest of them.
            place = min(
                self.kept,
                key=lambda each: (each.address in loads and 1 + loads[each.address].asked, -each.number),
            )
            self._release(place)
        while len(self.kept) < self.wanted and now >= self._not_before:
            self._begun += 1
            actor = self._begin()
            self.places.append(Place(self._begun, actor, actor.state.remote(), now))
            log.info("engine %d: asked for", self._begun)

    def end_now(self) -> None:
        """Whatever they are at."""
        import ray

        for place in self.places:
            ray.kill(place.actor)
        self.places.clear()

    def _look_after(self, place: Place, now: float) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        if not ray.wait([place.asked], timeout=0)[0]:
            if not (place.node or place.is_late) and now - place.since >= PLACED_S:
                place.is_late = True
                log.warning("engine %d: no node of the cluster has room for it so far", place.number)
            return
        try:
            place.node, address, status, said = ray.get(place.asked)
        except ActorUnavailableError:  # for now
            place.asked = place.actor.state.remote()
            return
        except RayError as error:
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            gone = place.node and place.node not in alive
            self._ended(place, "its node is gone" if gone else f"its actor is gone ({type(error).__name__})", now)
            return
        if address and not place.address:
            place.address, place.since = address, now
            log.info("engine %d: ready at %s, on node %s", place.number, address, place.node)
        if status is None:
            place.asked = place.actor.state.remote()
        else:
            ray.kill(place.actor)
            self._ended(place, f"its process ended with status {status}: {said}", now)

    def _ended(self, place: Place, why: str, now: float) -> None:
        self.places.remove(place)
        if place.draining:
            log.info("engine %d: gone", place.number)
            return
        is_sound = place.address and now - place.since >= SOUND_S
        self._failures = 0 if is_sound else self._failures + 1
        pause = pause_s(self._failures)
        self._not_before = now + pause
        log.warning("engine %d: %s; another in %.0f s", place.number, why, pause)

    def _release(self, place: Place) -> None:
        import ray

        place.draining = True
        if place.node:
            place.actor.drain.remote()
            log.info("engine %d: drains", place.number)
        else:
            ray.kill(place.actor)
            log.info("engine %d: no longer asked for", place.number)


class Core:
    """What a router knows of its engines."""

    def __init__(self, client: Any, full: int | None) -> None:
        self._client, self._full = client, full
        self._answers = True

    def loads(self) -> dict[str, Load] | None:
        """Of the engines that take work, by address; None if the router does not answer."""
        import jaxctx

        try:
            engines = self._client.engines(timeout_s=CORE_S)
        except jaxctx.errors.JaxctxError as error:
            if self._answers:
                log.warning("the router does not answer: %s", error)
            self._answers = False
            return None
        if not self._answers:
            log.info("the router answers again")
        self._answers = True
        return {
            each.address: Load(
                each.stats.running, each.stats.waiting, min(self._full or each.info.max_batch, each.info.max_batch)
            )
            for each in engines
            if not each.stats.draining
        }


def supervise(router: Core, fleet: Fleet, bounds: Bounds, stop: threading.Event, hurry: threading.Event) -> None:
    """Until `stop`; then drain all of them, until `hurry`."""
    trend = Trend()
    while not stop.is_set():
        loads, now = router.loads(), time.monotonic()
        if loads is None:
            trend = Trend()
        else:
            starting = sum(place.address not in loads for place in fleet.kept) + fleet.wanted - len(fleet.kept)
            wanted, trend = decide(loads.values(), starting, fleet.wanted, bounds, trend, now)
            if wanted != fleet.wanted:
                why = "all are full" if wanted > fleet.wanted else "fewer have room for all that runs"
                log.info("%d engines from now on, not %d: %s", wanted, fleet.wanted, why)
                fleet.wanted = wanted
        fleet.tend(loads or {}, now)
        stop.wait(LOOK_S)
    log.info("all engines drain; a second signal ends them at once")
    fleet.wanted = 0
    while fleet.places and not hurry.is_set():
        fleet.tend({}, time.monotonic())
        hurry.wait(LOOK_S)
    fleet.end_now()


def on_signals(stop: threading.Event, hurry: threading.Event) -> None:
    """SIGINT or SIGTERM sets `stop`, and another one, not at the same time, `hurry`."""
    first_at: float | None = None

    def handle(*_: object) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = time.monotonic()
        elif time.monotonic() - first_at > SAME_SIGNAL_S:
            hurry.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, metavar="HOST:PORT", help="on loopback: all nodes are this machine")
    parser.add_argument("--engines", required=True, type=Bounds.of, metavar="LEAST[:MOST]")
    parser.add_argument("--address", default="auto", help="of Ray; auto: RAY_ADDRESS, or the cluster of this machine")
    parser.add_argument("--cluster-key", type=Path, metavar="FILE", help="the router's, here and on every node")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="that Ray keeps for an engine")
    parser.add_argument(
        "--gpus", type=float, default=0.0, metavar="N", help="that Ray keeps for, and shows to, an engine"
    )
    parser.add_argument(
        "--full",
        type=int,
        metavar="N",
        help="requests at which an engine is full, if fewer than its --max-batch; 4 where programs ask for latency, as "
        "a router gives an engine no more of those at once",
    )
    parser.add_argument("--command", type=shlex.split, default=[], help="instead of jaxctx-serve")
    parser.add_argument("arguments", nargs="*", help="of jaxctx-serve, after --")
    chosen = parser.parse_args(argv)
    try:
        chosen.loopback = on_loopback(chosen.router)
    except OSError as error:
        parser.error(f"--router {chosen.router}: {error.strerror}")
    if not chosen.loopback and chosen.cluster_key is None:
        parser.error("--cluster-key: engines beyond loopback need one")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end; returns the exit status."""
    chosen = read_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    try:
        import ray
    except ModuleNotFoundError:
        sys.exit("ray is not installed: pip install 'jaxctx[ray]'")
    import jaxctx

    key = chosen.cluster_key.read_text("utf-8") if chosen.cluster_key else None
    ray.init(address=chosen.address, log_to_driver=False, logging_level=logging.WARNING)
    stop, hurry = threading.Event(), threading.Event()
    on_signals(stop, hurry)  # after Ray, which has handlers of its own
    if chosen.loopback:
        elsewhere = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        elsewhere -= {ray.util.get_node_ip_address(), "127.0.0.1"}
        if elsewhere:
            sys.exit(f"--router {chosen.router}: out of reach for {', '.join(sorted(elsewhere))}")
    arguments = [*chosen.arguments, "--role", "engine", "--router", chosen.router]
    if chosen.cluster_key:
        arguments += ["--cluster-key", str(chosen.cluster_key)]
    actor = ray.remote(Engine).options(
        num_cpus=chosen.cpus, num_gpus=chosen.gpus, scheduling_strategy="SPREAD", max_restarts=0
    )
    fleet = Fleet(lambda: actor.remote(chosen.command, arguments, chosen.loopback), chosen.engines.least)
    with jaxctx.Client(chosen.router, api_key=key) as client:
        supervise(Core(client, chosen.full), fleet, chosen.engines, stop, hurry)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
