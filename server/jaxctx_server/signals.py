"""Signals that stop a process: the first SIGINT or SIGTERM stops it in order, a second one ends it at once."""

from collections.abc import Callable
from dataclasses import dataclass

SAME_SIGNAL_S = 0.3  # supervisors signal a process and its group: a signal so soon after the first is not a second


@dataclass(slots=True)
class StopSignals:
    """The handler of both signals. `clock` returns seconds."""

    stop: Callable[[], object]  # called at every signal
    end_now: Callable[[], object]  # called before that at a second signal, later than SAME_SIGNAL_S
    clock: Callable[[], float]
    first_at: float | None = None

    def handle(self, *_: object) -> None:
        """Handle one signal."""
        if self.first_at is None:
            self.first_at = self.clock()
        elif self.clock() - self.first_at > SAME_SIGNAL_S:
            self.end_now()
        self.stop()
