"""Options of outputs, given by keyword, for type checkers: `context.generate(max_tokens=8, temperature=0.0)`.

What is not given, or None, is not sent: the server then uses its default. Fields, ranges and meanings are those of
`jaxctx.types`, and tests/jaxctx/test_types.py compares them with the messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from jaxctx.types import Criterion, OutputFormat

__all__ = ["CallOutputOptions", "ChatOptions", "ForwardOutputOptions", "GenerateOptions", "SamplingOptions"]


class SamplingOptions(TypedDict, total=False):
    """How the next token is sampled: see `SamplingParams`."""

    temperature: float | None  # 0 to 100; 0 is greedy. Default: 1
    top_k: int | None  # only the k most likely tokens; 0 to vocab_size. Default: 0 (off)
    # Only the smallest set of most likely tokens with at least this probability together; above 0, up to 1. Default: 1
    # (off).
    top_p: float | None
    min_p: float | None  # only tokens at least this fraction as likely as the most likely one; 0 to 1. Default: 0 (off)
    # Divides the logits of tokens in prompt and output (multiplies them if negative); above 0, up to 10. Default: 1
    # (off).
    repetition_penalty: float | None
    presence_penalty: float | None  # subtracted from the logits of tokens that are in the output; -2 to 2. Default: 0
    # Subtracted from a logit once per occurrence of its token in the output; -2 to 2. Default: 0.
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None  # added to logits, by token id; -100 to 100 each, at most 300 entries
    # 0 to 2^63 - 1. Equal seeds give equal outputs in any batch. Default: the server chooses one and reports it.
    seed: int | None
    # Only these tokens are sampled; up to 1024 ids. An end-of-sequence token is sampled only if it is one of them, or
    # if the output has an `output_format`. Default: any token.
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None  # texts that are kept out of the output; up to 64 strings of 1 to 256 bytes


class GenerateOptions(SamplingOptions, total=False):
    """Options of one `generate` call: see `GenerateRequest`."""

    # At most this many tokens for each output; 1 to max_context_tokens. Default: the model's `default_max_tokens`.
    max_tokens: int | None
    min_tokens: int | None  # no end-of-sequence or stop token before this many tokens; 0 to max_tokens
    logprobs: bool | None  # return the log probability of every token
    top_logprobs: int | None  # also return so many most likely alternatives; 0 to 20; more than 0 needs `logprobs`
    stop: Sequence[str] | None  # the text ends before the first of these; up to 16 strings of 1 to 256 bytes
    stop_token_ids: Sequence[int] | None  # the output ends at the first of these; up to 64 token ids
    ignore_eos: bool | None  # continue after the model's end-of-sequence tokens
    include_stop: bool | None  # keep the matched stop string in the text
    # Resume an output whose last so many tokens are already in the context. Default: 0 (a new output).
    resume_tokens: int | None
    include_special_tokens: bool | None  # keep the text of special tokens in the output's text
    output_format: OutputFormat | None  # what the text of each output may look like. Default: anything


class ChatOptions(TypedDict, total=False):
    """Options of messages for the model's chat template: see the message ChatMessages."""

    # Tools that the model may call, up to 128: {"type": "function", "function": {"name": ..., "description": ...,
    # "parameters": ...}} each, as a dict or as JSON text.
    tools: Sequence[Mapping[str, Any] | str] | None
    # Further variables of the template, such as `enable_thinking`: a dict or JSON text.
    template_arguments: Mapping[str, Any] | str | None
    # Leave the last message, which is the assistant's, open so that the model continues it.
    continue_final_message: bool | None


class CallOutputOptions(SamplingOptions, total=False):
    """Options of an output of a semantic call: see `CallOutput`."""

    criterion: Criterion | None  # ask for the output at once. Default: it waits until somebody asks
    max_tokens: int | None  # the most tokens; from 1. Default: the server's
    min_tokens: int | None  # the fewest tokens; 0 to max_tokens
    stop: Sequence[str] | None  # the text ends before the first of these; up to 16 strings of 1 to 256 bytes
    stop_token_ids: Sequence[int] | None  # the output ends at the first of these; up to 64 token ids
    ignore_eos: bool | None  # continue after the model's end-of-sequence tokens
    include_stop: bool | None  # keep the matched stop string in the text
    output_format: OutputFormat | None  # what the text may look like. Default: anything


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputOptions:
    """What to return of the distribution that follows one token of a forward pass.

    The client's counterpart of `types.ForwardOutputParams`, whose `sample` has every value of the sampling. Here it is
    a dict with the values that the caller chose, as in `generate`, and only these are sent.
    """

    index: int = 0  # the token, by its index in the pass's tokens, from 0
    # Sample a token this way, without penalties, logit_bias, allowed_token_ids and bad_words, which a pass does not
    # apply. None: do not sample.
    sample: SamplingOptions | None = None
    logprob_ids: Sequence[int] = ()  # return the log probabilities of these token ids; up to 1024
    top: int = 0  # return so many of the most likely tokens; 0 to 64
    logits: bool = False  # return the whole distribution. All outputs of a request together: up to 48 MiB
    entropy: bool = False  # return the entropy of the distribution
