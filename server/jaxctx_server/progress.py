"""Progress of a start, on standard error: bars on a terminal, plain lines elsewhere. Called from the loading thread.

Some steps of a start take minutes and report nothing, so lines are also written when no step has reported for a while.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import rich.progress
from rich.console import Console

MEBIBYTE = 1 << 20
LINE_PERIOD_S = 2.0  # between plain lines of one task
SILENCE_S = 5.0  # without a plain line, until one says that the start goes on


@dataclass(frozen=True, slots=True)
class Progress:
    """What a start reports, and `show(task, done, total, amount)` that shows it."""

    show: Callable[[str, int, int, str], None]

    def weights(self, done: int, total: int) -> None:
        """Report how many bytes of the weights are loaded."""
        self.show("weights", done, total, f"{done / MEBIBYTE:,.1f}/{total / MEBIBYTE:,.1f} MiB")

    def compiled(self, name: str, done: int, total: int) -> None:
        """Function `name` is compiled, which makes `done` of `total`."""
        self.show("compiling", done, total, f"{done}/{total} {name}")


@contextmanager
def progress_shown(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Progress that is shown on `stream` for as long as the context lasts."""
    if not stream.isatty():
        with plain_lines(stream, clock) as progress:
            yield progress
        return
    columns = (
        rich.progress.TextColumn("{task.description:<9}"),
        rich.progress.BarColumn(40),
        rich.progress.TextColumn("{task.fields[amount]}"),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=Console(file=stream)) as bars:
        yield Progress(TaskBars(bars).show)


class TaskBars:
    """A bar for each task of a start."""

    def __init__(self, bars: rich.progress.Progress) -> None:
        self._bars = bars
        self._ids: dict[str, rich.progress.TaskID] = {}

    def show(self, task: str, done: int, total: int, amount: str) -> None:
        """How far a task is."""
        if task not in self._ids:
            self._ids[task] = self._bars.add_task(task, amount=amount)
        self._bars.update(self._ids[task], completed=done, total=total, amount=amount)


@contextmanager
def plain_lines(stream: TextIO, clock: Callable[[], float]) -> Iterator[Progress]:
    """A line now and then, one when each task is done, and one when there has been none for a while."""
    lines, ended = PlainLines(stream, clock), threading.Event()
    thread = threading.Thread(target=write_during_silence, args=(lines, ended), name="jaxctx-progress", daemon=True)
    thread.start()
    try:
        yield Progress(lines.show)
    finally:
        ended.set()
        thread.join()


def write_during_silence(lines: "PlainLines", ended: threading.Event) -> None:
    """Have a line written whenever there has been none for a while, until `ended` is set."""
    while not ended.wait(lines.silence_left_s()):
        lines.write_if_silent()


class PlainLines:
    """Lines of a start, each with the seconds since its beginning. Two threads call: the loading one, and the one that
    watches for silence.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._lock = threading.Lock()
        self._began = self._last = clock()
        self._next_line_at: dict[str, float] = {}  # by task
        self._current = "loading"  # what the start is doing

    def show(self, task: str, done: int, total: int, amount: str) -> None:
        """How far a task is."""
        with self._lock:
            now = self._clock()
            self._current = "starting" if done == total else f"{task}: {amount}"
            if done == total or now >= self._next_line_at.get(task, now):
                self._next_line_at[task] = now + LINE_PERIOD_S
                self._write(f"{task}: {amount}", now)

    def write_if_silent(self) -> None:
        """Write what goes on if there was no line for SILENCE_S."""
        with self._lock:
            now = self._clock()
            if now - self._last >= SILENCE_S:
                self._write(self._current, now)

    def silence_left_s(self) -> float:
        """Seconds until `write_if_silent` may have something to write."""
        with self._lock:
            return max(0.01, self._last + SILENCE_S - self._clock())

    def _write(self, text: str, now: float) -> None:
        self._last = now
        print(f"{text}, {now - self._began:.0f} s", file=self._stream, flush=True)
