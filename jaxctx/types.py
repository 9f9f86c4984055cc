"""Requests and results of the API: one frozen dataclass or enum for each message of protos/jaxctx/v1.

An engine takes the requests and returns the results, which reach the client unchanged. Field names, units and defaults
are those of the messages: `jaxctx.convert` converts between the two, and tests/jaxctx/test_types.py compares them.

Times are UTC datetimes and durations are in seconds. Log probabilities are natural logarithms, of the model's own
distribution. Ids, ranges and sizes are checked by the server; the classes take any value of the right type.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime


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
class AdapterSpan:
    """The adapter of a context's tokens from `start` on, until the next span begins."""

    start: int  # index of its first token
    adapter: str  # what the adapter was called when it was chosen. Empty: none
    adapter_revision: str  # digest of the adapter's content. Empty: none


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


class ContextState(enum.Enum):
    """Whether a context can take an operation now."""

    IDLE = "idle"  # ready for the next operation
    BUSY = "busy"  # a writer (Fill, Generate, ...) holds it; a second one gets ABORTED
    SUSPENDED = "suspended"  # its pages were evicted under memory pressure; the next operation restores them


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """When an object expires. It can be read until then, and neither later nor deleted earlier."""

    at: datetime  # the time of expiry, as of now
    seconds: float  # the time to live that was requested
    sliding: bool  # whether every use starts the time to live again


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A context and its counters.

    `seq_len == committed_pages * page_size + working_tokens`; buffered tokens are not part of `seq_len`.

    A context exists until it is closed, expires or the server ends, whatever happens to the connection that made it.
    Readers always succeed; writers are serialised, and a second concurrent writer gets ABORTED.

    A router moves the contexts of an engine that leaves to another engine, with their labels, time to live, priority
    and pin. It does so by a snapshot that is deleted afterwards. Hence a moved context has a new `created_at`, a
    `snapshot`, no `parent_id`, a `version` that starts again, and no reserved pages.
    """

    context_id: str  # unique within the tenant
    parent_id: str | None = None  # the context that it was forked from, perhaps closed by now. None: not forked
    model_id: str  # the model that computed it
    state: ContextState  # whether it can take an operation now
    seq_len: int  # tokens whose KV is computed
    committed_pages: int  # full, immutable pages, shared with every context that has the same prefix
    working_pages: int  # pages that are not committed, including reserved ones without tokens
    working_tokens: int  # tokens in working pages
    buffered_tokens: int  # tokens known but not computed yet: deferred fills and the last sampled token
    page_size: int  # tokens per page
    priority: int  # higher runs first. -100 to 100
    pinned: bool  # never evicted under memory pressure
    salt: str  # contexts of different salts never share pages
    created_at: datetime  # when it was created or forked
    used_at: datetime  # when an operation last used it
    # The caller's notes. A context that the server made for a program has the label `jaxctx` = `program`.
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned_until: datetime | None = None  # when the pin ends. None: never, or it is not pinned
    expiry: Expiry | None = None  # when it expires. None: never
    version: int  # increases with every change of its tokens, pages or settings
    forked_at: int  # tokens of the parent, buffered ones included, at the time of the fork
    snapshot: str = ""  # the snapshot that it was opened from: "NAME@VERSION". Empty: none
    # The engine that holds it, as in GraphTask.engine_id: behind a router the engine's address, else "local". It
    # changes when the router moves the context. Empty: unknown.
    engine_id: str = ""
    adapter: str = ""  # what the adapter of its next tokens was called when it was chosen. Empty: it has none
    adapter_revision: str = ""  # digest of that adapter's content: equal ones compute equal KV. Empty: it has none
    # Which adapter computes which of its tokens, if it has switched adapters: ascending, the first from 0, the last one
    # is `adapter`. Empty: `adapter` computes all.
    adapter_spans: Sequence[AdapterSpan] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """Where the KV of a call's tokens came from.

    `resident + restored + computed` tokens were made ready. With `defer` there are none.
    """

    resident: int  # tokens found in pages on the device
    restored: int  # tokens restored from another tier
    computed: int  # tokens computed
    context: ContextInfo  # the context afterwards

    @property
    def cached(self) -> int:
        """Tokens whose KV need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log probability of one token in the model's distribution, before temperature and filters."""

    token_id: int  # the token
    logprob: float  # its log probability
    top: Sequence[tuple[int, float]] = ()  # the `top_logprobs` most likely tokens here, best first: id, log probability


class FinishReason(enum.Enum):
    """Why an output ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # `max_tokens`, or the longest sequence of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one output cost, in tokens."""

    prompt_tokens: int  # tokens in the context before generation
    cached_tokens: int  # of these, tokens whose KV this call did not compute
    computed_tokens: int  # of the prompt tokens, those whose KV this call computed
    completion_tokens: int  # tokens generated
    restored_tokens: int  # of `cached_tokens`, those that this call restored from other tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePiece:
    """A part of one output.

    The last part of each output, and only that one, has `finish`, `seed` and `context`. It has `usage` too, and so has
    the first part, as far as it is known by then: that of the prompt.

    The texts of all parts with one index are the output's text; none ends inside a UTF-8 character. The token ids are
    those that were appended to the context. Parts of several outputs interleave. A slow reader gets fewer and larger
    parts.
    """

    index: int  # the number of the output, 0 to n - 1
    context_id: str  # the context that holds this output
    text: str = ""  # new text; may be empty while a character or a possible stop string is incomplete
    token_ids: Sequence[int] = ()  # new tokens
    logprobs: Sequence[TokenLogprob] = ()  # one for each of `token_ids`, if requested
    finish: FinishReason | None = None  # why the output ended. None before the last part
    stop_match: str | int | None = None  # the stop string, or the stop or end-of-sequence token, that ended it
    seed: int | None = None  # the seed that repeats this output
    usage: Usage | None = None  # what the output has cost so far. Only in the first and the last part
    context: ContextInfo | None = None  # the context that holds this output, afterwards. None before the last part

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputResult:
    """The result of one ForwardOutputParams, from the model's distribution before temperature and filters."""

    index: int  # as in the ForwardOutputParams
    token_id: int | None = None  # the sampled token, which is not appended to the context. None: not requested
    seed: int | None = None  # the seed that repeats the sample
    logprobs: Sequence[float] = ()  # one for each of `logprob_ids`, in their order
    top: Sequence[tuple[int, float]] = ()  # the most likely tokens, best first: id, log probability
    # Unnormalised log probabilities of all token ids, float32, little-endian: numpy.frombuffer(logits, "<f4").
    # Empty: not requested.
    logits: bytes = b""
    entropy: float | None = None  # in nats. None: not requested


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The results of one forward pass."""

    outputs: Sequence[ForwardOutputResult] = ()  # in the order of the request's `outputs`
    context: ContextInfo  # the context afterwards


class Tier(enum.Enum):
    """Where a page of a context is stored."""

    DEVICE = "device"  # in the engine's pool, ready for computation
    HOST = "host"  # in the host's memory
    DISK = "disk"  # on the host's disk
    LINEAGE = "lineage"  # nowhere: only its tokens are known, from which it is computed again when needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """The physical pages of a context, committed ones first, then working ones."""

    # The pages, by numbers of the caller's own: equal numbers are one physical page. They count from 1 in the order in
    # which the engine first reported them to this caller, so that they reveal nothing about other callers. Empty for a
    # suspended context.
    page_ids: Sequence[int] = ()
    # How many contexts and snapshots of the caller hold each of these pages, this context included.
    refcounts: Sequence[int] = ()
    tiers: Sequence[Tier] = ()  # where each page is, also of a suspended context; a partial page counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Token ids, used as they are, without a tokenizer."""

    ids: Sequence[int] = ()  # 0 to vocab_size - 1 each. In a request, 1 to max_context_tokens of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GetContextResult:
    """One context, with the details that were requested."""

    context: ContextInfo  # its counters
    pages: ContextPages | None = None  # its pages. None: not requested
    tokens: TokenIds | None = None  # all of its tokens, buffered ones at the end. None: not requested
    # The contexts that it descends from, its parent first, closed ones too, up to 100: id, and tokens at the fork.
    # Empty: not requested, or no parent.
    ancestors: Sequence[tuple[str, int]] = ()


class ContextChange(enum.Enum):
    """What happened to a context that is watched."""

    EXISTS = "exists"  # it existed when the watch began, or exists after a RESET
    CREATED = "created"  # it was created
    FORKED = "forked"  # it was forked from another one
    OPENED = "opened"  # it was opened from a snapshot
    CHANGED = "changed"  # its tokens, pages or settings changed
    SUSPENDED = "suspended"  # its pages were evicted under memory pressure
    CLOSED = "closed"  # it was closed
    EXPIRED = "expired"  # it expired
    # Changes were lost because the caller read slowly, or because a router gained or lost an engine. Forget all
    # contexts: an EXISTS follows for each one that there is.
    RESET = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEvent:
    """One change of a context. Several changes that wait to be read may be merged into one."""

    change: ContextChange  # what happened
    at: datetime  # when it happened
    context_id: str = ""  # the context. Empty for RESET
    context: ContextInfo | None = None  # the context afterwards. None if it is closed or expired, and for RESET


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How much two contexts, a and b, have in common."""

    common_tokens: int  # length of the common prefix in tokens, buffered ones included
    shared_pages: int  # physical pages that both hold
    length_a: int  # tokens of a, buffered ones included
    length_b: int  # tokens of b, buffered ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a Fill would find in the cache and need. An estimate: other requests fill and evict meanwhile."""

    tokens: int  # tokens to make ready, including what is buffered in the context
    resident: int  # of these, found in pages on the device
    restored: int  # of these, in another tier: `host + disk`
    computed: int  # of these, tokens to compute
    pages_needed: int  # pages to allocate
    # Pages that the caller could use: all but those that its own pins and running calls hold. What other tenants hold
    # is not revealed.
    pages_available: int
    host: int  # of `restored`, tokens in the host's memory
    disk: int  # of `restored`, tokens on the host's disk

    @property
    def cached(self) -> int:
        """Tokens whose KV need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as it is served."""

    model_id: str  # its name on this server
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str  # for example "llama" or "qwen3"
    parameters: int  # number of parameters
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    max_context_tokens: int  # the longest sequence, prompt and output together, in tokens
    page_size: int  # tokens per KV page
    dtype: str  # numerical type of activations, and of weights but those that have `weights_dtype`
    weights_dtype: str  # numerical type of the layers' matrices: `dtype`, "int8", "float8_e4m3fn" or "int4"
    kv_dtype: str  # numerical type of keys and values
    default_max_tokens: int  # `max_tokens` of a GenerateRequest that sets none
    tool_call_format: str = ""  # how it writes calls of tools, for example "hermes"; empty: not known
    reasoning_format: str = ""  # how it writes its thoughts, for example "think"; empty: not at all
    # Marks of these two formats that are special tokens, with their ids.
    special_markers: Mapping[str, int] = field(default_factory=dict)
    parent_model_id: str = ""  # of an adapter: the model that it changes. Empty: it is a model itself
    adapter_revision: str = ""  # of an adapter: digest of its content; `model_revision` is its model's


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Chat messages as the model reads them, made by its chat template."""

    text: str  # the text
    tokens: Sequence[int] = ()  # its token ids: what Fill appends to an empty context

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session: a namespace of variables and calls of one tenant."""

    session_id: str  # unique within the tenant
    ttl_s: float  # seconds after its last use until it is deleted; a running task counts as use
    variables: int  # number of variables
    calls: int  # number of calls, ended ones included
    started: int  # number of tasks in the phase STARTED


class VariableState(enum.Enum):
    """Whether a variable has its text."""

    UNSET = "unset"  # it has no text yet
    SET = "set"  # it has its text, which never changes
    FAILED = "failed"  # it will never have a text


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableInfo:
    """A semantic variable: a text that is set once."""

    variable_id: str  # unique within the session
    name: str  # the name that the client gave it; of an output, the name of its place
    description: str = ""  # the client's note. Empty: none
    state: VariableState  # whether it is set
    text: str  # its text; while an engine generates it, the part so far
    error_reason: str = ""  # why it failed: a value of ErrorReason without its prefix. Empty: it did not
    error_message: str = ""  # why it failed, for people. Empty: it did not

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallResult:
    """A call that was submitted."""

    call_id: str  # its id, for CancelCall
    outputs: Sequence[VariableInfo] = ()  # its outputs, in their order in the template


class TaskPhase(enum.Enum):
    """How far a task is."""

    IDLE = "idle"  # nobody has asked for its output
    WAITING = "waiting"  # somebody has, and it waits for its inputs
    STARTED = "started"  # it has its inputs, and waits for an engine (a native step: for its turn) or runs
    DONE = "done"  # it has set its output
    FAILED = "failed"  # it, or an input, failed


class Criterion(enum.IntEnum):
    """What the client that asks for a variable wants optimised; each is stronger than those before it.

    It applies to everything that the variable needs. Several tasks whose outputs are inputs of one task are a group:
    only the end of the last of them counts.
    """

    THROUGHPUT = 1  # many texts per second, whatever each one takes
    TIME_PER_OUTPUT_TOKEN = 2  # a short time between tokens
    TIME_TO_FIRST_TOKEN = 3  # a short time to the first token
    LATENCY = 4  # a short time to the whole text


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTask:
    """A task, which sets one variable: the part of a call up to an output, or a native step."""

    call_id: str  # its call
    phase: TaskPhase  # how far it is
    criterion: Criterion | None = None  # the criterion with which its output was asked for. None: not asked for yet
    inputs: Sequence[str] = ()  # ids of the variables that it needs
    output: str  # id of the variable that it sets
    engine_id: str = ""  # the engine that it was dispatched to. Empty: not yet
    why: str = ""  # why this engine was chosen, for people. Empty: not dispatched yet
    function: str = ""  # the function of a native step. Empty: it is not a native step
    # The context on `engine_id` that holds its prompt and its output so far. It may be read and forked; any other
    # operation on it spoils the call. Forks belong to the caller. All tasks of a call continue one context. It is
    # closed as soon as no task of the call is asked for and unfinished, at the latest with the session; ask for a later
    # output of the call to keep it. Empty: there is none yet or any more, or it is on another engine by now.
    context_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a snapshot: an immutable copy of a context's state in the caller's namespace."""

    name: str  # 1..100 bytes without control characters
    version: int  # 1, 2, ...; a name that was deleted starts again at 1
    latest: bool  # whether no later version of the name exists
    durable: bool  # whether it survives the server's end and a loss of power
    tokens: int  # tokens, buffered ones included
    seq_len: int  # of these, tokens with KV
    pages: int  # pages of KV
    size_bytes: int  # bytes of its pages. Pages that several snapshots share are stored once but counted in each
    model_revision: str  # the model revision that computed it
    salt: str  # the salt of the context, which contexts opened from it inherit
    manual_commit: bool  # whether full pages of contexts opened from it commit only by CommitPages
    created_at: datetime  # when it was saved
    expiry: Expiry | None = None  # when it expires. None: never
    context_id: str  # the context that was saved, perhaps closed by now
    parent_version: int = 0  # the version that it replaced as the latest. 0: none
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes
    attachment_bytes: int = 0  # bytes of its attachment. 0: it has none
    adapter: str = ""  # what the adapter of the context's next tokens was called. Empty: it had none
    adapter_revision: str = ""  # digest of that adapter's content
    adapter_spans: Sequence[AdapterSpan] = ()  # which adapter computed which tokens. Empty: `adapter` computed all


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSnapshotResult:
    """One version of a snapshot, with what was requested of it."""

    snapshot: Snapshot  # the version
    attachment: bytes = b""  # its attachment, if that was requested; empty if it has none
    tokens: TokenIds | None = None  # its tokens, buffered ones included. None: they were not requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants share, if they have the same model and salt.

    Only its owner can list and end it.
    """

    publication_id: str  # 128 random bits
    tokens: int  # tokens of it; whole pages only
    pages: int  # pages of it
    salt: str  # contexts of this salt share it
    created_at: datetime  # when it was published
    expiry: Expiry | None = None  # when it expires. None: never
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes; no other tenant sees them


@dataclass(frozen=True, slots=True)
class Ttl:
    """The time to live of an object, from now on."""

    seconds: float | None = None  # above 0, up to 10 years. None: for ever
    sliding: bool = False  # whether every use starts it again


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContextRequest:
    """A request for a new, empty context."""

    # Chosen by the client so that a retry is safe (a second request of the same id gives ALREADY_EXISTS): 1..64
    # characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. None: 128 random bits from the server.
    context_id: str | None = None
    salt: str = ""  # contexts of different salts never share pages. Up to 256 bytes
    adapter: str = ""  # the LoRA adapter to compute with. Empty: none, unless the model that is asked for is one
    priority: int = 0  # higher runs first. -100 to 100
    manual_commit: bool = False  # full pages commit only by CommitPages
    # Never evicted under memory pressure. More than the caller may pin gives RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool = False
    # The caller's notes: up to 32; keys of 1..64 bytes, values of up to 256.
    labels: Mapping[str, str] = field(default_factory=dict)
    ttl: Ttl = Ttl()  # the time to live; without seconds: for ever
    # Seconds to stay pinned; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContextRequest:
    """A request to change a context's settings. What is None stays as it is."""

    priority: int | None = None  # higher runs first. -100 to 100
    # Never evicted under memory pressure. More than the caller may pin gives RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None = None
    labels: Mapping[str, str] | None = None  # all labels from now on
    ttl: Ttl | None = None  # the time to live from now on; without seconds: for ever
    # Seconds to stay pinned from now on; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is sampled. The defaults sample from the model's own distribution.

    Applied in this order: logit_bias, min_tokens, penalties (repetition, then frequency and presence), temperature,
    top_k, top_p, min_p. Numbers must be finite.

    Before all of these, `allowed_token_ids`, `bad_words` and an `output_format` leave only the tokens that all of them
    allow. If the first two leave none at all, the request is refused (INVALID_ARGUMENT); an output at a place where
    nothing is left ends with FAILED_PRECONDITION. Before `min_tokens`, tokens that would end an output are sampled only
    where nothing else is left, and then it goes on.
    """

    temperature: float = 1.0  # 0 to 100; 0 is greedy
    top_k: int = 0  # only the k most likely tokens; 0 to vocab_size. 0: off
    # Only the smallest set of most likely tokens with at least this probability together; above 0, up to 1. 1: off.
    top_p: float = 1.0
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one; 0 to 1. 0: off
    # Divides the logits of tokens in prompt and output (multiplies them if negative); above 0, up to 10. 1: off.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the output; -2..2. 0: off
    # Subtracted from a logit once per occurrence of its token in the output; -2..2. 0: off.
    frequency_penalty: float = 0.0
    # Added to logits, by token id; -100 to 100 each, at most 300 entries.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # 0 to 2^63 - 1. Equal seeds give equal outputs in any batch. None: the server chooses one and reports it. With
    # several outputs the first has this seed, and each other one a hash of the seed and its index, so that neighbouring
    # seeds have none in common. Each output equals a single output of the seed that is reported for it.
    seed: int | None = None
    # Only these tokens are sampled; up to 1024. Empty: any. An end-of-sequence token is sampled only if it is one of
    # them, or if the output has an `output_format`, which says where it ends.
    allowed_token_ids: Sequence[int] = ()
    # Texts that are kept out of the output; up to 64 of 1 to 256 bytes. Each is tokenized by itself and with a space
    # before it; the last token of what comes out is not sampled where the output ends with those before it. The same
    # text in other tokens may still come.
    bad_words: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """What an output's text may look like: exactly one field is set.

    Tokens with which the text could not go on to match are never sampled. An end-of-sequence token ends the output
    where the text may end; it is the only possible token where nothing can follow. Before `min_tokens`, and with
    `ignore_eos`, it is sampled only there, and then it does end the output. An output that ends earlier, by
    `max_tokens`, `stop` or `stop_token_ids`, is the beginning of a text that matches.

    INVALID_ARGUMENT if it cannot be read, is not supported, matches no text, or takes too long or too much memory to
    prepare. FAILED_PRECONDITION (NO_OUTPUT_FORMAT) if the model's tokenizer does not allow this. RESOURCE_EXHAUSTED
    (GRAMMAR_LIMIT) in the middle of an output if it takes too much to follow.
    """

    json_object: bool | None = None  # a JSON object, whatever is in it; always True
    # A JSON text that is valid by this JSON schema, itself a JSON text of up to 64 KiB. Unsupported keywords are
    # refused. Properties come in the order of the schema.
    json_schema: str | None = None
    regex: str | None = None  # a text that matches as a whole; Rust's syntax, up to 8 KiB
    # A text of this Lark grammar in the dialect of llguidance, up to 64 KiB. `start` is the first rule; `%json {...}`
    # stands for a JSON schema, `<|name|>` for a special token.
    grammar: str | None = None
    # One of these texts: 1 to 1024, each different and of 1 to 4096 bytes; up to 64 KiB in all.
    choices: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to continue a context.

    Generated tokens are appended to it; the last one stays buffered until the next operation computes it. With n > 1
    the context is flushed and forked n times, and each fork is continued instead.
    """

    context_id: str  # the context, with at least one token
    # At most this many tokens for each output; 1 to max_context_tokens. None: the model's `default_max_tokens`. An
    # output ends earlier where the context is as long as the model's longest sequence.
    max_tokens: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop token before this many tokens; 0..max_tokens
    n: int = 1  # number of outputs; 1 to 128, and at most the server's --queue-limit
    sampling: SamplingParams = SamplingParams()  # how tokens are sampled
    logprobs: bool = False  # return the log probability of every token
    top_logprobs: int = 0  # also return so many most likely alternatives; 0 to 20; more than 0 needs `logprobs`
    stop: Sequence[str] = ()  # the text ends before the first of these; up to 16 strings of 1..256 bytes
    stop_token_ids: Sequence[int] = ()  # the output ends at the first of these; up to 64 token ids
    ignore_eos: bool = False  # continue after the model's end-of-sequence tokens
    include_stop: bool = False  # keep the matched stop string in the text
    # Resume an output: the last so many tokens of the context were generated for it before, by this engine or another
    # one of the same model. Generation continues after them as if it had never stopped: they count for `max_tokens`,
    # `min_tokens`, penalties, stop strings and unfinished characters, and later tokens are sampled with the same seed
    # as at the same positions before. These tokens and their text are not returned again. Less than the context's
    # length and less than `max_tokens`; needs n = 1. 0: a new output. FAILED_PRECONDITION if these tokens end the
    # output already.
    resume_tokens: int = 0
    # Keep the text of special tokens in the output's text, for example "[TOOL_CALLS]". The text of the token that ends
    # the output is left out unless `include_stop` keeps it.
    include_special_tokens: bool = False
    # What the text of each output may look like. None: anything. An output that is resumed must match until now.
    output_format: OutputFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputParams:
    """What to return of the distribution that follows one token of a forward pass."""

    index: int = 0  # the token, by its index in the pass's tokens, from 0
    # Sample a token this way, without penalties, logit_bias, allowed_token_ids and bad_words, which a pass does not
    # apply. None: do not sample.
    sample: SamplingParams | None = None
    logprob_ids: Sequence[int] = ()  # return the log probabilities of these token ids; up to 1024
    top: int = 0  # return so many of the most likely tokens; 0 to 64
    logits: bool = False  # return the whole distribution. All outputs of a request together: up to 48 MiB
    entropy: bool = False  # return the entropy of the distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """A request for one pass over tokens, which are appended to the context. Buffered tokens are computed first.

    Positions and masks that equal the defaults are the same as none: the context shares pages as after a Fill. Any
    other position or mask becomes part of a page's identity.
    """

    context_id: str  # the context
    tokens: Sequence[int]  # token ids; 1 to max_context_tokens of them
    # The position of each token, 0 to max_context_tokens - 1. Empty: its index in the context.
    positions: Sequence[int] = ()
    # For each of `tokens` the indices that it attends to, as ranges (start, stop); up to 65,536 ranges together. Empty:
    # each token attends to every token up to itself.
    masks: Sequence[Sequence[tuple[int, int]]] = ()
    # Full pages stay working pages, so that Truncate can remove their tokens, until the next operation that computes.
    keep_working: bool = False
    outputs: Sequence[ForwardOutputParams] = ()  # what to return; up to 256, each for a different token


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A request to save a context's present state as a snapshot."""

    context_id: str  # the context
    name: str  # the snapshot's name. One that exists gives ALREADY_EXISTS, unless `overwrite_version` is set
    # Respond only when the snapshot would survive a loss of power; a server without a store gives FAILED_PRECONDITION
    # (NO_STORE). Otherwise it is kept in memory until the server ends.
    durable: bool = False
    # The latest version, which the new one replaces as the latest. It is kept as history; a server may have a limit,
    # and then drops the oldest version. Any other number gives ABORTED (VERSION_MISMATCH).
    overwrite_version: int | None = None
    ttl: Ttl = Ttl()  # the time to live; without seconds: for ever
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes: limits as in CreateContextRequest
    # Bytes of the caller's that belong to the version, up to 4 MiB. They are as durable as the version, expire and are
    # deleted with it, and count for the tenant's quota of bytes. Empty: none.
    attachment: bytes = b""
    # At most this many versions of the name are kept, the new one included, if the server's limit is not lower. 0: as
    # many as the server's limit allows.
    max_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A request for a context from a snapshot. It has salt and manual_commit of the context that was saved."""

    name: str  # the snapshot
    version: int | None = None  # its version, from 1. None: the latest
    # Accept a snapshot of another model revision and compute its tokens anew. Otherwise that gives FAILED_PRECONDITION
    # (MODEL_MISMATCH).
    recompute: bool = False
    context_id: str | None = None  # as in CreateContextRequest
    priority: int = 0  # higher runs first. -100 to 100
    pinned: bool = False  # as in CreateContextRequest
    pin_s: float | None = None  # as in CreateContextRequest. None: until it is unpinned
    ttl: Ttl = Ttl()  # as in CreateContextRequest


@dataclass(frozen=True, slots=True)
class RetentionUpdate:
    """A request to change how long a snapshot's version or a publication is kept. What is None stays as it is."""

    ttl: Ttl | None = None  # the time to live from now on; without seconds: for ever
    labels: Mapping[str, str] | None = None  # all labels from now on


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """An output of a call, which sets a new variable with the name of its place.

    The options are those of GenerateRequest. The output of a function has no options but `criterion`.
    """

    criterion: Criterion | None = None  # ask for the output at once. None: it waits until somebody asks
    sampling: SamplingParams = SamplingParams()  # how tokens are sampled
    max_tokens: int | None = None  # the most tokens; from 1. None: the server's default
    min_tokens: int = 0  # the fewest tokens; from 0 to max_tokens
    stop: Sequence[str] = ()  # the text ends before the first of these: up to 16, each 1..256 bytes
    stop_token_ids: Sequence[int] = ()  # or at one of these tokens: up to 64
    ignore_eos: bool = False  # continue after end-of-sequence tokens
    include_stop: bool = False  # keep the matched stop string in the text
    # What the text may look like. None: anything. It is read when an engine begins the output, which fails if it is
    # wrong.
    output_format: OutputFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The value of a place in a template, or of an argument of a function: exactly one field beside the name is set."""

    # The place's name: a letter or _, then up to 63 letters, digits or _. Or the argument's name in the function.
    name: str
    text: str | None = None  # a text of up to 2 MiB
    variable_id: str | None = None  # the text of this variable, once it is set
    output: CallOutput | None = None  # generated by the model at this place, or returned by the function


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallRequest:
    """A request to add a call to a session: a semantic call (`template`) or a native step (`function`).

    A semantic call is a prompt with places, `{{name}}`, for inputs and outputs. The text up to an output is tokenised
    as one text, whatever its parts. An output keeps the tokens that were sampled, and the text after it is tokenised
    by itself. Each output continues everything before it. Text after the last output has no effect. The text before
    the first place, if it fills a page, is kept by the engines for later calls of the tenant, in any session: in a
    context without a session, which is closed when no call has begun with it for the server's --prefix-timeout-s. All
    other contexts of a call are closed with the call (see GraphTask.context_id).

    A native step is a function of the server, run without an engine. All parameters but one are its arguments, and
    that one is its output. It is a call with one task. If the function fails, so does its output, with
    FAILED_PRECONDITION; more than 2 MiB of output is RESOURCE_EXHAUSTED (NEVER_FITS), more than 5 seconds
    DEADLINE_EXCEEDED. Its output counts as a text that the session was given (QUOTA).
    """

    model_id: str = ""  # the model, up to 256 bytes. Empty: the server's default. Not with a function
    template: str | None = None  # the prompt, up to 2 MiB, which must not begin with an output
    # The function, up to 64 bytes. All arguments are texts; those after a "/" here are optional.
    #   strip(text / characters): the text without white space, or these characters, at both ends.
    #   split(text / separator, part): one part of a text between separators, by default lines; 0 is the first, -1 the
    #     last.
    #   join(/ separator, ...): all other arguments in their order, with the separator between them.
    #   template(template, ...): the template with the other arguments at the places, `{{name}}`, of their names.
    #   extract(text, pattern / group): the first match of an RE2 pattern, or its group of this number; the pattern has
    #     up to 1000 characters, the text 65,536.
    #   json_pointer(text / pointer): the value at a JSON pointer (RFC 6901): a string as it is, all else as JSON.
    # A server may have others: INVALID_ARGUMENT lists them for a name that is unknown.
    function: str | None = None
    # The values of its places or arguments; up to 256, each name once. An input may stand at several places.
    parameters: Sequence[Parameter]
    # Seconds that it may wait and run once it is asked for; above 0, up to 10 years.
    timeout_s: float = 600.0


def utc_datetime(unix_s: float) -> datetime:
    """A time in unix seconds as a UTC datetime, as results have it."""
    return datetime.fromtimestamp(unix_s, UTC)
