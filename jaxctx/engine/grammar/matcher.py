"""OutputMatcher: which tokens may come next in one output, by its format, its allowed tokens and its bad words."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from jaxtyping import Int32

from jaxctx.engine.grammar.token_rules import TokenRules
from jaxctx.errors import FailedPrecondition, Internal, ResourceExhausted


@dataclass(frozen=True, slots=True)
class EndRules:
    """When an output may end, where more than its format decides it."""

    min_tokens: int
    stop_bits: Int32[np.ndarray, " words"]  # of all tokens that can end it
    ignored_bits: Int32[np.ndarray, " words"]  # of end-of-sequence tokens, if they are ignored; else none


class OutputMatcher:
    """The state of one output. It changes with every token; one thread at a time may use it."""

    def __init__(self, grammar: llguidance.LLMatcher | None, end_rules: EndRules, token_rules: TokenRules) -> None:
        """Takes the matcher of the output's format over; None: it has no format."""
        self._grammar = grammar
        self._end_rules = end_rules
        self._token_rules = token_rules
        self._tokens = 0
        self._last: deque[int] = deque(
            maxlen=token_rules.history
        )  # the last tokens, as many as a bad word has before its last

    def resume(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the output has already. Raises FailedPrecondition if they do not have the format."""
        self._tokens += len(tokens)
        self._last.extend(tokens)
        if tokens and self._grammar is not None and not self._grammar.consume_tokens(list(tokens)):
            raise FailedPrecondition("the output to resume does not have its output_format")

    def take(self, token: int) -> None:
        """Take the next token, which must be one of the last mask. Raises ResourceExhausted as `mask` does."""
        self._tokens += 1
        self._last.append(token)
        if self._grammar is not None and not self._grammar.consume_token(token):
            self._raise_if_failed(self._grammar)
            raise Internal("a token was sampled that the output's format does not allow")

    def mask(self) -> Int32[np.ndarray, " words"]:
        """The tokens that may come next: bit i % 32 of word i / 32 is set for token i. There is at least one.

        If others are left, it is without tokens that would end the output before `min_tokens`, and without
        end-of-sequence tokens that are ignored. Raises ResourceExhausted (GRAMMAR_LIMIT) if a limit of llguidance is
        met, and FailedPrecondition if no token is left: NO_OUTPUT_FORMAT if the vocabulary has none that the format
        allows.
        """
        allowed = self._token_rules.allowed_after(self._last)
        if self._grammar is not None:
            allowed = allowed & self._allowed_by_grammar(self._grammar)
        if not allowed.any():
            raise FailedPrecondition("allowed_token_ids, bad_words and output_format leave no token to go on with")
        early = self._tokens < self._end_rules.min_tokens
        kept = allowed & ~(self._end_rules.stop_bits if early else self._end_rules.ignored_bits)
        return kept if kept.any() else allowed

    def _allowed_by_grammar(self, grammar: llguidance.LLMatcher) -> Int32[np.ndarray, " words"]:
        """The tokens with which the text can go on to have the format."""
        bits = np.frombuffer(grammar.compute_bitmask(), np.int32)
        self._raise_if_failed(grammar)
        allowed = np.zeros_like(self._end_rules.stop_bits)  # a model may have more rows than its tokenizer has entries
        words = min(len(allowed), len(bits))
        allowed[:words] = bits[:words]
        if not allowed.any():
            message = "output_format: the model's vocabulary has no token with which the output can go on"
            raise FailedPrecondition(message, reason="NO_OUTPUT_FORMAT")
        return allowed

    @staticmethod
    def _raise_if_failed(grammar: llguidance.LLMatcher) -> None:
        if grammar.is_error():
            message = f"output_format: cannot be followed any further: {brief(grammar.get_error())}"
            raise ResourceExhausted(message, reason="GRAMMAR_LIMIT")


def brief(error: str) -> str:
    """What llguidance says is wrong, in one line of at most 300 characters."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line if len(line) <= 300 else line[:297] + "..."
