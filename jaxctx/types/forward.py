"""Passes over explicit tokens, positions and attention masks."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.types.contexts import ContextInfo
from jaxctx.types.generation import SamplingParams


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
