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
    "ForwardOutputOptions",
    "GenerateOptions",
    "SamplingOptions",
]


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
