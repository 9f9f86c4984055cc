"""Output: sampled tokens to text, and when to stop. One per output of a generation, on the step thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.engine.interface import FinishReason, GenerateRequest
from jaxctx.model.text import Detokenizer, ModelText, StopMatcher


@dataclass(frozen=True, slots=True)
class Emitted:
    """What one token brought: text that is final, and whether the output ends with it."""

    text: str
    finish: FinishReason | None = None
    stop_match: str | int | None = None


class Output:
    """Counts tokens, decodes them without breaking a character, watches for stop tokens and stop strings.

    Text that may still become a stop string is held back until it cannot. A stop token's own text is not returned,
    its id is: it joined the context. Stop strings are looked for only in text sampled after `min_tokens`.
    """

    def __init__(self, request: GenerateRequest, text: ModelText, tail: Sequence[int]) -> None:
        """`tail`: the last tokens of the context, for tokenizers whose text depends on what came before."""
        self._request = request
        self.stop_ids = tuple(dict.fromkeys([*request.stop_token_ids, *(() if request.ignore_eos else text.eos_ids)]))
        self._detokenizer = Detokenizer(text.tokenizer, tail)
        self._matcher = StopMatcher(request.stop, include_stop=request.include_stop)
        self.tokens = 0

    def push(self, token: int, *, last: bool) -> Emitted:
        """Take the next token; `last` if there will be no other (max_tokens)."""
        self.tokens += 1
        if token in self.stop_ids and self.tokens > self._request.min_tokens:
            held = self._matcher.finish()
            stop_text = self._detokenizer.push([token]) if self._request.include_stop else ""
            return Emitted(held + stop_text + self._detokenizer.finish(), FinishReason.STOP, token)
        text = self._detokenizer.push([token])
        if self.tokens <= self._request.min_tokens:
            matched = None
        else:
            text, matched = self._matcher.push(text)
        if matched is not None:
            return Emitted(text, FinishReason.STOP, matched)
        if last:
            return Emitted(text + self._matcher.finish() + self._detokenizer.finish(), FinishReason.LENGTH)
        return Emitted(text)
