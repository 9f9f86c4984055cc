"""What a caller may choose, by keyword.

Times are in seconds; a `ttl_s` of `math.inf` is for ever, and None, like anything not given, leaves it to
the server.

Generated from protos/jaxctx/v1 by scripts/stubs. Not edited by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from jaxctx.types import Criterion

__all__ = [
    "CallOutputOptions",
    "Content",
    "CreateOptions",
    "ForwardOutputOptions",
    "GenerateOptions",
    "KeepOptions",
    "OpenOptions",
    "SamplingOptions",
    "SaveOptions",
    "UpdateOptions",
]


class Content(TypedDict, total=False):
    """Asks to append to a context."""

    tokens: Sequence[int] | None  # token ids as they stand
    # Messages, written by the model's chat template; in a context that has tokens, as the next turns.
    messages: Sequence[dict[str, str]] | None
    # Whether to end with what opens an answer of the assistant. Unset: exactly if the last role is "user" or "tool".
    add_generation_prompt: bool | None
    # Whether the tokenizer adds its special tokens (beginning of sequence) to `text`. Unset: if the context is
    # empty.
    add_special_tokens: bool | None


class SamplingOptions(TypedDict, total=False):
    """How the next token is drawn.

    With every field unset it is drawn from the model's own distribution. Order: logit_bias, min_tokens, penalties
    (repetition, then frequency and presence), temperature, top_k, top_p, min_p. Numbers must be finite.
    """

    temperature: float | None  # 0..100; 0 is greedy. Unset: 1
    top_k: int | None  # only the k most likely tokens; 0..vocab_size. 0: off
    # Only the smallest set of most likely tokens that weighs at least this; above 0, up to 1. Unset: 1 (off).
    top_p: float | None
    min_p: float | None  # only tokens at least this fraction as likely as the most likely one; 0..1. 0: off
    # Divides (multiplies, if negative) the logits of tokens in prompt and output; above 0, up to 10. Unset: 1 (off).
    repetition_penalty: float | None
    presence_penalty: float | None  # subtracted from the logits of tokens that are in the output; -2..2. 0: off
    # Subtracted from a logit once per occurrence of its token in the output; -2..2. 0: off.
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None  # added to logits, by token id; -100..100 each, at most 300 entries
    # Equal seeds give equal outputs in any batch; 0..2^63 - 1. Unset: chosen by the server and reported. Of several
    # outputs the first has this seed and each other one a hash of it and its index, so that neighbouring seeds share
    # none; each draws as a lone output of the seed that is reported for it.
    seed: int | None


class GenerateOptions(SamplingOptions, total=False):
    """Asks to continue a context.

    What is generated becomes part of it; the last sampled token stays buffered until the next operation computes it.
    With n > 1 the context is flushed and forked n times; each fork is continued, the context is not.
    """

    # At most this many tokens for each output; 1..max_context_tokens. Unset: the model's `default_max_tokens`. An
    # output that makes the context as long as the longest sequence ends there.
    max_tokens: int | None
    min_tokens: int | None  # no end-of-sequence or stop token before this many tokens; 0..max_tokens
    logprobs: bool | None  # tell the log probability of every token
    top_logprobs: int | None  # with it the most likely alternatives; 0..20; more than 0 needs `logprobs`
    stop: Sequence[str] | None  # the text ends before the first of these; up to 16 strings of 1..256 bytes
    stop_token_ids: Sequence[int] | None  # the output ends at the first of these; up to 64 token ids
    ignore_eos: bool | None  # go on past the model's end-of-sequence tokens
    include_stop: bool | None  # keep the matched stop string in the text
    # The output exists in part: the context's last so many tokens were drawn for it before, by this engine or
    # another one of the model. It goes on behind them as if it had never stopped: they count for `max_tokens`,
    # `min_tokens`, penalties, stop strings and unfinished characters, and are drawn on with the same seed as at the
    # same places. Neither they nor the text that came with them are told again. Below the context's length and below
    # `max_tokens`; needs n = 1. 0: a new output. FAILED_PRECONDITION if these tokens end the output already.
    resume_tokens: int | None


class CreateOptions(Content, total=False):
    """A new context, and what is in it at once."""

    # Chosen by the client so that a retry is safe (a second request of the same id gives ALREADY_EXISTS): 1..64
    # characters of A-Z a-z 0-9 . _ -, not beginning with a punctuation mark. Unset: 128 random bits from the server.
    context_id: str | None
    model_id: str | None  # the model to compute with; up to 256 bytes. Empty: the server's only, or default, one
    salt: str | None  # contexts of different salts never share pages. Up to 256 bytes
    priority: int | None  # higher runs first. -100..100
    manual_commit: bool | None  # full pages commit only by CommitPages
    # Never a victim under memory pressure. Beyond what the caller may pin: RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None
    labels: Mapping[str, str] | None  # the caller's notes: up to 32; keys of 1..64 bytes, values of up to 256
    ttl_s: float | None  # how long to live; without a duration: for ever
    sliding: bool | None  # every use starts it again. Otherwise it ends when it ends, used or not
    pin_s: float | None  # how long it is pinned; above 0, up to 10 years; needs `pinned`. Unset: until it is unpinned


class OpenOptions(TypedDict, total=False):
    """Asks for a context from a snapshot. Salt and manual_commit are those of the context that was saved."""

    # Accept a snapshot of another model revision and compute its tokens anew; else that is FAILED_PRECONDITION
    # (MODEL_MISMATCH).
    recompute: bool | None
    context_id: str | None  # as in CreateContextRequest
    priority: int | None  # higher runs first. -100..100
    pinned: bool | None  # as in CreateContextRequest
    pin_s: float | None  # as in CreateContextRequest. Unset: until it is unpinned
    ttl_s: float | None  # as in CreateContextRequest
    sliding: bool | None  # every use starts it again. Otherwise it ends when it ends, used or not


class UpdateOptions(TypedDict, total=False):
    """Asks to change a context's settings. What is unset stays as it is."""

    priority: int | None  # higher runs first. -100..100
    # Never a victim under memory pressure. Beyond what the caller may pin: RESOURCE_EXHAUSTED (PIN_BUDGET).
    pinned: bool | None
    labels: Mapping[str, str] | None  # all labels from now on. Unset: as they are
    ttl_s: float | None  # how long to live from now on; without a duration: for ever. Unset: as it is
    sliding: bool | None  # every use starts it again. Otherwise it ends when it ends, used or not
    # How long it is pinned from now on; above 0, up to 10 years; needs `pinned`. Unset: until it is unpinned.
    pin_s: float | None


class SaveOptions(TypedDict, total=False):
    """Asks to keep a context's state."""

    # Answer only when the snapshot would survive a loss of power; a server without a store gives FAILED_PRECONDITION
    # (NO_STORE). Otherwise it is kept in memory until the server ends.
    durable: bool | None
    # The latest version, which the new one then replaces as the latest; it is kept as history, of which a server may
    # have a limit: then the oldest version goes. Any other number gives ABORTED (VERSION_MISMATCH).
    overwrite_version: int | None
    ttl_s: float | None  # how long to keep it; without a duration: for ever
    sliding: bool | None  # every use starts it again. Otherwise it ends when it ends, used or not
    labels: Mapping[str, str] | None  # the caller's notes: limits as in CreateContextRequest


class KeepOptions(TypedDict, total=False):
    """Asks to publish a context's prefix. The pages are copied once and count as pinned."""

    ttl_s: float | None  # how long to publish it; without a duration: until Unpublish
    sliding: bool | None  # every use starts it again. Otherwise it ends when it ends, used or not
    labels: Mapping[str, str] | None  # the caller's notes: limits as in CreateContextRequest


class CallOutputOptions(SamplingOptions, total=False):
    """An output of a call, which sets a new variable of the name of its place.

    Options as in GenerateRequest; of a function it has a criterion or nothing.
    """

    criterion: Criterion | None  # ask for it at once. Unset: not until somebody does
    max_tokens: int | None  # the most tokens; from 1. Unset: the server's default
    min_tokens: int | None  # the fewest tokens; from 0 to max_tokens
    stop: Sequence[str] | None  # the text ends before the first of these: up to 16, each 1..256 bytes
    stop_token_ids: Sequence[int] | None  # or at one of these tokens: up to 64
    ignore_eos: bool | None  # go on after end-of-sequence tokens
    include_stop: bool | None  # keep the matched stop string in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputOptions:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int = 0  # which of the pass's tokens, from 0
    # Draw from the distribution this way, without penalties and logit_bias, which a pass does not apply. None: do
    # not draw.
    sample: SamplingOptions | None = None
    logprob_ids: Sequence[int] = ()  # tell the log probabilities of these token ids; up to 1024
    top: int = 0  # tell so many of the most likely tokens; 0..64
    logits: bool = False  # tell the whole distribution. All outputs of a request together: up to 48 MiB
    entropy: bool = False  # tell how uncertain the distribution is
