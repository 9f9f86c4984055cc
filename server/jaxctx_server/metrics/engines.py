"""Engines: their load and counters as metrics. The label `engine_id` is the id of a registered engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Metric as Family

from jaxctx.types import Attention, EngineInfo, EngineStats
from jaxctx_server.metrics import table
from jaxctx_server.metrics.table import Metric


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine at one moment."""

    engine_id: str
    info: EngineInfo
    stats: EngineStats
    attention: Attention | None = None  # what computes it; None: not known


def usage_ratio(stats: EngineStats) -> float:
    """Held pages as a share of all. Cached pages count as free: they are given up when memory is needed."""
    return stats.pages_held / max(1, stats.pages_total)


def load_families(engines: Sequence[EngineLoad]) -> Iterable[Family]:
    """How loaded the engines are now."""
    yield gauges(table.RUNNING, [(each.engine_id, each.stats.running) for each in engines])
    yield gauges(table.WAITING, [(each.engine_id, each.stats.waiting) for each in engines])
    yield gauges(table.KV_PAGES_CAPACITY, [(each.engine_id, each.stats.pages_total) for each in engines])
    yield gauges(table.KV_PAGES_RESERVED, [(each.engine_id, each.stats.pages_reserved) for each in engines])
    yield gauges(table.KV_PAGE_TOKENS, [(each.engine_id, each.info.page_size) for each in engines])
    yield gauges(table.KV_USAGE, [(each.engine_id, usage_ratio(each.stats)) for each in engines])
    yield gauges(table.CONTEXTS, [(each.engine_id, each.stats.contexts) for each in engines])
    yield gauges(table.SNAPSHOTS, [(each.engine_id, each.stats.snapshots) for each in engines])
    yield gauges(table.PUBLICATIONS, [(each.engine_id, each.stats.publications) for each in engines])
    yield gauges(table.DRAINING, [(each.engine_id, int(each.stats.draining)) for each in engines])
    yield gauges(table.COMPILING, [(each.engine_id, each.stats.functions_compiling) for each in engines])
    yield gauges(table.ADAPTERS, [(each.engine_id, each.stats.adapters) for each in engines])
    yield gauges(table.ADAPTER_SLOTS, [(each.engine_id, each.info.adapter_slots) for each in engines])
    pages, tiers, capacity = table.KV_PAGES.gauge(), table.TIER_PAGES.gauge(), table.TIER_PAGES_CAPACITY.gauge()
    for each in engines:
        pages.add_metric([each.engine_id, "free"], each.stats.pages_free)
        pages.add_metric([each.engine_id, "cached"], each.stats.pages_cached)
        pages.add_metric([each.engine_id, "held"], each.stats.pages_held)
        tiers.add_metric([each.engine_id, "host"], each.stats.host_pages_used)
        tiers.add_metric([each.engine_id, "disk"], each.stats.disk_pages_used)
        capacity.add_metric([each.engine_id, "host"], each.stats.host_pages_total)
        capacity.add_metric([each.engine_id, "disk"], each.stats.disk_pages_total)
    yield from (pages, tiers, capacity, attention_family(engines))


def counter_families(engine_id: str, stats: EngineStats) -> Iterable[Family]:
    """What the engine has counted since it started."""
    yield counter(table.PREFIX_QUERIED, engine_id, stats.tokens_queried)
    yield counter(table.PREFIX_HIT, engine_id, stats.tokens_cached)
    yield counter(table.RESTORED_TOKENS, engine_id, stats.tokens_restored)
    yield counter(table.PROMPT_TOKENS, engine_id, stats.prompt_tokens)
    yield counter(table.GENERATION_TOKENS, engine_id, stats.tokens_generated)
    yield counter(table.COMPUTED_TOKENS, engine_id, stats.tokens_computed)
    yield counter(table.DRAFT_TOKENS, engine_id, stats.tokens_drafted)
    yield counter(table.ACCEPTED_DRAFTS, engine_id, stats.tokens_accepted)
    yield counter(table.MODEL_DRAFTS, engine_id, stats.tokens_drafted_by_model)
    yield counter(table.ACCEPTED_MODEL_DRAFTS, engine_id, stats.tokens_accepted_by_model)
    yield counter(table.STEPS, engine_id, stats.steps)
    yield counter(table.STEP_SECONDS, engine_id, stats.step_seconds)
    yield counter(table.ADMITTED, engine_id, stats.requests_admitted)
    yield counter(table.QUEUE_SECONDS, engine_id, stats.queue_seconds)
    yield counter(table.PREEMPTIONS, engine_id, stats.preemptions)
    yield counter(table.SUSPENSIONS, engine_id, stats.suspensions)
    yield counter(table.EXPIRED, engine_id, stats.expired)
    yield counter(table.COMPILATIONS, engine_id, stats.compilations_after_ready)


def attention_family(engines: Sequence[EngineLoad]) -> Family:
    """What computes attention in the engines."""
    family = table.ATTENTION.gauge()
    for each in engines:
        if each.attention is not None:
            family.add_metric([each.engine_id, each.attention.implementation, each.attention.reason], 1)
    return family


def gauges(metric: Metric, values: Sequence[tuple[str, float]]) -> Family:
    """A gauge with a value for each label value; of a metric with one label."""
    family = metric.gauge()
    for label, value in values:
        family.add_metric([label], value)
    return family


def counter(metric: Metric, label: str, value: float) -> Family:
    """A counter with one value, of a metric with one label."""
    family = metric.counter()
    family.add_metric([label], value)
    return family
