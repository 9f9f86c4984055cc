"""Semantic variables: texts that are set once, perhaps later, and the readers who wait for them.

    unset ──set──▶ set
      └─────fail─▶ failed

A variable never runs anything: asking for one is `Session.ask`, and which task makes it is known by the graph. While
an engine generates its text, the parts can be read; they are the text only once the variable is set.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator

from jaxctx.errors import AlreadyExists, FailedPrecondition, JaxctxError
from jaxctx.types import Criterion, VariableInfo, VariableState


class Variable:
    """A text future of one session. `text` grows while it is generated.

    `is_output` says that a call makes it; otherwise a client is expected to set it.
    """

    def __init__(self, name: str, description: str = "", *, is_output: bool = False) -> None:
        self.id = secrets.token_hex(16)
        self.name = name
        self.description = description
        self.is_output = is_output
        self.state = VariableState.UNSET
        self.text = ""
        self.error: JaxctxError | None = None
        self.requested: Criterion | None = None  # the strongest criterion with which somebody asked for it
        self._changed = asyncio.Event()  # set, and replaced by a new one, at every change

    def set(self, text: str) -> None:
        """Set the text. The variable must be unset."""
        self.text = text
        self.state = VariableState.SET
        self._notify_readers()

    def fail(self, error: JaxctxError) -> None:
        """Give `error` to all who wait. A variable that is set or has failed stays as it is."""
        if self.state is VariableState.UNSET:
            self.error = error
            self.state = VariableState.FAILED
            self._notify_readers()

    def append(self, part: str) -> None:
        """Add the next part of a text that is being generated."""
        self.text += part
        self._notify_readers()

    @property
    def info(self) -> VariableInfo:
        """The variable as the API states it."""
        return VariableInfo(
            variable_id=self.id,
            name=self.name,
            description=self.description,
            state=self.state,
            text=self.text,
            error_reason=self.error.reason if self.error is not None else "",
            error_message=self.error.message if self.error is not None else "",
        )

    def raise_if_not_settable(self) -> None:
        """Raise AlreadyExists if it is set or has failed, FailedPrecondition if a call makes it."""
        if self.is_output:
            raise FailedPrecondition("the variable is the output of a call; only that sets it")
        if self.state is not VariableState.UNSET:
            raise AlreadyExists(f"the variable is {self.state.value}")

    async def wait(self) -> str:
        """Return the text once it is set. Raises the error that the variable failed with."""
        async for _ in self.read():
            pass
        return self.text

    async def read(self) -> AsyncIterator[str]:
        """Yield the text in parts, from its beginning, as they come. Raises the error that the variable failed with."""
        characters_read = 0
        while True:
            changed, part = self._changed, self.text[characters_read:]
            if part:
                characters_read += len(part)
                yield part
            elif self.error is not None:
                raise self.error.with_traceback(None)  # many readers raise it: none may add its frames for the others
            elif self.state is VariableState.SET:
                return
            else:
                await changed.wait()

    def _notify_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
