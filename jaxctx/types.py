"""What the API returns and what it is asked for: one frozen dataclass or enum for each message of protos/jaxctx/v1.

Results come from an engine and reach the client unchanged; requests are what an engine and programs are asked. Field
names, units and defaults are those of the messages; `jaxctx.convert` translates between the two, and
tests/jaxctx/test_types.py compares them, so that they cannot drift apart. Times are UTC datetimes, durations are in
seconds, log probabilities are natural logarithms of the model's own distribution.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine lives."""

    model_id: str  # the model's name on this server
    model_revision: str  # digest of configuration and weights: equal revisions compute equal KV
    architecture: str  # for example "llama" or "qwen3"
    parameters: int  # number of parameters
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    max_context_tokens: int  # the longest sequence in tokens
    page_size: int  # tokens per KV page
    pages_total: int  # pages in the pool
    dtype: str  # numerical type of weights and activations
    kv_dtype: str  # numerical type of keys and values
    max_batch: int  # sequences that one step can serve
    platform: str  # "cpu", "gpu" or "tpu"
    mesh: Mapping[str, int] = field(default_factory=dict)  # devices along each axis of the mesh, by the axis' name
    default_max_tokens: int  # tokens for an unset `max_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of load and memory.

    Every page is free, cached or held: `pages_free + pages_cached + pages_held == pages_total`. Those marked "in
    all" only grow while the engine lives.
    """

    pages_total: int  # pages in the pool
    pages_free: int  # pages with nothing in them
    pages_cached: int  # pages that no context holds and that a later fill may find; evicted when memory is needed
    pages_held: int  # pages that contexts hold
    pages_reserved: int  # pages promised to running requests and not taken yet
    contexts: int  # contexts alive
    running: int  # requests in the batch
    waiting: int  # requests waiting for a place in it
    draining: bool  # whether the engine refuses new work
    steps: int  # steps run in all
    tokens_computed: int  # tokens computed in all, of prompts and of outputs
    tokens_cached: int  # prompt tokens found in the cache in all
    tokens_generated: int  # tokens generated in all
    preemptions: int  # requests put back into the queue under memory pressure, in all
    suspensions: int  # contexts suspended under memory pressure, in all
    compilations_after_ready: int  # compilations since the engine was ready, in all: 0 in a sound server
    tokens_restored: int  # tokens brought back from other tiers in all
    host_pages_total: int  # pages that the host's memory has room for
    host_pages_used: int  # of these, pages in use
    disk_pages_total: int  # pages that the host's disk may take
    disk_pages_used: int  # of these, pages in use
    snapshots: int  # versions of snapshots that are kept
    publications: int  # prefixes that are published
    expired: int  # contexts, snapshots and publications whose time ended, in all
    tokens_drafted: int  # tokens that were guessed ahead in all
    tokens_accepted: int  # of these, how many were right


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine."""

    info: EngineInfo  # what it is
    stats: EngineStats  # how loaded it is
    address: str = ""  # of a router's engine: where it listens. Empty: it is in the process that answers
    # Of a router's engine: which incarnation of all its engines this is, counted from 1. 0: it is in the process
    # that answers.
    epoch: int = 0


class ContextState(enum.Enum):
    """What a context is doing."""

    IDLE = "idle"  # ready for the next operation
    BUSY = "busy"  # a writer (Fill, Generate, ...) holds it; a second one gets ABORTED
    SUSPENDED = "suspended"  # its pages were given up under memory pressure; it comes back on its next use


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """When an object ends. It can be read until then, never after, and is not deleted before."""

    at: datetime  # the end, unless it is put off
    seconds: float  # the time to live that was asked for
    sliding: bool  # whether a use starts it again


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A context and its counters: `seq_len == committed_pages * page_size + working_tokens`; buffered tokens are
    apart.

    A context lives until it is closed, expires or the server ends, whatever happens to the connection that made it.
    Readers always succeed; writers are serialised, and a second concurrent writer gets ABORTED.

    A router moves contexts of an engine that leaves to another one, with its labels, time to live, priority and pin.
    There they have been opened from a snapshot, which is gone: so say `snapshot`, `created_at` and `parent_id`,
    `version` begins anew, and pages that were reserved are not.
    """

    context_id: str  # unique within the tenant
    parent_id: str | None = None  # the context it was forked from, which may be closed by now. None: it was created
    model_id: str  # the model that computed it
    state: ContextState  # what it is doing
    seq_len: int  # tokens whose KV is computed
    committed_pages: int  # full, immutable pages, shared with every context that has the same prefix
    working_pages: int  # pages of its own, including reserved ones without tokens
    working_tokens: int  # tokens in working pages
    buffered_tokens: int  # tokens known but not computed yet: deferred fills and the last sampled token
    page_size: int  # tokens per page
    priority: int  # higher runs first. -100..100
    pinned: bool  # never a victim under memory pressure
    salt: str  # contexts of different salts never share pages
    created_at: datetime  # when it was created or forked
    used_at: datetime  # when it was last operated on
    # The caller's notes. A context that the server made for a program has `jaxctx` = `program` here.
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned_until: datetime | None = None  # when the pin ends. None: it does not, or there is none
    expiry: Expiry | None = None  # when the context ends. None: never
    version: int  # grows with every change of its tokens, pages or settings
    forked_at: int  # tokens that the parent had when this context was forked from it, buffered ones included
    snapshot: str = ""  # the snapshot that it was opened from: "NAME@VERSION". Empty: none
    # The engine that it lives on, by the name that GraphTask.engine_id has: in a router the address where that
    # listens, else "local". After a move it is another one. Empty: not told.
    engine_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """Where the KV came from of the tokens that a call made ready, `resident + restored + computed`: with `defer`
    none.
    """

    resident: int  # tokens found in pages on the device
    restored: int  # tokens brought back from another tier
    computed: int  # tokens computed
    context: ContextInfo  # the context afterwards

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
        return self.resident + self.restored


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely one token was. Natural logarithms of the model's distribution, before temperature and the filters."""

    token_id: int  # the token
    logprob: float  # its log probability
    top: Sequence[tuple[int, float]] = ()  # the most likely tokens at this place, best first: `top_logprobs` of them


class FinishReason(enum.Enum):
    """Why an output ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # `max_tokens`, or the longest sequence of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one output cost, in tokens."""

    prompt_tokens: int  # tokens in the context before generation
    cached_tokens: int  # of these, tokens whose KV was not computed by this call
    computed_tokens: int  # of these, tokens whose KV was computed by this call
    completion_tokens: int  # tokens generated
    restored_tokens: int  # of `cached_tokens`, those that this call brought back from other tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePiece:
    """A part of one output.

    The last part of each output, and only that one, has `finish`, `seed`, `usage` and `context`.

    The texts of one index together are the output's text, and none ends inside a UTF-8 character; the token ids are
    what joined the context. Parts of several outputs interleave, and are fewer and larger for a reader that lags.
    """

    index: int  # which output; 0..n - 1
    context_id: str  # the context that holds this output
    text: str = ""  # new text; may be empty while a character or a possible stop string is incomplete
    token_ids: Sequence[int] = ()  # new tokens
    logprobs: Sequence[TokenLogprob] = ()  # one for each of `token_ids`, if asked for
    finish: FinishReason | None = None  # why the output ended. None before the last part
    stop_match: str | int | None = None  # the stop string, or the stop or end-of-sequence token, that ended it
    seed: int | None = None  # the seed that repeats this output
    usage: Usage | None = None  # what the output cost. None before the last part
    context: ContextInfo | None = None  # the context that holds this output, afterwards. None before the last part

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputResult:
    """What a ForwardOutput asked for.

    Logarithms are natural ones of the model's distribution, before temperature and filters.
    """

    index: int  # as in the ForwardOutput
    token_id: int | None = None  # the token drawn. It does not join the context
    seed: int | None = None  # the seed that repeats the draw
    logprobs: Sequence[float] = ()  # one for each of `logprob_ids`, in their order
    top: Sequence[tuple[int, float]] = ()  # the most likely tokens, best first
    # Unnormalised log probabilities of all token ids, float32, little-endian: numpy.frombuffer(logits, "<f4").
    # Empty: not asked for.
    logits: bytes = b""
    entropy: float | None = None  # in nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The answers to the outputs that were asked for."""

    outputs: Sequence[ForwardOutputResult] = ()  # in the order of the request's `outputs`
    context: ContextInfo  # the context afterwards


class Tier(enum.Enum):
    """Where a page of a context is."""

    DEVICE = "device"  # in the engine's pool: can be computed with
    HOST = "host"  # in the host's memory
    DISK = "disk"  # on the host's disk
    LINEAGE = "lineage"  # nowhere: only its tokens are known, and it is computed again when needed


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPages:
    """The physical pages of a context, committed ones first, then working ones."""

    # What the caller's pages are called: those of equal ids are one physical page, counted from 1 in the order in
    # which this engine first told the caller of them, so that the numbers say nothing of others. None of a suspended
    # context.
    page_ids: Sequence[int] = ()
    # How many contexts of the caller's hold each of these pages, kept by snapshots too, and this one included.
    refcounts: Sequence[int] = ()
    tiers: Sequence[Tier] = ()  # where each page of its tokens is, suspended or not; a partial page counts as one


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Token ids as they stand, without any tokenizer."""

    ids: Sequence[int] = ()  # 0 .. vocab_size - 1 each. In a request 1 .. max_context_tokens of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GetContextResult:
    """One context."""

    context: ContextInfo  # its counters
    pages: ContextPages | None = None  # its pages. None: not asked for
    tokens: TokenIds | None = None  # all of its tokens, buffered ones at the end. None: not asked for
    # The way up the fork tree, its parent first: the nearest 100, closed ones too. Empty: not asked for, or no
    # parent.
    ancestors: Sequence[tuple[str, int]] = ()


class ContextChange(enum.Enum):
    """What happened to a context."""

    EXISTS = "exists"  # it was there when the watch began, or is told again after RESET
    CREATED = "created"  # it was created
    FORKED = "forked"  # it was forked from another one
    OPENED = "opened"  # it was opened from a snapshot
    CHANGED = "changed"  # its tokens, pages or settings changed
    SUSPENDED = "suspended"  # its pages were given up under memory pressure
    CLOSED = "closed"  # it was closed
    EXPIRED = "expired"  # its time to live ended
    # Changes were lost because the caller read slowly, or a router got or lost an engine. Forget everything: EXISTS
    # follows for what is there.
    RESET = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEvent:
    """One change. Several changes of a context that wait to be read may come as one."""

    change: ContextChange  # what happened
    at: datetime  # when
    context_id: str = ""  # to which context. Empty with RESET
    context: ContextInfo | None = None  # the context afterwards. None once it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where two contexts part."""

    common_tokens: int  # equal tokens at the front, buffered ones included
    shared_pages: int  # physical pages that both hold
    length_a: int  # tokens of a, buffered ones included
    length_b: int  # tokens of b, buffered ones included


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What filling would find and need. An estimate by the time it is read: others fill and evict too."""

    tokens: int  # tokens to make ready, including what is buffered in the context
    resident: int  # of these, found in pages on the device
    restored: int  # of these, in another tier: `host + disk`
    computed: int  # of these, to compute
    pages_needed: int  # pages to allocate
    # All but those that the caller's own pins and running calls keep. What other tenants hold is not told.
    pages_available: int
    host: int  # of `restored`, tokens in the host's memory
    disk: int  # of `restored`, tokens on the host's disk

    @property
    def cached(self) -> int:
        """Tokens that need not be computed."""
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
    dtype: str  # numerical type of weights and activations, for example "bfloat16"
    kv_dtype: str  # numerical type of keys and values
    default_max_tokens: int  # what Generate takes for an unset `max_tokens`


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """Messages as the model reads them."""

    text: str  # the text
    tokens: Sequence[int] = ()  # its token ids: what Fill appends to an empty context

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A namespace of variables, of one tenant."""

    session_id: str  # unique within the tenant
    ttl_s: float  # how long it lives without being used; one in which something runs is used
    variables: int  # how many there are
    calls: int  # how many calls there are, ended ones included
    started: int  # tasks that were asked for, have their inputs and have not ended


class VariableState(enum.Enum):
    """Of a variable."""

    UNSET = "unset"  # its text is to come
    SET = "set"  # its text is there, and never changes
    FAILED = "failed"  # it will not come


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableInfo:
    """A text that is set once."""

    variable_id: str  # unique within the session
    name: str  # as the client called it; of an output, the name of its place
    description: str = ""  # the client's note. Empty: none
    state: VariableState  # whether it is set
    text: str  # its text, or what there is of it while an engine makes it
    error_reason: str = ""  # why it failed: a value of ErrorReason without its prefix. Empty: it did not
    error_message: str = ""  # why it failed, for people. Empty: it did not

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallResult:
    """The call."""

    call_id: str  # for CancelCall
    outputs: Sequence[VariableInfo] = ()  # its outputs, in the order in which they stand in the template


class TaskPhase(enum.Enum):
    """Of a task."""

    IDLE = "idle"  # nobody asked for it
    WAITING = "waiting"  # somebody did, and it waits for inputs
    STARTED = "started"  # it has them, and waits for an engine (a native step for its turn) or runs
    DONE = "done"  # it set its outputs
    FAILED = "failed"  # it, or an input, failed


class Criterion(enum.IntEnum):
    """What an asker wants; each is stronger than those before it.

    It passes on to all that a variable needs; several that feed one are a group, of which only the end of the last
    one counts.
    """

    THROUGHPUT = 1  # as many texts as possible, whenever
    TIME_PER_OUTPUT_TOKEN = 2  # tokens that follow each other soon
    TIME_TO_FIRST_TOKEN = 3  # a first token soon
    LATENCY = 4  # all of it soon


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTask:
    """What makes a variable: the part of a call up to an output, or a native step."""

    call_id: str  # its call
    phase: TaskPhase  # how far it is
    criterion: Criterion | None = None  # how it was asked for. None: not yet
    inputs: Sequence[str] = ()  # ids of the variables that it needs
    output: str  # the id of the one that it makes
    engine_id: str = ""  # the engine that it went to; empty: none yet
    why: str = ""  # why there, for people. Empty: none yet
    function: str = ""  # of a native step. Empty: it is none
    # The context on `engine_id` that holds its prompt and as much of its output as has come: to be forked, as often
    # as one likes, and read. Whatever else is done to it spoils the call. All tasks of a call continue one context,
    # which is given up as soon as no task of it is asked for and unfinished, at the latest with the session; ask for
    # a later output of the call to keep it. Forks are the caller's. Empty: none yet, not any more, or on another
    # engine by now.
    context_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of a snapshot: an immutable copy of a context's state in the caller's namespace."""

    name: str  # 1..100 bytes without control characters
    version: int  # 1, 2, ... A name that was deleted begins again at 1
    latest: bool  # whether no later version of the name exists
    durable: bool  # whether it survives the server, and a loss of power
    tokens: int  # tokens, buffered ones included
    seq_len: int  # of these, tokens with KV
    pages: int  # pages of KV
    size_bytes: int  # of its pages. Pages that several snapshots share are stored once and count in each
    model_revision: str  # the model revision that computed it
    salt: str  # the salt of the context, which contexts opened from it inherit
    manual_commit: bool  # whether full pages of contexts opened from it commit only by CommitPages
    created_at: datetime  # when it was saved
    expiry: Expiry | None = None  # when it ends. None: never
    context_id: str  # the context that was saved. It may be closed by now
    parent_version: int = 0  # the version that it replaced as the latest. 0: none
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A prefix that contexts of all tenants may share, of the same model and salt.

    Its owner alone can list and end it.
    """

    publication_id: str  # 128 random bits
    tokens: int  # tokens of it; whole pages only
    pages: int  # pages of it
    salt: str  # contexts of this salt share it
    created_at: datetime  # when it was published
    expiry: Expiry | None = None  # when it ends. None: never
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes. Nobody else sees them


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long an object is to live from now on."""

    seconds: float | None = None  # above 0, up to 10 years. None: for ever
    sliding: bool = False  # every use starts it again. Otherwise it ends when it ends, used or not


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateContextRequest:
    """Asks for a new, empty context."""

    # Chosen by the client so that a retry is safe (a second request of the same id gives ALREADY_EXISTS): 1..64
    # characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. None: 128 random bits from the server.
    context_id: str | None = None
    salt: str = ""  # contexts of different salts never share pages. Up to 256 bytes
    priority: int = 0  # higher runs first. -100..100
    manual_commit: bool = False  # full pages commit only by CommitPages
    # Never a victim under memory pressure. Beyond what the caller may pin: RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool = False
    # The caller's notes: up to 32; keys of 1..64 bytes, values of up to 256.
    labels: Mapping[str, str] = field(default_factory=dict)
    ttl: Ttl = Ttl()  # how long to live; without a duration: for ever
    # How long it is pinned; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContextRequest:
    """Asks to change a context's settings. What is unset stays as it is."""

    priority: int | None = None  # higher runs first. -100..100
    # Never a victim under memory pressure. Beyond what the caller may pin: RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None = None
    labels: Mapping[str, str] | None = None  # all labels from now on. None: as they are
    ttl: Ttl | None = None  # how long to live from now on; without a duration: for ever. None: as it is
    # How long it is pinned from now on; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn.

    With every field unset it is drawn from the model's own distribution. Order: logit_bias, min_tokens, penalties
    (repetition, then frequency and presence), temperature, top_k, top_p, min_p. Numbers must be finite.
    """

    temperature: float = 1.0  # 0..100; 0 is greedy. Unset: 1
    top_k: int = 0  # only the k most likely tokens; 0..vocab_size. 0: off
    # Only the smallest set of most likely tokens that weighs at least this; above 0, up to 1. Unset: 1 (off).
    top_p: float = 1.0
    min_p: float = 0.0  # only tokens at least this fraction as likely as the most likely one; 0..1. 0: off
    # Divides (multiplies, if negative) the logits of tokens in prompt and output; above 0, up to 10. Unset: 1 (off).
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the output; -2..2. 0: off
    # Subtracted from a logit once per occurrence of its token in the output; -2..2. 0: off.
    frequency_penalty: float = 0.0
    # Added to logits, by token id; -100..100 each, at most 300 entries.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # Equal seeds give equal outputs in any batch; 0..2^63 - 1. None: chosen by the server and reported. Of several
    # outputs the first has this seed and each other one a hash of it and its index, so that neighbouring seeds share
    # none; each draws as a lone output of the seed that is reported for it.
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Asks to continue a context.

    What is generated becomes part of it; the last sampled token stays buffered until the next operation computes it.
    With n > 1 the context is flushed and forked n times; each fork is continued, the context is not.
    """

    context_id: str  # the context; it has at least one token
    # At most this many tokens for each output; 1..max_context_tokens. None: the model's `default_max_tokens`. An
    # output that makes the context as long as the longest sequence ends there.
    max_tokens: int | None = None
    min_tokens: int = 0  # no end-of-sequence or stop token before this many tokens; 0..max_tokens
    n: int = 1  # how many outputs; 1..128, and no more than requests may wait (the server's --queue-limit). Unset: 1
    sampling: SamplingParams = SamplingParams()  # how tokens are drawn
    logprobs: bool = False  # tell the log probability of every token
    top_logprobs: int = 0  # with it the most likely alternatives; 0..20; more than 0 needs `logprobs`
    stop: Sequence[str] = ()  # the text ends before the first of these; up to 16 strings of 1..256 bytes
    stop_token_ids: Sequence[int] = ()  # the output ends at the first of these; up to 64 token ids
    ignore_eos: bool = False  # go on past the model's end-of-sequence tokens
    include_stop: bool = False  # keep the matched stop string in the text
    # The output exists in part: the context's last so many tokens were drawn for it before, by this engine or
    # another one of the model. It goes on behind them as if it had never stopped: they count for `max_tokens`,
    # `min_tokens`, penalties, stop strings and unfinished characters, and are drawn on with the same seed as at the
    # same places. Neither they nor the text that came with them are told again. Below the context's length and below
    # `max_tokens`; needs n = 1. 0: a new output. FAILED_PRECONDITION if these tokens end the output already.
    resume_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int = 0  # which of the pass's tokens, from 0
    # Draw from the distribution this way, without penalties and logit_bias, which a pass does not apply. None: do
    # not draw.
    sample: SamplingParams | None = None
    logprob_ids: Sequence[int] = ()  # tell the log probabilities of these token ids; up to 1024
    top: int = 0  # tell so many of the most likely tokens; 0..64
    logits: bool = False  # tell the whole distribution. All outputs of a request together: up to 48 MiB
    entropy: bool = False  # tell how uncertain the distribution is


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Asks for one pass over tokens, which join the context.

    What it had buffered is computed first.

    Default positions and full masks are the same as none at all: the context shares pages as after a Fill. Any other
    position or mask is part of what identifies a page.
    """

    context_id: str  # the context
    tokens: Sequence[int]  # token ids; 1 .. max_context_tokens of them
    # The position of each token, or none; 0 .. max_context_tokens - 1. Empty: its index in the context.
    positions: Sequence[int] = ()
    # What each token sees, as ranges of indices: a mask for each of `tokens`, with up to 65,536 ranges together.
    # Empty: every token up to itself.
    masks: Sequence[Sequence[tuple[int, int]]] = ()
    # Full pages stay working, so that Truncate reaches them, until the next operation that computes.
    keep_working: bool = False
    outputs: Sequence[ForwardOutput] = ()  # what to tell; up to 256, of different tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Asks to keep a context's state."""

    context_id: str  # the context
    name: str  # under which name. One that is taken gives ALREADY_EXISTS, unless `overwrite_version` is set
    # Answer only when the snapshot would survive a loss of power; a server without a store gives FAILED_PRECONDITION
    # (NO_STORE). Otherwise it is kept in memory until the server ends.
    durable: bool = False
    # The latest version, which the new one then replaces as the latest; it is kept as history, of which a server may
    # have a limit: then the oldest version goes. Any other number gives ABORTED (VERSION_MISMATCH).
    overwrite_version: int | None = None
    ttl: Ttl = Ttl()  # how long to keep it; without a duration: for ever
    labels: Mapping[str, str] = field(default_factory=dict)  # the caller's notes: limits as in CreateContextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Asks for a context from a snapshot. Salt and manual_commit are those of the context that was saved."""

    name: str  # the snapshot
    version: int | None = None  # which version of it, from 1. None: the latest
    # Accept a snapshot of another model revision and compute its tokens anew; else that is FAILED_PRECONDITION
    # (MODEL_MISMATCH).
    recompute: bool = False
    context_id: str | None = None  # as in CreateContextRequest
    priority: int = 0  # higher runs first. -100..100
    pinned: bool = False  # as in CreateContextRequest
    pin_s: float | None = None  # as in CreateContextRequest. None: until it is unpinned
    ttl: Ttl = Ttl()  # as in CreateContextRequest


@dataclass(frozen=True, slots=True)
class RetentionUpdate:
    """Asks to change a version of a snapshot. What is unset stays as it is."""

    ttl: Ttl | None = None  # how long to keep it from now on; without a duration: for ever. None: as it is
    labels: Mapping[str, str] | None = None  # all labels from now on. None: as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """An output of a call, which sets a new variable of the name of its place.

    Options as in GenerateRequest; of a function it has a criterion or nothing.
    """

    criterion: Criterion | None = None  # ask for it at once. None: not until somebody does
    sampling: SamplingParams = SamplingParams()  # how tokens are drawn
    max_tokens: int | None = None  # the most tokens; from 1. None: the server's default
    min_tokens: int = 0  # the fewest tokens; from 0 to max_tokens
    stop: Sequence[str] = ()  # the text ends before the first of these: up to 16, each 1..256 bytes
    stop_token_ids: Sequence[int] = ()  # or at one of these tokens: up to 64
    ignore_eos: bool = False  # go on after end-of-sequence tokens
    include_stop: bool = False  # keep the matched stop string in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What stands at a place of a template, or an argument of a function."""

    # Of the place: a letter or _, then up to 63 letters, digits or _. Of the argument: as the function declares it.
    name: str
    text: str | None = None  # a text; up to 2 MiB
    variable_id: str | None = None  # the text of this variable, once it is set
    output: CallOutput | None = None  # what the model says there, or what the function gives


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCallRequest:
    """Asks to add a semantic call: a prompt with places, `{{name}}`, for inputs and outputs.

    Everything up to an output is tokenised as one text, whatever its parts; an output stays the tokens that were
    drawn, and what follows it is tokenised by itself. Each output continues all that stands before it. Text after
    the last one has no effect. What stands before the first place, if it fills a page, is kept by the engines for
    later calls of the tenant, of any session: in a context without a session, which ends when no call began so for
    the server's --prefix-timeout-s. All other contexts of a call end with it (GraphTask.context_id).

    Or a native step: a function of the server's, whose arguments are all parameters but one, which is its output. It
    is a call in all else, of one task that no engine computes. If the function fails, so does the output, with
    FAILED_PRECONDITION; more than 2 MiB of it is RESOURCE_EXHAUSTED (NEVER_FITS), more than 5 seconds
    DEADLINE_EXCEEDED. Its output counts as a text that the session was given (QUOTA).
    """

    model_id: str = ""  # the model to compute with; up to 256 bytes. Empty: the server's default. Not with a function
    template: str | None = None  # the prompt; up to 2 MiB. It must not begin with an output. What is no place is text
    # The function; up to 64 bytes. All arguments are texts, and those after a "/" here may be left out. strip(text /
    # characters): the text without white space, or these characters, at both ends. split(text / separator, part):
    # one of its parts between separators, or else lines; 0 is the first, -1 the last. join(/ separator, ...): all
    # other arguments in their order, the separator between them. template(template, ...): the template with the
    # other arguments at the places, `{{name}}`, of their names. extract(text, pattern / group): the first match of a
    # pattern of RE2, or the group of this number in it; the pattern has up to 1000 characters, the text 65,536.
    # json_pointer(text / pointer): what a pointer (RFC 6901) finds in JSON, a string as it is and all else as JSON.
    # A server may have others: INVALID_ARGUMENT tells their names for one that there is not.
    function: str | None = None
    # What stands at its places; up to 256, each name once. An input may stand at several places.
    parameters: Sequence[Parameter]
    # How long it may wait and run once it is asked for. Above 0, up to 10 years. Unset: 600 seconds.
    timeout_s: float = 600.0


def utc_datetime(unix_s: float) -> datetime:
    """A time in unix seconds as results state it."""
    return datetime.fromtimestamp(unix_s, UTC)


def named(kind: type[Any], *sources: object) -> dict[str, Any]:
    """What the sources, the first that has it, call by the names of the fields of answers of this class."""
    names = [each.name for each in fields(kind)]
    return {name: getattr(source, name) for source in reversed(sources) for name in names if hasattr(source, name)}
