"""Every metric that a server may expose: name, type, labels and meaning. docs/metrics.md has the same table.

Names follow Prometheus: base units (seconds, bytes), `_total` for counters.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Kind(enum.Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def counter(self) -> CounterMetricFamily:
        """A family of this counter, without values."""
        return CounterMetricFamily(self.name, self.help, labels=self.labels)

    def gauge(self) -> GaugeMetricFamily:
        """A family of this gauge, without values."""
        return GaugeMetricFamily(self.name, self.help, labels=self.labels)

    def histogram(self) -> HistogramMetricFamily:
        """A family of this histogram, without values."""
        return HistogramMetricFamily(self.name, self.help, labels=self.labels)


ENGINE = ("engine_id",)
MODEL = ("model_name",)

# The server.
BUILD_INFO = Metric(
    "jaxctx_build_info",
    Kind.GAUGE,
    ("version", "role", "model_name", "dtype", "weights_dtype", "kv_dtype", "platform"),
    "Always 1; the labels say what runs. Empty ones are not known while the server loads, and on a router.",
)
SERVER_STATE = Metric("jaxctx_server_state", Kind.GAUGE, ("state",), "1 for the state that the server is in, else 0.")

# Calls.
CALLS = Metric(
    "jaxctx_calls_total",
    Kind.COUNTER,
    ("method", "transport", "code"),
    "Calls that have ended, by the method of the contract that they are or stand for, and their status code.",
)
CALL_DURATION = Metric(
    "jaxctx_call_duration_seconds",
    Kind.HISTOGRAM,
    ("method", "transport"),
    "Time from a call's arrival to its end, streams included.",
)
CALLS_IN_PROGRESS = Metric("jaxctx_calls_in_progress", Kind.GAUGE, ("transport",), "Calls that have not ended.")
CALL_ERRORS = Metric(
    "jaxctx_call_errors_total",
    Kind.COUNTER,
    ("reason",),
    "Calls that ended with an error or were refused, by the reason (ErrorReason).",
)

# Generations, in the calls of clients.
TIME_TO_FIRST_TOKEN = Metric(
    "jaxctx_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    (),
    "Time from a call's arrival to the first token of each of its outputs.",
)
INTER_TOKEN_LATENCY = Metric(
    "jaxctx_inter_token_latency_seconds",
    Kind.HISTOGRAM,
    (),
    "Time between two tokens of an output. Tokens that come together share the time since the one before.",
)
E2E_LATENCY = Metric(
    "jaxctx_e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    (),
    "Time from a call's arrival to the end of each of its outputs.",
)
OUTPUTS = Metric(
    "jaxctx_outputs_total",
    Kind.COUNTER,
    ("finish_reason",),
    "Outputs that have ended: by themselves, by an error, or because the caller left (cancelled).",
)

# Engines: load, on every server.
RUNNING = Metric("jaxctx_requests_running", Kind.GAUGE, ENGINE, "Requests in the batch.")
WAITING = Metric("jaxctx_requests_waiting", Kind.GAUGE, ENGINE, "Requests that wait for a place in the batch.")
KV_PAGES = Metric("jaxctx_kv_pages", Kind.GAUGE, (*ENGINE, "state"), "KV pages on the device: free, cached or held.")
KV_PAGES_CAPACITY = Metric("jaxctx_kv_pages_capacity", Kind.GAUGE, ENGINE, "All KV pages on the device.")
KV_PAGES_RESERVED = Metric(
    "jaxctx_kv_pages_reserved", Kind.GAUGE, ENGINE, "KV pages promised to running requests and not taken yet."
)
KV_PAGE_TOKENS = Metric("jaxctx_kv_page_tokens", Kind.GAUGE, ENGINE, "Tokens of one KV page.")
KV_USAGE = Metric("jaxctx_kv_usage_ratio", Kind.GAUGE, ENGINE, "Held KV pages as a share of all: 0 to 1.")
TIER_PAGES = Metric("jaxctx_tier_pages", Kind.GAUGE, (*ENGINE, "tier"), "KV pages in host memory and on disk.")
TIER_PAGES_CAPACITY = Metric(
    "jaxctx_tier_pages_capacity", Kind.GAUGE, (*ENGINE, "tier"), "KV pages that fit into host memory and on disk."
)
CONTEXTS = Metric("jaxctx_contexts", Kind.GAUGE, ENGINE, "Open contexts.")
SNAPSHOTS = Metric("jaxctx_snapshots", Kind.GAUGE, ENGINE, "Stored versions of snapshots.")
PUBLICATIONS = Metric("jaxctx_publications", Kind.GAUGE, ENGINE, "Published prefixes.")
DRAINING = Metric("jaxctx_engine_draining", Kind.GAUGE, ENGINE, "1 while the engine refuses new work, else 0.")
COMPILING = Metric(
    "jaxctx_functions_compiling", Kind.GAUGE, ENGINE, "Steps still to be compiled; larger ones serve until then."
)
ADAPTERS = Metric("jaxctx_adapters", Kind.GAUGE, ENGINE, "Slots for LoRA adapters that are taken.")
ADAPTER_SLOTS = Metric("jaxctx_adapter_slots", Kind.GAUGE, ENGINE, "Slots for LoRA adapters.")
ATTENTION = Metric(
    "jaxctx_attention_info",
    Kind.GAUGE,
    (*ENGINE, "implementation", "reason"),
    "Always 1; what computes attention, a kernel (gpu, tpu, …) or the reference, which is plain JAX, and why.",
)

# The engine of this process: counters.
PREFIX_QUERIED = Metric(
    "jaxctx_prefix_cache_queried_tokens_total",
    Kind.COUNTER,
    ENGINE,
    "Prompt tokens without KV that were looked for in the cache when a request began to run.",
)
PREFIX_HIT = Metric(
    "jaxctx_prefix_cache_hit_tokens_total", Kind.COUNTER, ENGINE, "Of these, tokens that were found on the device."
)
RESTORED_TOKENS = Metric(
    "jaxctx_restored_tokens_total", Kind.COUNTER, ENGINE, "Tokens whose KV came back from host memory, disk or a store."
)
PROMPT_TOKENS = Metric(
    "jaxctx_prompt_tokens_total", Kind.COUNTER, ENGINE, "Tokens that fills and forwards appended to contexts."
)
GENERATION_TOKENS = Metric("jaxctx_generation_tokens_total", Kind.COUNTER, ENGINE, "Tokens generated.")
COMPUTED_TOKENS = Metric(
    "jaxctx_computed_tokens_total", Kind.COUNTER, ENGINE, "Tokens computed, of prompts and outputs."
)
DRAFT_TOKENS = Metric("jaxctx_draft_tokens_total", Kind.COUNTER, ENGINE, "Tokens that were guessed ahead.")
ACCEPTED_DRAFTS = Metric(
    "jaxctx_accepted_draft_tokens_total", Kind.COUNTER, ENGINE, "Of these, tokens that were right."
)
MODEL_DRAFTS = Metric(
    "jaxctx_model_draft_tokens_total", Kind.COUNTER, ENGINE, "Of the tokens guessed ahead, those of the draft model."
)
ACCEPTED_MODEL_DRAFTS = Metric(
    "jaxctx_accepted_model_draft_tokens_total", Kind.COUNTER, ENGINE, "Of these, tokens that were right."
)
STEPS = Metric("jaxctx_steps_total", Kind.COUNTER, ENGINE, "Steps sent to the device.")
STEP_SECONDS = Metric("jaxctx_step_seconds_total", Kind.COUNTER, ENGINE, "Time that steps took.")
ADMITTED = Metric(
    "jaxctx_requests_admitted_total", Kind.COUNTER, ENGINE, "Requests that began to run, each counted once."
)
QUEUE_SECONDS = Metric(
    "jaxctx_queue_seconds_total", Kind.COUNTER, ENGINE, "Time that these requests waited before they began to run."
)
PREEMPTIONS = Metric(
    "jaxctx_preemptions_total", Kind.COUNTER, ENGINE, "Requests put back into the queue for want of pages or places."
)
SUSPENSIONS = Metric("jaxctx_suspensions_total", Kind.COUNTER, ENGINE, "Contexts that gave up their pages for others.")
EXPIRED = Metric("jaxctx_expired_total", Kind.COUNTER, ENGINE, "Contexts, snapshots and publications that expired.")
COMPILATIONS = Metric(
    "jaxctx_compilations_total", Kind.COUNTER, ENGINE, "Compilations that requests waited for: 0 in a sound server."
)

# A router.
ENGINES = Metric("jaxctx_engines", Kind.GAUGE, (), "Engines that answer now. Routers only.")
ENGINES_LOST = Metric(
    "jaxctx_engines_lost_total",
    Kind.COUNTER,
    (),
    "Registrations of engines that ended: the engine left, or did not answer. Routers only.",
)

# Names of vLLM, for balancers that know them.
VLLM_RUNNING = Metric("vllm:num_requests_running", Kind.GAUGE, MODEL, "As jaxctx_requests_running.")
VLLM_WAITING = Metric("vllm:num_requests_waiting", Kind.GAUGE, MODEL, "As jaxctx_requests_waiting.")
VLLM_KV_USAGE = Metric("vllm:kv_cache_usage_perc", Kind.GAUGE, MODEL, "As jaxctx_kv_usage_ratio: 0 to 1.")
VLLM_GPU_CACHE_USAGE = Metric("vllm:gpu_cache_usage_perc", Kind.GAUGE, MODEL, "The former name of the same.")
VLLM_PREFIX_QUERIES = Metric(
    "vllm:prefix_cache_queries_total", Kind.COUNTER, MODEL, "As jaxctx_prefix_cache_queried_tokens_total."
)
VLLM_PREFIX_HITS = Metric(
    "vllm:prefix_cache_hits_total", Kind.COUNTER, MODEL, "As jaxctx_prefix_cache_hit_tokens_total."
)
VLLM_PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", Kind.COUNTER, MODEL, "As jaxctx_prompt_tokens_total.")
VLLM_GENERATION_TOKENS = Metric(
    "vllm:generation_tokens_total", Kind.COUNTER, MODEL, "As jaxctx_generation_tokens_total."
)
VLLM_PREEMPTIONS = Metric("vllm:num_preemptions_total", Kind.COUNTER, MODEL, "As jaxctx_preemptions_total.")
VLLM_SUCCESS = Metric(
    "vllm:request_success_total",
    Kind.COUNTER,
    (*MODEL, "finished_reason"),
    "As jaxctx_outputs_total, where cancelled is abort.",
)
VLLM_TTFT = Metric("vllm:time_to_first_token_seconds", Kind.HISTOGRAM, MODEL, "As jaxctx_time_to_first_token_seconds.")
VLLM_ITL = Metric("vllm:inter_token_latency_seconds", Kind.HISTOGRAM, MODEL, "As jaxctx_inter_token_latency_seconds.")
VLLM_TPOT = Metric("vllm:time_per_output_token_seconds", Kind.HISTOGRAM, MODEL, "The former name of the same.")
VLLM_E2E = Metric("vllm:e2e_request_latency_seconds", Kind.HISTOGRAM, MODEL, "As jaxctx_e2e_request_latency_seconds.")
VLLM_CACHE_CONFIG = Metric(
    "vllm:cache_config_info", Kind.GAUGE, ("block_size", "num_gpu_blocks"), "Always 1; tokens of a page, and all pages."
)

SERVER_METRICS = (
    BUILD_INFO,
    SERVER_STATE,
    CALLS,
    CALL_DURATION,
    CALLS_IN_PROGRESS,
    CALL_ERRORS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_LATENCY,
    OUTPUTS,
)
LOAD_METRICS = (
    RUNNING,
    WAITING,
    KV_PAGES,
    KV_PAGES_CAPACITY,
    KV_PAGES_RESERVED,
    KV_PAGE_TOKENS,
    KV_USAGE,
    TIER_PAGES,
    TIER_PAGES_CAPACITY,
    CONTEXTS,
    SNAPSHOTS,
    PUBLICATIONS,
    DRAINING,
    COMPILING,
    ADAPTERS,
    ADAPTER_SLOTS,
    ATTENTION,
)
ENGINE_COUNTERS = (
    PREFIX_QUERIED,
    PREFIX_HIT,
    RESTORED_TOKENS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    COMPUTED_TOKENS,
    DRAFT_TOKENS,
    ACCEPTED_DRAFTS,
    MODEL_DRAFTS,
    ACCEPTED_MODEL_DRAFTS,
    STEPS,
    STEP_SECONDS,
    ADMITTED,
    QUEUE_SECONDS,
    PREEMPTIONS,
    SUSPENSIONS,
    EXPIRED,
    COMPILATIONS,
)
ROUTER_METRICS = (ENGINES, ENGINES_LOST)
VLLM_METRICS = (
    VLLM_RUNNING,
    VLLM_WAITING,
    VLLM_KV_USAGE,
    VLLM_GPU_CACHE_USAGE,
    VLLM_PREFIX_QUERIES,
    VLLM_PREFIX_HITS,
    VLLM_PROMPT_TOKENS,
    VLLM_GENERATION_TOKENS,
    VLLM_PREEMPTIONS,
    VLLM_SUCCESS,
    VLLM_TTFT,
    VLLM_ITL,
    VLLM_TPOT,
    VLLM_E2E,
    VLLM_CACHE_CONFIG,
)


def by_name(metrics: Iterable[Metric]) -> Mapping[str, Metric]:
    """The metrics by their names."""
    return {metric.name: metric for metric in metrics}


METRICS = by_name((*SERVER_METRICS, *LOAD_METRICS, *ENGINE_COUNTERS, *ROUTER_METRICS, *VLLM_METRICS))
