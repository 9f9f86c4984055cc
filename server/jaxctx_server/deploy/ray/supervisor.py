"""`jaxctx-serve ray`: keeps as many engines on a Ray cluster as the load asks for, until a signal.

The first signal lets all engines drain and then ends; a second one ends them at once.
"""

import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping

import jaxctx
from jaxctx.errors import JaxctxError
from jaxctx_server.config import RayConfig
from jaxctx_server.deploy.ray.actor import EngineActor
from jaxctx_server.deploy.ray.autoscaling import EngineLoad, LoadTrend, decide_engine_count
from jaxctx_server.deploy.ray.fleet import Fleet
from jaxctx_server.engine_bounds import EngineBounds
from jaxctx_server.errors import OK, USAGE, StartError
from jaxctx_server.signals import StopSignals

LOOK_EVERY_S = 1.0  # the router's figures are those of its last heartbeat, which is as long
ROUTER_TIMEOUT_S = 5.0
log = logging.getLogger("jaxctx.ray")


def run_ray(config: RayConfig) -> int:
    """Run until a signal ends it; returns the exit status. Raises StartError for what the user can mend."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    is_loopback = check_router(config)
    bounds = EngineBounds.parse(config.engines)
    key = None if config.cluster_key is None else config.cluster_key.read_text("utf-8")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise StartError("ray is not installed: pip install 'jaxctx[ray]'", USAGE) from error
    ray.init(address=config.ray_address, log_to_driver=False, logging_level=logging.WARNING)
    stop, hurry = threading.Event(), threading.Event()
    set_on_signals(stop, hurry)  # after Ray, which has handlers of its own
    if is_loopback:
        check_nodes_are_here(config.router)
    actor = ray.remote(EngineActor).options(
        num_cpus=config.cpus, num_gpus=config.gpus, scheduling_strategy="SPREAD", max_restarts=0
    )
    command, arguments = config.engine_command_words(), engine_arguments(config)
    fleet = Fleet(lambda: actor.remote(command, arguments, is_loopback), bounds.minimum)
    with jaxctx.Client(config.router, api_key=key) as client:
        supervise(RouterLoads(client, config.full), fleet, bounds, stop, hurry)
    ray.shutdown()
    return OK


def engine_arguments(config: RayConfig) -> list[str]:
    """The arguments of each engine, apart from its address."""
    arguments = [*config.engine_arguments, "--role", "engine", "--router", config.router]
    if config.cluster_key is not None:
        arguments += ["--cluster-key", str(config.cluster_key)]
    return arguments


def check_router(config: RayConfig) -> bool:
    """Whether the router can be reached on its own machine only. Raises StartError for an unknown name, and for a
    router on another machine without a cluster key.
    """
    try:
        is_loopback = is_on_loopback(config.router)
    except OSError as error:
        raise StartError(f"--router {config.router}: {error.strerror}") from error
    if not is_loopback and config.cluster_key is None:
        raise StartError("--cluster-key: engines beyond loopback need one")
    return is_loopback


def is_on_loopback(router: str) -> bool:
    """Whether all addresses of HOST:PORT are loopback addresses. Raises OSError for an unknown name."""
    host = router.rpartition(":")[0].strip("[]")
    addresses = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def check_nodes_are_here(router: str) -> None:
    """Raise StartError if the cluster has nodes on other machines: they could not reach a router on loopback."""
    import ray

    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    elsewhere = addresses - {ray.util.get_node_ip_address(), "127.0.0.1"}
    if elsewhere:
        raise StartError(f"--router {router}: out of reach for {', '.join(sorted(elsewhere))}")


class RouterLoads:
    """The load of the engines, as the router knows it."""

    def __init__(self, client: jaxctx.Client, full: int | None) -> None:
        """`full`: requests at which an engine is full, if fewer than it serves at once."""
        self._client, self._full = client, full
        self._answers = True  # whether the router answered the last call

    def get(self) -> Mapping[str, EngineLoad] | None:
        """The loads of the engines that accept work, by address; None if the router does not answer."""
        try:
            engines = self._client.engines(timeout_s=ROUTER_TIMEOUT_S)
        except JaxctxError as error:
            if self._answers:
                log.warning("the router does not answer: %s", error)
            self._answers = False
            return None
        if not self._answers:
            log.info("the router answers again")
        self._answers = True
        loads = {}
        for engine in engines:
            if not engine.stats.draining:
                max_running = min(self._full or engine.info.max_batch, engine.info.max_batch)
                loads[engine.address] = EngineLoad(engine.stats.running, engine.stats.waiting, max_running)
        return loads


def supervise(
    router: RouterLoads, fleet: Fleet, bounds: EngineBounds, stop: threading.Event, hurry: threading.Event
) -> None:
    """Keep the fleet until `stop`; then drain all engines, until `hurry`."""
    trend = LoadTrend()
    while not stop.is_set():
        loads, now = router.get(), time.monotonic()
        if loads is None:
            trend = LoadTrend()
        else:
            missing = sum(engine.address not in loads for engine in fleet.staying)
            starting = missing + fleet.wanted - len(fleet.staying)
            wanted, trend = decide_engine_count(loads.values(), starting, fleet.wanted, bounds, trend, now)
            if wanted != fleet.wanted:
                why = "all are full" if wanted > fleet.wanted else "fewer have capacity for all that runs"
                log.info("%d engines from now on, not %d: %s", wanted, fleet.wanted, why)
                fleet.wanted = wanted
        fleet.reconcile(loads or {}, now)
        stop.wait(LOOK_EVERY_S)
    log.info("all engines drain; a second signal ends them at once")
    fleet.wanted = 0
    while fleet.engines and not hurry.is_set():
        fleet.reconcile({}, time.monotonic())
        hurry.wait(LOOK_EVERY_S)
    fleet.end_now()


def set_on_signals(stop: threading.Event, hurry: threading.Event) -> None:
    """Let SIGINT or SIGTERM set `stop`, and a second one, later than SAME_SIGNAL_S, `hurry`."""
    signals = StopSignals(stop=stop.set, end_now=hurry.set, clock=time.monotonic)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals.handle)
