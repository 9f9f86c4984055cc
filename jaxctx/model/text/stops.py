"""Stop strings: found as text streams by, holding back only what could still become one.

One Knuth–Morris–Pratt automaton per string, a step per character: what is found does not depend on how the text was
cut into pieces. Of several strings the one that is complete first ends the text; of those complete at the same
character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """For one output. After a match nothing more comes out."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops`: not empty strings. With `include_stop` the matched string stays in the text."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per string, how many of its characters the text ends with
        self._include_stop = include_stop
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certain to be before any stop string, and the string that ended it, if one did."""
        if self.match is not None:
            return "", self.match
        if not self._stops:
            return text, None
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            stop = self._step(text[end])
            if stop is not None:
                self.match, self._held = stop, ""
                return text[: end + 1 if self._include_stop else end + 1 - len(stop)], stop
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance every automaton by a character; the longest string that it completes."""
        for i, stop in enumerate(self._stops):
            length, failures = self._matched[i], self._failures[i]
            while length and stop[length] != character:
                length = failures[length - 1]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    return stop
            self._matched[i] = length
        return None


def _failures(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failures[length - 1]
        length += pattern[i] == pattern[length]
        failures[i] = length
    return failures
