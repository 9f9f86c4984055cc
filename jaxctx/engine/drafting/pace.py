"""DraftPace: how many tokens the draft model guesses ahead for one request, by how many of the last were right."""

from dataclasses import dataclass

FIRST_DRAFTS = 4  # of a request whose text nothing is known of
MORE_DRAFTS = 2  # after guesses that were all right
MAX_PAUSE = 32  # tokens without guesses after wrong ones: each costs a step of the draft model
PAUSE_WITHOUT_PAGES = 64  # tokens, after the draft model had no page for the request


@dataclass(slots=True)
class DraftPace:
    """See the module docstring. It grows while all guesses are right, else it shrinks; none right: a pause.

    A pause is twice as long as the one before, until a guess is right again.
    """

    _count: int = FIRST_DRAFTS
    _pause: int = 0
    _resume_at: int = 0  # tokens of the context
    _is_over: bool = False

    def count(self, length: int, limit: int) -> int:
        """Tokens to guess behind a context of `length` tokens, at most `limit`; 0 in a pause."""
        return 0 if self._is_over or length < self._resume_at else max(0, min(self._count, limit))

    def update(self, length: int, drafted: int, accepted: int) -> None:
        """Note that of `drafted` guesses so many were right; the context has `length` tokens now."""
        if accepted == drafted:
            self._count = max(self._count, drafted + MORE_DRAFTS)
        else:
            self._count = max(accepted + 1, 1)
        self._pause = 0 if accepted else min(2 * self._pause + 1, MAX_PAUSE)
        self._resume_at = length + self._pause

    def wait_for_pages(self, length: int) -> None:
        """Note that the draft model had no page for the request, whose context has `length` tokens now."""
        self._resume_at = length + PAUSE_WITHOUT_PAGES

    def end(self) -> None:
        """Note that the draft model cannot read a token of the request: no guess follows any more."""
        self._is_over = True
