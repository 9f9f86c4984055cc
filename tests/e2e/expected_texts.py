"""What the echo model says, computed without an engine."""

from __future__ import annotations

from jaxctx.model.text import Detokenizer
from tests.echo import echo_next, pairs_text


class Story:
    """What the echo model says after a text, and after what it has said."""

    def __init__(self, prompt: str) -> None:
        self._tokenizer = pairs_text().tokenizer
        self._ids = self._tokenizer.encode(prompt)

    def fill(self, text: str) -> Story:
        self._ids += self._tokenizer.encode(text)
        return self

    def say(self, tokens: int) -> str:
        """The text of the next output, of so many tokens."""
        detokenizer, text = Detokenizer(self._tokenizer, self._ids), ""
        for _ in range(tokens):
            self._ids.append(echo_next(self._ids))
            text += detokenizer.push(self._ids[-1:])
        return text + detokenizer.finish()


def expected_text(prompt: str, tokens: int) -> str:
    """What the echo model says after a text."""
    return Story(prompt).say(tokens)
