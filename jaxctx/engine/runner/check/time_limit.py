"""A time limit for the check: a kernel that never ends must not keep a server from starting, or from saying why not.

    calling thread ──starts──▶ checking thread: case, case, … ──▶ report
          ◀── the name of each case, then the report ──
          and nothing for longer than the limit: `NeverEnds`, with the case

A device runs what it is given in order, and nobody can take a program back from it. So behind one that never ends
nothing else runs in this process, not even the reference: the thread is left behind, and the process has to end,
without waiting for JAX, which would wait for the device. Another process gets the device once this one is gone. What
holds Python's lock for ever is not noticed; compilers, and who waits for a device, give it up.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Found = TypeVar("Found")

PREPARATION = "preparation"
"""What comes before the first case: pages are made."""


class NeverEnds(Exception):
    """A case took longer than the limit, and may run for ever. This process is to end; see the module."""

    def __init__(self, case: str, limit_s: float, what_now: str = "", of: str = "attention") -> None:
        """`what_now`: a clause for the user. `of`: what the kernel computes."""
        super().__init__(f"{case}: did not end within {limit_s:g} s" + (f"; {what_now}" if what_now else ""))
        self.case = case
        self.limit_s = limit_s
        self.of = of


@dataclass(frozen=True, slots=True)
class Result(Generic[Found]):
    """What a check found."""

    found: Found


def within_limit(limit_s: float, check: Callable[[Callable[[str], None]], Found]) -> Found:
    """What `check` finds, which runs on a thread of its own and has `limit_s` seconds for each case that it tells of.

    Raises NeverEnds, and what `check` raises.
    """
    said: SimpleQueue[str | Result[Found] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            said.put(Result(check(said.put)))
        except BaseException as error:  # the calling thread raises it
            said.put(error)

    threading.Thread(target=run, name="jaxctx-check", daemon=True).start()
    case = PREPARATION
    while True:
        try:
            message = said.get(timeout=limit_s)
        except Empty:
            raise NeverEnds(case, limit_s) from None
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, Result):
            return message.found
        case = message
