"""The Engine interface: what doors and dispatcher see of an engine, in process or remote.

Everything here is plain data. Requests arrive fully validated; an engine checks only what needs its state. All methods
are called on the door's asyncio loop; a local engine hands them to its step thread and answers from there.

Cancellation: cancelling the task that awaits a method, or closing the iterator of `generate`, ends the work within one
step; what was computed by then stays in the context. `deadline` is in seconds of the injected monotonic clock.

Answers are those of `jaxctx.answers`; requests are generated from the contract, as these are, and as the
methods that are one call of it each.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxctx import answers
from jaxctx.caller import Caller as Caller
from jaxctx.v1.engine_calls import EngineCalls, ProgramCalls
from jaxctx.v1.requests import *  # noqa: F403

LOCAL_ENGINE = "local"  # the id of the engine of this process
PROGRAM_LABELS: Mapping[str, str] = {"jaxctx": "program"}  # of contexts that are made for programs


def is_of_program(labels: Mapping[str, str]) -> bool:
    """Whether a context that is made with these labels is a program's, which lists show only if asked to."""
    return PROGRAM_LABELS.items() <= labels.items()


class ProgramEngine(ProgramCalls, Protocol):
    """What programs need of an engine. Every method may raise the errors of `jaxctx.errors`; NotFound for a context not
    the caller's.
    """

    info: answers.EngineInfo

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> answers.FillResult:
        """Append tokens, if any; compute what is buffered and in no committed page, or only buffer with `defer`."""

    async def stats(self) -> answers.EngineStats: ...


class Engine(ProgramEngine, EngineCalls, Protocol):
    """One engine: all that clients can ask of it."""

    async def plan(
        self, caller: Caller, tokens: Sequence[int], *, context_id: str | None = None, salt: str = ""
    ) -> answers.PlanResult:
        """Of an existing context extended by `tokens`, or of a new one filled with them."""

    async def drain(self) -> None:
        """Refuse new work with Unavailable, let running work finish, then return."""

    async def failure(self) -> str:
        """Return when the engine can do no more work, with what happened; every other call is Unavailable by then."""
