"""Progress of a start, on standard error: bars on a terminal, plain lines elsewhere. Called from the loading thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import rich.progress
from rich.console import Console

MEBIBYTE = 1 << 20
PAUSE_S = 2.0  # between plain lines of one task


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
def shown(stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Progress that is shown on `stream` for as long as the context lasts."""
    if not stream.isatty():
        yield plain_lines(stream, clock)
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


def plain_lines(stream: TextIO, clock: Callable[[], float]) -> Progress:
    """A line now and then, and one when each task is done."""
    next_s: dict[str, float] = {}

    def show(task: str, done: int, total: int, amount: str) -> None:
        now = clock()
        if done == total or now >= next_s.get(task, now):
            next_s[task] = now + PAUSE_S
            print(f"{task}: {amount}", file=stream, flush=True)

    return Progress(show)
