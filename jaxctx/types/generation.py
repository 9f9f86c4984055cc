"""Outputs: how their tokens are sampled, what they may look like, and their pieces."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxctx.types.contexts import ContextInfo


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
