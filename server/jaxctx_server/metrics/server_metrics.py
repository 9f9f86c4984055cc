"""ServerMetrics: all metrics of one server, as the text that Prometheus reads."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

import jaxctx
from jaxctx.engine.interface import LOCAL_ENGINE
from jaxctx.errors import JaxctxError
from jaxctx_server.lifecycle import ServerLifecycle, State
from jaxctx_server.metrics import table
from jaxctx_server.metrics.calls import CallMetrics
from jaxctx_server.metrics.engines import EngineLoad, counter_families, load_families
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.metrics.vllm import vllm_families

ROUTER = "router"
OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class Exposition:
    """Metrics as text."""

    body: bytes
    content_type: str


class ServerMetrics:
    """The metrics of one server. `calls` and `generations` are counted by the call pipeline and the services."""

    def __init__(self, lifecycle: ServerLifecycle, role: str = "both") -> None:
        """`role` is the setting --role."""
        self.calls = CallMetrics()
        self.generations = GenerationMetrics()
        self._lifecycle = lifecycle
        self._role = role
        self._version = jaxctx.__version__
        self._families = CollectedFamilies()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._families)
        ProcessCollector(registry=self._registry)
        self._rendering = asyncio.Lock()  # one scrape at a time, however many ask

    async def render(self, accept: str = "") -> Exposition:
        """All metrics now: in the format of OpenMetrics if the value of an Accept header asks for it, else in that of
        Prometheus. Also answers while the server loads, drains or has failed, then without what the engine counts.
        """
        async with self._rendering:
            engines = await self._engines()
            self._families.families = list(self._collect(engines))
            return await asyncio.to_thread(write_text, self._registry, accept)

    async def _engines(self) -> Sequence[EngineLoad]:
        """The engine of this process as it is, or those of a router as of their last heartbeats."""
        try:
            state = self._lifecycle.served()
            if state.model is not None:
                engine = state.model.engine
                return [EngineLoad(LOCAL_ENGINE, engine.info, await engine.stats())]
        except JaxctxError:  # the server loads or has stopped, or the engine has failed
            return ()
        return [
            EngineLoad(handle.id, handle.engine.info, handle.stats)
            for handle in state.engine_handles()
            if handle.stats is not None
        ]

    def _collect(self, engines: Sequence[EngineLoad]) -> Iterable[Family]:
        is_router = self._role == ROUTER
        yield self._build_info(None if is_router or not engines else engines[0])
        yield self._server_state()
        yield from self.calls.families()
        yield from self.generations.families()
        yield from load_families(engines)
        if is_router:
            yield from self._router_families()
            return
        for engine in engines:  # there is at most one
            yield from counter_families(engine.engine_id, engine.stats)
            yield from vllm_families(engine, self.generations)

    def _build_info(self, engine: EngineLoad | None) -> Family:
        info = None if engine is None else engine.info
        family = table.BUILD_INFO.gauge()
        model = ["", "", "", ""] if info is None else [info.model_id, info.dtype, info.kv_dtype, info.platform]
        family.add_metric([self._version, self._role, *model], 1)
        return family

    def _server_state(self) -> Family:
        family = table.SERVER_STATE.gauge()
        for state in State:
            family.add_metric([state.value], int(self._lifecycle.state is state))
        return family

    def _router_families(self) -> Iterable[Family]:
        answering, lost = table.ENGINES.gauge(), table.ENGINES_LOST.counter()
        try:
            registry = self._lifecycle.served().engines
        except JaxctxError:  # the router has not begun to serve, or has stopped
            pass
        else:
            answering.add_metric([], len(registry.handles))
            lost.add_metric([], registry.lost)
        yield from (answering, lost)


def write_text(registry: CollectorRegistry, accept: str) -> Exposition:
    """The metrics as text, in the format that an Accept header asks for.

    Not by prometheus_client's `choose_encoder`: for OpenMetrics it replaces the colons in the names of vLLM. All names
    here are valid in every format, so that none needs to be escaped.
    """
    media_types = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    if OPENMETRICS not in media_types:
        return Exposition(generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)
    body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return Exposition(body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8")


class CollectedFamilies(Collector):
    """What the event loop has collected, for the thread that writes it as text."""

    def __init__(self) -> None:
        self.families: Sequence[Family] = ()

    def collect(self) -> Iterable[Family]:
        """The families."""
        return self.families
