"""Semantic variables: texts that are set once, perhaps later, and those who wait for them.

    unset ──set──▶ set
      └─────fail─▶ failed

A variable never runs anything: asking for one is `Session.ask`. While an engine makes its text the parts are there to
be read; they are the text only when it is set.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from jaxctx.errors import AlreadyExists, FailedPrecondition, JaxctxError
from jaxctx.types import Criterion, VariableInfo, VariableState, named

if TYPE_CHECKING:
    from jaxctx.programs.calls import Task


class Variable:
    """A text future, of one session. `text` grows while it is made; `producer` None: somebody is to set it."""

    def __init__(self, name: str, description: str = "") -> None:
        self.id = secrets.token_hex(16)
        self.name = name
        self.description = description
        self.state = VariableState.UNSET
        self.text = ""
        self.error: JaxctxError | None = None
        self.producer: Task | None = None
        self.consumers: list[Task] = []
        self.asked: Criterion | None = None  # the strongest criterion with which it was asked for
        self._changed = asyncio.Event()  # of the state that is; replaced with every change

    def set(self, text: str) -> None:
        """It must be unset."""
        self.text, self.state = text, VariableState.SET
        self._tell()

    def fail(self, error: JaxctxError) -> None:
        """Whoever waits for it gets the error. Nothing happens to one that is set or has failed."""
        if self.state is VariableState.UNSET:
            self.error, self.state = error, VariableState.FAILED
            self._tell()

    def grow(self, part: str) -> None:
        """The next part of a text that is being made."""
        self.text += part
        self._tell()

    @property
    def info(self) -> VariableInfo:
        """As it is told."""
        why = {"error_reason": self.error.reason, "error_message": self.error.message} if self.error else {}
        return VariableInfo(**named(VariableInfo, self) | {"variable_id": self.id} | why)

    def check_free(self) -> None:
        """Raise AlreadyExists if it is set or has failed, FailedPrecondition if a call makes it."""
        if self.producer is not None:
            raise FailedPrecondition("the variable is the output of a call; only that sets it")
        if self.state is not VariableState.UNSET:
            raise AlreadyExists(f"the variable is {self.state.value}")

    async def wait(self) -> str:
        """The text, once it is set. Raises the error that it failed with."""
        async for _ in self.read():
            pass
        return self.text

    async def read(self) -> AsyncIterator[str]:
        """The text in parts, from its beginning, as they come; then the error if it failed."""
        read = 0
        while True:
            changed, part = self._changed, self.text[read:]
            if part:
                read += len(part)
                yield part
            elif self.error is not None:
                raise self.error.with_traceback(None)  # each reader its own
            elif self.state is VariableState.SET:
                return
            else:
                await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
