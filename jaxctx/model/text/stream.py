"""The text of one output as it streams: detokenised as soon as it is certain, and ended by stop strings.

A token's text depends on its neighbours (bytes of one character over several tokens, a leading space that exists only
inside a text), so a token cannot be decoded alone. Instead a short window is decoded: the tokens of the last text that
was emitted, as context, and the tokens pending since.

    … emitted … [ context | pending ]      text = decode(context + pending) − decode(context)

While the text ends in U+FFFD a character may be unfinished, and the text is held back. Text that may still become a
stop string is held back too, and nothing else. So the result does not depend on how the text was cut into pieces.
"""

from collections.abc import Iterable, Sequence

from jaxctx.model.text.tokenizer import Tokenizer

BROKEN = "\ufffd"
PRIMING = 6  # prompt tokens that serve as the first context
MAX_PENDING = 8  # more tokens without a whole character: some bytes are no character at all
CHARACTER = 4  # a character has at most so many bytes, hence tokens


class Detokenizer:
    """Text of one output, piece by piece, without special tokens unless they are asked for.

    The pieces, with that of `finish`, make up `tokenizer.decode` of all ids; after a prompt, the part that the ids add
    to it. Where the bytes are not UTF-8, each broken sequence becomes U+FFFD and whole characters before it stand, even
    if the decoder, seeing all at once, would have replaced them too.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, include_special_tokens: bool = False
    ) -> None:
        """`prompt`: the tokens before the output, or the last few of them (`PRIMING` suffice)."""
        self._tokenizer = tokenizer
        self._hidden = frozenset() if include_special_tokens else tokenizer.special_ids
        self._context: list[int] = []
        self._pending: list[int] = []
        self._known = ""  # text of the context
        tail = self._visible(prompt)[-PRIMING:]
        parts = [tail[start:] for start in range(len(tail))]
        whole = (part for part in parts if BROKEN not in self._decode(part))
        self._set_context(
            next(whole, tail)
        )  # the longest that does not begin inside a character; if need be, one that does

    def push(self, ids: Iterable[int]) -> str:
        """Take ids, return what has become certain; never part of a character. Ids must be in the vocabulary.

        How many come at once makes no difference.
        """
        return "".join([self._push(token) for token in self._visible(ids)])

    def _push(self, token: int) -> str:
        self._pending.append(token)
        text = self._text(self._pending)
        if not text.endswith(BROKEN):
            self._set_context(self._pending)
            return text
        # Emit all but the last few tokens, cut where the tokens after the cut do not change the text before it.
        for keep in range(CHARACTER, 2 * CHARACTER) if len(self._pending) > MAX_PENDING else ():
            certain, rest = self._text(self._pending[:-keep]), self._pending[-keep:]
            if text.startswith(certain):
                self._set_context(self._pending[:-keep])
                self._pending = rest
                return certain
        return ""

    def finish(self) -> str:
        """The rest; an unfinished character is U+FFFD."""
        text = self._text(self._pending)
        self._set_context(self._pending)
        return text

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._hidden]

    def _text(self, pending: list[int]) -> str:
        """The text that the pending tokens add to the context's text."""
        both = self._decode(self._context + pending)
        if both.startswith(self._known):
            return both[len(self._known) :]
        # The pending bytes changed how the context's are read, so these do not belong together.
        return self._decode(pending)

    def _set_context(self, context: list[int]) -> None:
        """Make `context` the context, with nothing pending."""
        if context:
            self._context, self._known = context, self._decode(context)
        self._pending = []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatcher:
    """Finds stop strings in one output.

    The string that is complete first ends the text; of several that are complete at the same character, the longest.
    After a match no more text is returned.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops`: not empty strings. With `include_stop` the matched string stays in the text."""
        self._stops = sorted(stops, key=len)
        self._include_stop = include_stop
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certain to be before any stop string, and the string that ended it, if one did."""
        if self.match is not None:
            return "", self.match
        text = self._held + text
        ends = {text.index(stop) + len(stop): stop for stop in self._stops if stop in text}
        if ends:
            end = min(ends)
            self.match, self._held = ends[end], ""
            return text[: end if self._include_stop else end - len(self.match)], self.match
        # How many characters at the end may begin a stop string; none is in the text.
        begun = (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n]))
        certain = len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """The text that was held back; called when no more text comes."""
        held, self._held = self._held, ""
        return held
