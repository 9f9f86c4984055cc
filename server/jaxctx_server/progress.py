"""Progress of a start, on standard error: bars on a terminal, plain lines elsewhere. Called from the loading thread.

Some steps of a start take minutes and report nothing, so that lines also come by themselves while nothing else does.
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
PAUSE_S = 2.0  # between plain lines of one task
STILL_S = 5.0  # without a plain line, until one says that the start goes on


@dataclass(frozen=True, slots=True)
class Progress:
    """What a start reports, and `show(task, done, total, amount)` that shows it."""

    show: Callable[[str, int, int, str], None]

    def weights(self, done: int, total: int) -> None:
        """So many bytes of the weights are there."""
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
        tasks: dict[str, rich.progress.TaskID] = {}

        def show(task: str, done: int, total: int, amount: str) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, amount=amount)
            bars.update(tasks[task], completed=done, total=total, amount=amount)

        yield Progress(show)


@contextmanager
def plain_lines(stream: TextIO, clock: Callable[[], float]) -> Iterator[Progress]:
    """A line now and then, one when each task is done, and one when there was none for long."""
    lines, ended = PlainLines(stream, clock), threading.Event()

    def go_on() -> None:
        while not ended.wait(lines.quiet_s()):
            lines.still()

    thread = threading.Thread(target=go_on, name="jaxctx-progress", daemon=True)
    thread.start()
    try:
        yield Progress(lines.show)
    finally:
        ended.set()
        thread.join()


class PlainLines:
    """What has been said, each time with the seconds since the beginning. `still` comes from a thread of its own."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._lock = threading.Lock()
        self._began = self._last = clock()
        self._next: dict[str, float] = {}
        self._doing = "loading"

    def show(self, task: str, done: int, total: int, amount: str) -> None:
        """How far a task is."""
        with self._lock:
            now = self._clock()
            self._doing = "starting" if done == total else f"{task}: {amount}"
            if done == total or now >= self._next.get(task, now):
                self._next[task] = now + PAUSE_S
                self._say(f"{task}: {amount}", now)

    def still(self) -> None:
        """Say what goes on if nothing was said for STILL_S."""
        with self._lock:
            now = self._clock()
            if now - self._last >= STILL_S:
                self._say(self._doing, now)

    def quiet_s(self) -> float:
        """Seconds until `still` may have something to say."""
        with self._lock:
            return max(0.01, self._last + STILL_S - self._clock())

    def _say(self, what: str, now: float) -> None:
        self._last = now
        print(f"{what}, {now - self._began:.0f} s", file=self._stream, flush=True)
