"""All metrics of a server as text: read back by Prometheus' own parser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import jaxctx
from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.errors import Unavailable
from jaxctx.model.text import ModelText
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx_server.auth import METHODS
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState, State
from jaxctx_server.metrics.calls import CODES, OTHER, REASONS, TRANSPORTS
from jaxctx_server.metrics.generations import FINISH_REASONS
from jaxctx_server.metrics.server_metrics import ServerMetrics
from jaxctx_server.metrics.table import (
    ENGINE_COUNTERS,
    METRICS,
    ROUTER_METRICS,
    SERVER_METRICS,
    VLLM_METRICS,
)
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.server.fake_engine import STATS, FakeEngine
from tests.server.harness import KEYS, bearer, failure
from tests.server.metrics.exposition import parsed, value, values_of
from tests.server.router.fake_router import FakeRouter

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
# Labels whose values are not listed here are those of one model, or of registered engines.
CLOSED = {
    "method": {OTHER, *(name.removeprefix("/") for name in METHODS)},
    "transport": {*TRANSPORTS, OTHER},
    "code": {*CODES, OTHER},
    "reason": {*REASONS, OTHER, *AttentionReason},
    "implementation": {"reference", "gpu", "tpu"},
    "finish_reason": set(FINISH_REASONS),
    "finished_reason": {"stop", "length", "abort", "error"},
    "state": {*(state.value for state in State), "free", "cached", "held"},
    "tier": {"host", "disk"},
    "engine_id": {"local", "a", "b"},
    "model_name": {"", "fake", "model-a", "model-b"},
    "role": {"both", "router", "engine"},
}


def names_of(families: list[Any]) -> set[str]:
    """The names of the families as the table has them."""
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


async def rendered(metrics: ServerMetrics) -> list[Any]:
    return parsed((await metrics.render()).body)


@pytest.fixture
async def lifecycle(text: ModelText, limits: Limits) -> AsyncIterator[ServerLifecycle]:
    lifecycle = ServerLifecycle()
    lifecycle.set_ready(ServingState.of(FakeEngine(), text, limits))
    yield lifecycle
    lifecycle.stop()


async def test_a_server_of_a_model_has_all_metrics_but_a_routers(lifecycle: ServerLifecycle) -> None:
    metrics = ServerMetrics(lifecycle)
    metrics.calls.began("grpc")
    metrics.calls.ended("/jaxctx.v1.ContextService/Fill", "grpc", "NOT_FOUND", "CONTEXT_NOT_FOUND", 0.0)
    families = await rendered(metrics)
    ours = {name for name in names_of(families) if not name.startswith("process_")}
    assert ours == METRICS.keys() - {metric.name for metric in ROUTER_METRICS}
    for family in families:
        if not family.name.startswith("process_"):
            metric = METRICS[family.name + ("_total" if family.type == "counter" else "")]
            assert (family.type, family.documentation) == (metric.kind.value, metric.help)
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == set(metric.labels), sample.name


async def test_the_documented_metrics_of_the_process_are_there(lifecycle: ServerLifecycle) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")
    exposed = names_of(await rendered(ServerMetrics(lifecycle)))
    assert set(re.findall(r"process_\w+", page)) == {name for name in exposed if name.startswith("process_")}


async def test_it_says_what_runs(lifecycle: ServerLifecycle) -> None:
    values = values_of(await rendered(ServerMetrics(lifecycle, "engine")))
    build = {
        "model_name": "fake",
        "dtype": "float32",
        "weights_dtype": "int8",
        "kv_dtype": "float32",
        "platform": "cpu",
    }
    assert value(values, "jaxctx_build_info", version=jaxctx.__version__, role="engine", **build) == 1
    assert value(values, "jaxctx_server_state", state="ready") == 1
    assert value(values, "jaxctx_server_state", state="loading") == 0
    assert value(values, "jaxctx_requests_running", engine_id="local") == STATS.running
    assert value(values, "process_open_fds") > 0


@pytest.mark.parametrize("reason", [AttentionReason.PLATFORM, AttentionReason.DIFFERS])
async def test_it_says_what_computes_attention(text: ModelText, limits: Limits, reason: AttentionReason) -> None:
    lifecycle, engine = ServerLifecycle(), FakeEngine()
    engine.attention_status = AttentionChoice("reference", reason, "it differs in row 3").as_status()
    lifecycle.set_ready(ServingState.of(engine, text, limits))
    body = (await ServerMetrics(lifecycle).render()).body
    lifecycle.stop()
    values, labels = values_of(parsed(body)), {"implementation": "reference", "reason": reason.value}
    assert value(values, "jaxctx_attention_info", engine_id="local", **labels) == 1
    assert len([name for name, _ in values if name == "jaxctx_attention_info"]) == 1
    assert b"row 3" not in body


async def test_while_the_server_loads_there_are_metrics_of_the_server_alone() -> None:
    families = await rendered(ServerMetrics(ServerLifecycle()))
    values = values_of(families)
    assert value(values, "jaxctx_server_state", state="loading") == 1
    assert not [name for name, labels in values if ("engine_id", "local") in labels or name.startswith("vllm:")]
    assert {metric.name for metric in SERVER_METRICS} <= names_of(families)


async def test_an_engine_that_has_failed_leaves_the_rest(lifecycle: ServerLifecycle) -> None:
    async def fails() -> Any:
        raise Unavailable("the engine stopped", reason="ENGINE_FAILED")

    engine: Any = lifecycle.model().engine
    engine.stats = fails
    names = names_of(await rendered(ServerMetrics(lifecycle)))
    assert "jaxctx_calls_total" in names
    assert "jaxctx_steps_total" not in names


async def test_the_accept_header_chooses_the_format(lifecycle: ServerLifecycle) -> None:
    metrics = ServerMetrics(lifecycle)
    plain, openmetrics = await metrics.render("text/html"), await metrics.render(OPENMETRICS)
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert openmetrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.body.endswith(b"# EOF\n")
    assert names_of(parsed(openmetrics.body, openmetrics=True)) == names_of(parsed(plain.body))


async def test_scrapes_at_once_get_whole_answers_one_after_the_other(lifecycle: ServerLifecycle) -> None:
    metrics = ServerMetrics(lifecycle)
    engine: Any = lifecycle.model().engine
    asked = running = 0

    async def stats() -> Any:
        nonlocal asked, running
        asked, running = asked + 1, running + 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1
        return STATS

    engine.stats = stats
    expositions = await asyncio.gather(*(metrics.render() for _ in range(5)))
    assert asked == 5
    assert len({frozenset(names_of(parsed(each.body))) for each in expositions}) == 1


async def test_two_servers_share_nothing() -> None:
    first, second = ServerMetrics(ServerLifecycle()), ServerMetrics(ServerLifecycle())
    first.generations.outputs["stop"] += 1
    counts = [values_of(await rendered(each)) for each in (first, second)]
    assert [value(each, "jaxctx_outputs_total", finish_reason="stop") for each in counts] == [1, 0]


@pytest.fixture
async def router(text: ModelText) -> AsyncIterator[FakeRouter]:
    """A router of two engines, of which "a" has reported its load."""
    router = FakeRouter(text)
    router.add_engine("a").update_load(STATS)
    router.add_engine("b")
    yield router
    await router.stop()


async def test_a_router_has_the_load_of_its_engines(router: FakeRouter) -> None:
    metrics = ServerMetrics(router.lifecycle, "router")
    families = await rendered(metrics)
    values = values_of(families)
    assert value(values, "jaxctx_engines") == 2
    assert value(values, "jaxctx_engines_lost_total") == 0
    assert value(values, "jaxctx_requests_running", engine_id="a") == STATS.running
    told = {"implementation": "reference", "reason": "platform"}
    assert value(values, "jaxctx_attention_info", engine_id="a", **told) == 1
    assert len([name for name, _ in values if name == "jaxctx_attention_info"]) == 1  # nobody knows it of "b" yet
    hidden = {metric.name for metric in (*VLLM_METRICS, *ENGINE_COUNTERS)}
    assert names_of(families).isdisjoint(hidden)
    router.lose("a")
    values = values_of(await rendered(metrics))
    assert (value(values, "jaxctx_engines"), value(values, "jaxctx_engines_lost_total")) == (1, 1)
    assert not [name for name, labels in values if ("engine_id", "a") in labels]


async def test_labels_come_from_closed_sets_whatever_callers_send(text: ModelText, limits: Limits) -> None:
    """Tenants, keys, contexts and request ids are in requests, and in no metric."""
    lifecycle, engine = ServerLifecycle(), FakeEngine()
    backend = Backend.make(lifecycle, KEYS, max_calls=10, clock=lambda: 1000.0)
    metrics, server = backend.metrics, make_server(backend)
    port = server.add_insecure_port("127.0.0.1:0")
    lifecycle.set_ready(ServingState.of(engine, text, limits))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = ContextServiceStub(channel)
            headers = (*bearer("a-key"), ("x-request-id", "marker-request"))
            await stub.CreateContext(pb.CreateContextRequest(context_id="marker-context"), metadata=headers)
            call = stub.Generate(pb.GenerateRequest(context_id="marker-context"), metadata=headers)
            assert [part async for part in call]
            await failure(stub.Flush(pb.FlushRequest(context_id="marker-other"), metadata=headers))
            await failure(stub.Flush(pb.FlushRequest(context_id="x"), metadata=bearer("marker-key")))
        body = (await metrics.render()).body
    finally:
        lifecycle.stop()
        await server.stop(0)
    assert b"marker" not in body
    assert b"alice" not in body
    assert b'"red"' not in body
    families = parsed(body)
    for family in families:
        for sample in family.samples:
            for label, found in sample.labels.items():
                assert label not in CLOSED or found in CLOSED[label], sample
    values = values_of(families)
    flushes = {"method": "jaxctx.v1.ContextService/Flush", "transport": "grpc"}
    assert value(values, "jaxctx_calls_total", code="NOT_FOUND", **flushes) == 1
    assert value(values, "jaxctx_calls_total", code="UNAUTHENTICATED", **flushes) == 1
    assert value(values, "jaxctx_outputs_total", finish_reason="length") == 1
    assert value(values, "jaxctx_time_to_first_token_seconds_count") == 1
    assert value(values, "vllm:inter_token_latency_seconds_count", model_name="fake") == 1
