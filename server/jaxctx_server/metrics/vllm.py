"""The same numbers under the names that vLLM gives them, for balancers that know those.

Gateway API Inference Extension, llm-d, AIBrix and KServe choose a server by its queue, KV usage and prefix cache. Only
a server with a model has these names: a router is no server that a balancer could choose.
"""

from collections.abc import Iterable

from prometheus_client import Metric as Family

from jaxctx_server.metrics import table
from jaxctx_server.metrics.engines import EngineLoad, counter, gauges, usage_ratio
from jaxctx_server.metrics.generations import CANCELLED, FINISH_REASONS, GenerationMetrics

ABORT = "abort"  # vLLM's name of CANCELLED


def vllm_families(engine: EngineLoad, generations: GenerationMetrics) -> Iterable[Family]:
    """The aliases of the metrics of one engine and its server."""
    model, stats = engine.info.model_id, engine.stats
    yield gauges(table.VLLM_RUNNING, [(model, stats.running)])
    yield gauges(table.VLLM_WAITING, [(model, stats.waiting)])
    yield gauges(table.VLLM_KV_USAGE, [(model, usage_ratio(stats))])
    yield gauges(table.VLLM_GPU_CACHE_USAGE, [(model, usage_ratio(stats))])
    yield counter(table.VLLM_PREFIX_QUERIES, model, stats.tokens_queried)
    yield counter(table.VLLM_PREFIX_HITS, model, stats.tokens_cached)
    yield counter(table.VLLM_PROMPT_TOKENS, model, stats.prompt_tokens)
    yield counter(table.VLLM_GENERATION_TOKENS, model, stats.tokens_generated)
    yield counter(table.VLLM_PREEMPTIONS, model, stats.preemptions)
    success = table.VLLM_SUCCESS.counter()
    for reason in FINISH_REASONS:
        success.add_metric([model, ABORT if reason == CANCELLED else reason], generations.outputs[reason])
    yield success
    for metric, histogram in (
        (table.VLLM_TTFT, generations.first_token),
        (table.VLLM_ITL, generations.between_tokens),
        (table.VLLM_TPOT, generations.between_tokens),
        (table.VLLM_E2E, generations.duration),
    ):
        family = metric.histogram()
        family.add_metric([model], histogram.buckets(), histogram.sum)
        yield family
    config = table.VLLM_CACHE_CONFIG.gauge()
    config.add_metric([str(engine.info.page_size), str(engine.info.pages_total)], 1)
    yield config
