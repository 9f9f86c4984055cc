"""The names that balancers know: the same numbers as under our own."""

from __future__ import annotations

from jaxctx_server.metrics.engines import EngineLoad
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.metrics.vllm import vllm_families
from tests.server.fake_engine import INFO
from tests.server.metrics.exposition import NUMBERED, value, values_of


def test_aliases_have_the_values_of_our_own_names() -> None:
    generations = GenerationMetrics()
    generations.first_token.observe(0.02)
    generations.between_tokens.observe(0.01, 3)
    generations.duration.observe(2.0)
    generations.outputs.update(stop=5, length=4, cancelled=3, error=2)
    values = values_of(vllm_families(EngineLoad("local", INFO, NUMBERED), generations))
    model = {"model_name": "fake"}
    usage = NUMBERED.pages_held / NUMBERED.pages_total
    for name, expected in {
        "vllm:num_requests_running": NUMBERED.running,
        "vllm:num_requests_waiting": NUMBERED.waiting,
        "vllm:kv_cache_usage_perc": usage,
        "vllm:gpu_cache_usage_perc": usage,
        "vllm:prefix_cache_queries_total": NUMBERED.tokens_queried,
        "vllm:prefix_cache_hits_total": NUMBERED.tokens_cached,
        "vllm:prompt_tokens_total": NUMBERED.prompt_tokens,
        "vllm:generation_tokens_total": NUMBERED.tokens_generated,
        "vllm:num_preemptions_total": NUMBERED.preemptions,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 0.02,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:time_per_output_token_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_sum": 2.0,
    }.items():
        assert value(values, name, **model) == expected, name
    for reason, expected in {"stop": 5, "length": 4, "abort": 3, "error": 2}.items():
        assert value(values, "vllm:request_success_total", finished_reason=reason, **model) == expected
    assert value(values, "vllm:cache_config_info", block_size="4", num_gpu_blocks="100") == 1
