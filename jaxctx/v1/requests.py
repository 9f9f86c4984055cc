"""What is asked of an engine, and of programs on engines. Lengths of time are in seconds.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxctx.v1.answers import Criterion

__all__ = [
    "CallOutput",
    "Changes",
    "CreateRequest",
    "ForwardRequest",
    "GenerateRequest",
    "OpenRequest",
    "Parameter",
    "PassOutput",
    "Sampling",
    "SaveRequest",
    "SubmitCallRequest",
    "Ttl",
    "UpdateRequest",
]


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long an object is to live from now on."""

    seconds: float | None = None  # above 0, up to 10 years. None: for ever
    sliding: bool = False  # every use starts it again. Otherwise it ends when it ends, used or not


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRequest:
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
class UpdateRequest:
    """Asks to change a context's settings. What is unset stays as it is."""

    priority: int | None = None  # higher runs first. -100..100
    # Never a victim under memory pressure. Beyond what the caller may pin: RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None = None
    labels: Mapping[str, str] | None = None  # all labels from now on. None: as they are
    ttl: Ttl | None = None  # how long to live from now on; without a duration: for ever. None: as it is
    # How long it is pinned from now on; above 0, up to 10 years; needs `pinned`. None: until it is unpinned.
    pin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
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
    sampling: Sampling = Sampling()  # how tokens are drawn
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
class PassOutput:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int = 0  # which of the pass's tokens, from 0
    # Draw from the distribution this way, without penalties and logit_bias, which a pass does not apply. None: do
    # not draw.
    sample: Sampling | None = None
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
    outputs: Sequence[PassOutput] = ()  # what to tell; up to 256, of different tokens


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
class Changes:
    """Asks to change a version of a snapshot. What is unset stays as it is."""

    ttl: Ttl | None = None  # how long to keep it from now on; without a duration: for ever. None: as it is
    labels: Mapping[str, str] | None = None  # all labels from now on. None: as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutput:
    """An output of a call, which sets a new variable of the name of its place.

    Options as in GenerateRequest; of a function it has a criterion or nothing.
    """

    criterion: Criterion | None = None  # ask for it at once. None: not until somebody does
    sampling: Sampling = Sampling()  # how tokens are drawn
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


# By the message or enum; a tuple is of its values.
CLASSES: Mapping[str, type] = {
    "jaxctx.v1.UpdateContextRequest.Labels": Mapping,
    "jaxctx.v1.UpdateSnapshotRequest.Labels": Mapping,
    "jaxctx.v1.UpdatePublicationRequest.Labels": Mapping,
    "jaxctx.v1.Ttl": Ttl,
    "jaxctx.v1.CreateContextRequest": CreateRequest,
    "jaxctx.v1.UpdateContextRequest": UpdateRequest,
    "jaxctx.v1.Sampling": Sampling,
    "jaxctx.v1.GenerateRequest": GenerateRequest,
    "jaxctx.v1.AttentionMask": Sequence,
    "jaxctx.v1.PassOutput": PassOutput,
    "jaxctx.v1.ForwardRequest": ForwardRequest,
    "jaxctx.v1.SaveRequest": SaveRequest,
    "jaxctx.v1.OpenRequest": OpenRequest,
    "jaxctx.v1.UpdateSnapshotRequest": Changes,
    "jaxctx.v1.CallOutput": CallOutput,
    "jaxctx.v1.Parameter": Parameter,
    "jaxctx.v1.SubmitCallRequest": SubmitCallRequest,
}
