"""An engine's load and counters in the metrics: each field under its own name."""

from __future__ import annotations

from dataclasses import replace

from jaxctx_server.metrics.engines import EngineLoad, counter_families, load_families, usage_ratio
from tests.server.fake_engine import INFO, STATS
from tests.server.metrics.exposition import NUMBERED, value, values_of


def test_load_by_engine() -> None:
    other = replace(NUMBERED, running=70, draining=False)
    values = values_of(load_families([EngineLoad("a", INFO, NUMBERED), EngineLoad("b", INFO, other)]))
    assert value(values, "jaxctx_requests_running", engine_id="a") == NUMBERED.running
    assert value(values, "jaxctx_requests_running", engine_id="b") == 70
    assert value(values, "jaxctx_requests_waiting", engine_id="a") == NUMBERED.waiting
    for state, pages in (
        ("free", NUMBERED.pages_free),
        ("cached", NUMBERED.pages_cached),
        ("held", NUMBERED.pages_held),
    ):
        assert value(values, "jaxctx_kv_pages", engine_id="a", state=state) == pages
    assert value(values, "jaxctx_kv_pages_capacity", engine_id="a") == NUMBERED.pages_total
    assert value(values, "jaxctx_kv_pages_reserved", engine_id="a") == NUMBERED.pages_reserved
    assert value(values, "jaxctx_kv_page_tokens", engine_id="a") == INFO.page_size
    assert value(values, "jaxctx_tier_pages", engine_id="a", tier="host") == NUMBERED.host_pages_used
    assert value(values, "jaxctx_tier_pages", engine_id="a", tier="disk") == NUMBERED.disk_pages_used
    assert value(values, "jaxctx_tier_pages_capacity", engine_id="a", tier="host") == NUMBERED.host_pages_total
    assert value(values, "jaxctx_tier_pages_capacity", engine_id="a", tier="disk") == NUMBERED.disk_pages_total
    assert value(values, "jaxctx_contexts", engine_id="a") == NUMBERED.contexts
    assert value(values, "jaxctx_snapshots", engine_id="a") == NUMBERED.snapshots
    assert value(values, "jaxctx_publications", engine_id="a") == NUMBERED.publications
    assert [value(values, "jaxctx_engine_draining", engine_id=name) for name in "ab"] == [1, 0]


def test_cached_pages_count_as_free() -> None:
    stats = replace(STATS, pages_total=100, pages_held=25, pages_cached=60, pages_free=15)
    assert usage_ratio(stats) == 0.25
    assert usage_ratio(replace(stats, pages_total=0, pages_held=0)) == 0.0


def test_each_counter_has_its_own_field() -> None:
    values = values_of(counter_families("local", NUMBERED))
    assert {name: value for (name, _), value in values.items()} == {
        "jaxctx_prefix_cache_queried_tokens_total": NUMBERED.tokens_queried,
        "jaxctx_prefix_cache_hit_tokens_total": NUMBERED.tokens_cached,
        "jaxctx_restored_tokens_total": NUMBERED.tokens_restored,
        "jaxctx_prompt_tokens_total": NUMBERED.prompt_tokens,
        "jaxctx_generation_tokens_total": NUMBERED.tokens_generated,
        "jaxctx_computed_tokens_total": NUMBERED.tokens_computed,
        "jaxctx_draft_tokens_total": NUMBERED.tokens_drafted,
        "jaxctx_accepted_draft_tokens_total": NUMBERED.tokens_accepted,
        "jaxctx_model_draft_tokens_total": NUMBERED.tokens_drafted_by_model,
        "jaxctx_accepted_model_draft_tokens_total": NUMBERED.tokens_accepted_by_model,
        "jaxctx_steps_total": NUMBERED.steps,
        "jaxctx_step_seconds_total": NUMBERED.step_seconds,
        "jaxctx_requests_admitted_total": NUMBERED.requests_admitted,
        "jaxctx_queue_seconds_total": NUMBERED.queue_seconds,
        "jaxctx_preemptions_total": NUMBERED.preemptions,
        "jaxctx_suspensions_total": NUMBERED.suspensions,
        "jaxctx_expired_total": NUMBERED.expired,
        "jaxctx_compilations_total": NUMBERED.compilations_after_ready,
    }
    assert {labels for _, labels in values} == {(("engine_id", "local"),)}
