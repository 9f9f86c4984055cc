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
from jaxctx_server.lifecycle import ServerLifecycle, ServingState, State
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """What one exposition shows, as it was on the event loop at one moment."""

    calls: CallMetrics
    generations: GenerationMetrics
    state: State
    engines: Sequence[EngineLoad]  # that have reported their load
    registered: int  # engines that a router has
    lost: int  # registrations that ended


class ServerMetrics:
    """The metrics of one server. `calls` and `generations` are counted by the call pipeline and the services."""

    def __init__(self, lifecycle: ServerLifecycle, role: str = "both") -> None:
        """`role` is the setting --role."""
        self.calls = CallMetrics()
        self.generations = GenerationMetrics()
        self._lifecycle = lifecycle
        self._role = role
        self._rendering = asyncio.Lock()  # one scrape at a time, however many ask

    async def render(self, accept: str = "") -> Exposition:
        """All metrics now: in the format of OpenMetrics if the value of an Accept header asks for it, else in that of
        Prometheus. Also answers while the server loads, drains or has failed, then without what the engine counts.

        They are written on a thread, as that may take longer than the event loop has.
        """
        async with self._rendering:
            counts = await self._counts()
            return await asyncio.to_thread(write_text, counts, self._role, accept)

    async def _counts(self) -> ServerCounts:
        serving = self._serving()
        engines = () if serving is None else await engine_loads(serving)
        return ServerCounts(
            calls=self.calls.copy(),
            generations=self.generations.copy(),
            state=self._lifecycle.state,
            engines=engines,
            registered=0 if serving is None else len(serving.engines.handles),
            lost=0 if serving is None else serving.engines.lost,
        )

    def _serving(self) -> ServingState | None:
        """What the server serves; None while it loads, and once it has stopped."""
        try:
            return self._lifecycle.served()
        except JaxctxError:
            return None


async def engine_loads(serving: ServingState) -> Sequence[EngineLoad]:
    """The engine of this process as it is, none if it has failed; or those of a router as of their last heartbeats."""
    if serving.model is not None:
        engine = serving.model.engine
        try:
            return [EngineLoad(LOCAL_ENGINE, engine.info, await engine.stats(), engine.attention_status)]
        except JaxctxError:
            return ()
    return [
        EngineLoad(handle.id, handle.engine.info, handle.stats, handle.engine.attention_status)
        for handle in serving.engine_handles()
        if handle.stats is not None
    ]


def families(counts: ServerCounts, role: str) -> Iterable[Family]:
    """All metrics of a server in this role."""
    is_router = role == ROUTER
    yield build_info(role, None if is_router or not counts.engines else counts.engines[0])
    yield server_state(counts.state)
    yield from counts.calls.families()
    yield from counts.generations.families()
    yield from load_families(counts.engines)
    if is_router:
        yield from router_families(counts)
        return
    for engine in counts.engines:  # there is at most one
        yield from counter_families(engine.engine_id, engine.stats)
        yield from vllm_families(engine, counts.generations)


def build_info(role: str, engine: EngineLoad | None) -> Family:
    """What runs; `engine` is that of this process, if it is known."""
    family = table.BUILD_INFO.gauge()
    info = None if engine is None else engine.info
    model = [""] * 5
    if info is not None:
        model = [info.model_id, info.dtype, info.weights_dtype, info.kv_dtype, info.platform]
    family.add_metric([jaxctx.__version__, role, *model], 1)
    return family


def server_state(current: State) -> Family:
    """The state that the server is in, among all that there are."""
    family = table.SERVER_STATE.gauge()
    for state in State:
        family.add_metric([state.value], int(state is current))
    return family


def router_families(counts: ServerCounts) -> Iterable[Family]:
    """How many engines a router has and has lost."""
    answering, lost = table.ENGINES.gauge(), table.ENGINES_LOST.counter()
    answering.add_metric([], counts.registered)
    lost.add_metric([], counts.lost)
    yield from (answering, lost)


def write_text(counts: ServerCounts, role: str, accept: str) -> Exposition:
    """The metrics as text, in the format that an Accept header asks for.

    Not by prometheus_client's `choose_encoder`: for OpenMetrics it replaces the colons in the names of vLLM. All names
    here are valid in every format, so that none needs to be escaped.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CountsCollector(counts, role))
    ProcessCollector(registry=registry)
    media_types = [each.partition(";")[0].strip().lower() for each in accept.split(",")]
    if OPENMETRICS not in media_types:
        return Exposition(generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)
    body = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)
    return Exposition(body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8")


class CountsCollector(Collector):
    """Gives prometheus_client the families of these counts."""

    def __init__(self, counts: ServerCounts, role: str) -> None:
        self._counts = counts
        self._role = role

    def collect(self) -> Iterable[Family]:
        """The families."""
        return families(self._counts, self._role)
