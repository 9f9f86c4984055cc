"""Engines: their properties and their load."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine runs."""

    model_id: str  # the model's name on this server
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str  # for example "llama" or "qwen3"
    parameters: int  # number of parameters
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    max_context_tokens: int  # the longest sequence in tokens
    page_size: int  # tokens per page of the KV cache
    pages_total: int  # pages in the pool
    dtype: str  # numerical type of activations, and of weights but those that have `weights_dtype`
    weights_dtype: str  # numerical type of the layers' matrices: `dtype`, "int8", "float8_e4m3fn" or "int4"
    kv_dtype: str  # numerical type of keys and values
    max_batch: int  # requests that one step can serve
    platform: str  # "cpu", "gpu" or "tpu"
    mesh: Mapping[str, int] = field(default_factory=dict)  # devices along each axis of the mesh, by the axis's name
    default_max_tokens: int  # `max_tokens` of a GenerateRequest that sets none
    adapter_slots: int = 0  # adapters that may be loaded at once
    adapter_rank: int = 0  # the largest rank that they may have


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A LoRA adapter that an engine holds."""

    name: str  # what it is called
    revision: str  # digest of its content: equal ones compute equal KV, whatever they are called
    rank: int  # the largest of its matrices'
    parameters: int  # numbers in all of its matrices
    contexts: int  # contexts that use it, those that snapshots hold included
    unloaded: bool = False  # whether the name is free again: only contexts that had it before use it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load and memory of one engine at one moment.

    Every page is free, cached or held: `pages_free + pages_cached + pages_held == pages_total`. Fields marked "in
    total" are counters that only grow while the engine runs.
    """

    pages_total: int  # pages in the pool
    pages_free: int  # pages without content
    pages_cached: int  # pages that no context holds, kept for later fills until memory is needed
    pages_held: int  # pages that contexts hold
    pages_reserved: int  # pages promised to running requests and not taken yet
    contexts: int  # open contexts
    running: int  # requests in the batch
    waiting: int  # requests waiting for a place in the batch
    draining: bool  # whether the engine refuses new work
    steps: int  # steps run, in total
    tokens_computed: int  # tokens computed, of prompts and outputs, in total
    tokens_cached: int  # prompt tokens found in the cache, in total
    tokens_generated: int  # tokens generated, in total
    preemptions: int  # requests put back into the queue under memory pressure, in total
    suspensions: int  # contexts suspended under memory pressure, in total
    compilations_after_ready: int  # compilations that requests waited for, in total; more than 0 is a defect
    functions_compiling: int  # steps still to be compiled after a start; until then batches are padded to larger ones
    tokens_restored: int  # tokens restored from other tiers, in total
    host_pages_total: int  # pages that fit into the host's memory
    host_pages_used: int  # of these, in use
    disk_pages_total: int  # pages that the host's disk may take
    disk_pages_used: int  # of these, in use
    snapshots: int  # stored versions of snapshots
    publications: int  # published prefixes
    expired: int  # contexts, snapshots and publications that expired, in total
    tokens_drafted: int  # draft tokens proposed, in total
    tokens_accepted: int  # draft tokens accepted, in total
    tokens_queried: int  # prompt tokens looked for in the cache when a request began to run, in total
    prompt_tokens: int  # tokens that fills and forwards appended to contexts, in total
    requests_admitted: int  # requests that began to run, each counted once, in total
    queue_seconds: float  # time that these waited before, in total
    step_seconds: float  # time that steps took, in total
    adapters: int = 0  # slots for LoRA adapters that are taken
    tokens_drafted_by_model: int = 0  # of the draft tokens proposed, those of a draft model, in total
    tokens_accepted_by_model: int = 0  # of these, accepted ones, in total


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What computes attention of an engine, and why."""

    implementation: str  # "reference", which is plain JAX, or a kernel: "gpu", "mma" or "tpu"
    reason: str  # "checked", "platform", "differs", …, as the metric `jaxctx_attention_info` has them
    why_no_kernel: str = ""  # where a kernel would be faster: a clause that says why there is none
    compared: str = ""  # a clause about the comparison with the reference; empty: there was none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine: its properties and its load."""

    info: EngineInfo  # its properties
    stats: EngineStats  # its load
    address: str = ""  # the address of an engine behind a router. Empty: the engine is in the answering process
    # Behind a router: the number of this engine's registration among all registrations, from 1. 0: the engine is in
    # the answering process.
    epoch: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)  # loaded adapters by name: the digests of their content
    attention: Attention | None = None  # what computes its attention; None: an older server, which does not say
