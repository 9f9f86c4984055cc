"""OutputMatcher: which tokens may come next in one output, so that its text can become what its format allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from jaxtyping import Int32

from jaxctx.errors import FailedPrecondition, Internal, ResourceExhausted


@dataclass(frozen=True, slots=True)
class EndRules:
    """When an output may end, where more than its format decides it."""

    min_tokens: int
    stop_bits: Int32[np.ndarray, " words"]  # of all tokens that can end it
    ignored_bits: Int32[np.ndarray, " words"]  # of end-of-sequence tokens, if they are ignored; else none


class OutputMatcher:
    """The state of one output. It changes with every token; one thread at a time may use it."""

    def __init__(self, matcher: llguidance.LLMatcher, rules: EndRules) -> None:
        """Takes the matcher over."""
        self._matcher = matcher
        self._rules = rules
        self._tokens = 0

    def resume(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the output has already. Raises FailedPrecondition if they do not have the format."""
        self._tokens += len(tokens)
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise FailedPrecondition("the output to resume does not have its output_format")

    def take(self, token: int) -> None:
        """Take the next token, which must be one of the last mask. Raises ResourceExhausted as `mask` does."""
        self._tokens += 1
        if not self._matcher.consume_token(token):
            self._raise_if_failed()
            raise Internal("a token was sampled that the output's format does not allow")

    def mask(self) -> Int32[np.ndarray, " words"]:
        """The tokens that may come next: bit i % 32 of word i / 32 is set for token i. There is at least one.

        If others are left, it is without tokens that would end the output before `min_tokens`, and without
        end-of-sequence tokens that are ignored. Raises ResourceExhausted (GRAMMAR_LIMIT) if a limit of llguidance is
        met, and FailedPrecondition (NO_OUTPUT_FORMAT) if the vocabulary has no token that may come.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._raise_if_failed()
        allowed = np.zeros_like(self._rules.stop_bits)  # a model may have more rows than its tokenizer has entries
        words = min(len(allowed), len(bits))
        allowed[:words] = bits[:words]
        if not allowed.any():
            message = "output_format: the model's vocabulary has no token with which the output can go on"
            raise FailedPrecondition(message, reason="NO_OUTPUT_FORMAT")
        early = self._tokens < self._rules.min_tokens
        kept = allowed & ~(self._rules.stop_bits if early else self._rules.ignored_bits)
        return kept if kept.any() else allowed

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            message = f"output_format: cannot be followed any further: {brief(self._matcher.get_error())}"
            raise ResourceExhausted(message, reason="GRAMMAR_LIMIT")


def brief(error: str) -> str:
    """What llguidance says is wrong, in one line of at most 300 characters."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:297] + "..."


def token_bits(tokens: Sequence[int], words: int) -> Int32[np.ndarray, " words"]:
    """A mask of `words` words with the bits of these tokens; ids beyond it are left out."""
    bits = np.zeros(32 * words, np.bool_)
    bits[[token for token in tokens if 0 <= token < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
