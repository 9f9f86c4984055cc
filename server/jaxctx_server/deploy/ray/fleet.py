"""The engines that were requested on the cluster, and the state of each.

requested ──placed──▶ starting ──banner──▶ ready ──SIGTERM──▶ draining ──▶ ended
    ▲                     │                  │
    └──────── pause ──────┴──── it died ─────┘
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxctx_server.deploy.ray.actor import EngineState
from jaxctx_server.deploy.ray.autoscaling import EngineLoad, retry_pause_s

SOUND_AFTER_S = 60.0  # of being ready: an engine that dies later did not fail to start
PLACEMENT_WARNING_S = 30.0  # Ray places an actor within a second or two where its resources are free
log = logging.getLogger("jaxctx.ray")


@dataclass(slots=True)
class FleetEngine:
    """One engine, from its request until it is gone."""

    number: int
    actor: Any  # the handle of an EngineActor
    pending_state: Any  # the result of its `state()`, on its way
    since: float  # when it was requested, or when it became ready
    node_id: str = ""  # empty: not placed yet, as far as is known
    address: str = ""  # empty: not ready
    is_draining: bool = False
    is_late: bool = False  # nothing was known of it for PLACEMENT_WARNING_S


class Fleet:
    """The engines on the cluster, kept at `wanted`. `start_actor` asks Ray for one more and returns its handle."""

    def __init__(self, start_actor: Callable[[], Any], wanted: int) -> None:
        self.wanted = wanted
        self.engines: list[FleetEngine] = []
        self._start_actor = start_actor
        self._started = 0
        self._failures = 0  # in a row
        self._not_before = 0.0  # then the next may be started

    @property
    def staying(self) -> list[FleetEngine]:
        """The engines that do not drain."""
        return [engine for engine in self.engines if not engine.is_draining]

    def reconcile(self, loads: Mapping[str, EngineLoad], now: float) -> None:
        """Look at each engine once; start or drain some if there are not as many as wanted. Never waits.

        `loads` are those of the engines at the router, by address; `now` is in seconds.
        """
        for engine in tuple(self.engines):
            self._observe(engine, now)
        while len(self.staying) > self.wanted:
            self._release(self._least_useful(loads))
        while len(self.staying) < self.wanted and now >= self._not_before:
            self._start(now)

    def end_now(self) -> None:
        """Kill all engines, whatever they do."""
        import ray

        for engine in self.engines:
            ray.kill(engine.actor)
        self.engines.clear()

    def _start(self, now: float) -> None:
        self._started += 1
        actor = self._start_actor()
        self.engines.append(FleetEngine(self._started, actor, actor.state.remote(), now))
        log.info("engine %d: requested", self._started)

    def _least_useful(self, loads: Mapping[str, EngineLoad]) -> FleetEngine:
        """An engine that serves no requests yet, else the one with the fewest requests; of several the youngest."""

        def usefulness(engine: FleetEngine) -> tuple[int, int]:
            load = loads.get(engine.address)
            return (0 if load is None else 1 + load.requests, -engine.number)

        return min(self.staying, key=usefulness)

    def _observe(self, engine: FleetEngine, now: float) -> None:
        """Take the state that the actor has sent, if there is one, and ask for the next."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        if not ray.wait([engine.pending_state], timeout=0)[0]:
            self._warn_if_late(engine, now)
            return
        try:
            state: EngineState = ray.get(engine.pending_state)
        except ActorUnavailableError:  # it may come back
            engine.pending_state = engine.actor.state.remote()
            return
        except RayError as error:
            self._forget(engine, self._why_gone(engine, error), now)
            return
        engine.node_id = state.node_id
        if state.address and not engine.address:
            engine.address, engine.since = state.address, now
            log.info("engine %d: ready at %s, on node %s", engine.number, state.address, engine.node_id)
        if state.exit_status is None:
            engine.pending_state = engine.actor.state.remote()
        else:
            ray.kill(engine.actor)
            reason = f"its process ended with status {state.exit_status}: {state.last_line}"
            self._forget(engine, reason, now)

    def _warn_if_late(self, engine: FleetEngine, now: float) -> None:
        if not engine.node_id and not engine.is_late and now - engine.since >= PLACEMENT_WARNING_S:
            engine.is_late = True
            log.warning("engine %d: no node of the cluster has the resources for it so far", engine.number)

    def _why_gone(self, engine: FleetEngine, error: Exception) -> str:
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if engine.node_id and engine.node_id not in alive:
            return "its node is gone"
        return f"its actor is gone ({type(error).__name__})"

    def _forget(self, engine: FleetEngine, reason: str, now: float) -> None:
        """The engine has ended; if it was not drained, another is started after a pause."""
        self.engines.remove(engine)
        if engine.is_draining:
            log.info("engine %d: gone", engine.number)
            return
        was_sound = bool(engine.address) and now - engine.since >= SOUND_AFTER_S
        self._failures = 0 if was_sound else self._failures + 1
        pause_s = retry_pause_s(self._failures)
        self._not_before = now + pause_s
        log.warning("engine %d: %s; another in %.0f s", engine.number, reason, pause_s)

    def _release(self, engine: FleetEngine) -> None:
        """Drain an engine; the request for one that has no node yet is withdrawn."""
        import ray

        engine.is_draining = True
        if engine.node_id:
            engine.actor.drain.remote()
            log.info("engine %d: drains", engine.number)
        else:
            ray.kill(engine.actor)
            log.info("engine %d: request withdrawn", engine.number)
