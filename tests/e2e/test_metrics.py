"""What a server with a real engine counts, asked between the calls of a client."""

from __future__ import annotations

import jaxctx
from jaxctx_server.services import Backend
from tests.server.metrics.exposition import Values, parsed, value, values_of

ENGINE = {"engine_id": "local"}
PROMPT = list(range(65, 65 + 48))  # three pages
CALLS = "jaxctx_calls_total"


async def scraped(backend: Backend) -> Values:
    return values_of(parsed((await backend.metrics.render()).body))


async def test_counts_of_an_engine_follow_its_calls(backend: Backend, client: jaxctx.aio.Client) -> None:
    before = await scraped(backend)
    for _ in range(2):
        context = await client.create(tokens=PROMPT)
        pieces = [piece async for piece in context.generate(max_tokens=5, ignore_eos=True)]
        assert sum(len(piece.token_ids) for piece in pieces) == 5
    after = await scraped(backend)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - (before.get((name, tuple(sorted(labels.items()))), 0.0))

    assert grown("jaxctx_prompt_tokens_total", **ENGINE) == 2 * len(PROMPT)
    assert grown("jaxctx_generation_tokens_total", **ENGINE) == 10
    assert grown("jaxctx_prefix_cache_queried_tokens_total", **ENGINE) == 2 * len(PROMPT)
    assert 32 <= grown("jaxctx_prefix_cache_hit_tokens_total", **ENGINE) < 48  # the last token is always computed
    assert grown("jaxctx_requests_admitted_total", **ENGINE) == 4  # two fills, two generations
    assert grown("jaxctx_steps_total", **ENGINE) > 0
    assert grown("jaxctx_step_seconds_total", **ENGINE) >= 0  # of a clock that stands still
    assert value(after, "jaxctx_contexts", **ENGINE) - value(before, "jaxctx_contexts", **ENGINE) == 2
    pages = [value(after, "jaxctx_kv_pages", state=state, **ENGINE) for state in ("free", "cached", "held")]
    assert sum(pages) == value(after, "jaxctx_kv_pages_capacity", **ENGINE)
    assert value(after, "jaxctx_kv_usage_ratio", **ENGINE) == pages[2] / sum(pages) > 0
    generate = {"method": "jaxctx.v1.ContextService/Generate", "transport": "grpc", "code": "OK"}
    assert grown(CALLS, **generate) == 2
    assert grown("jaxctx_time_to_first_token_seconds_count") == 2
    assert 0 < grown("jaxctx_inter_token_latency_seconds_count") <= 8  # fewer if a first token does not come alone
    assert grown("jaxctx_outputs_total", finish_reason="length") == 2
    model = {"model_name": (await client.models())[0].model_id}
    assert value(after, "vllm:generation_tokens_total", **model) == value(
        after, "jaxctx_generation_tokens_total", **ENGINE
    )
