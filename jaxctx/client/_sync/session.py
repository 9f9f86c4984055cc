# Generated from jaxctx/client/session.py by scripts/stubs. Not edited by hand.
"""Programs of many calls: sessions, variables, and the calls that set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from jaxctx.client import requests
from jaxctx.client._sync.channel import AsyncCloseable, Channel
from jaxctx.client._sync.operations import SessionCalls, VariableCalls
from jaxctx.client.gathering import in_turn
from jaxctx.client.templates import Call, Template, standing
from jaxctx.errors import NotFound
from jaxctx.types import Criterion, SessionInfo, SubmitCallResult, VariableInfo


class Variable(VariableCalls):
    """A text of a session that is set once, by `set` or by a call. Made by its session's methods."""

    def __init__(self, link: Channel, info: VariableInfo) -> None:
        self.id = info.variable_id
        self.name = info.name
        self._link = link.about(variable_id=self.id)

    def get(self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None) -> str:
        """Its text, once it is set; what makes it runs, if it did not. If it failed, the error that it failed with."""
        return self.look(criterion=criterion, wait=True, timeout_s=timeout_s).text

    def read(self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None) -> Iterator[str]:
        """As `get`, in parts as they come. Leaving the iteration early cancels nothing but the reading."""
        with closing(self._link.stream("ReadVariable", timeout_s, criterion=criterion)) as parts:
            for part in parts:
                yield part.text

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id} {self.name}>"


class Session(SessionCalls[Variable], AsyncCloseable):
    """A namespace of variables on the server, and calls that set them. Made by `Client.create_session`.

    Leaving its `with` block deletes it, and cancels what runs in it; otherwise it lives until it is not used for
    its time to live.
    """

    def __init__(self, link: Channel, info: SessionInfo) -> None:
        self.id = info.session_id
        self._link = link.about(session_id=self.id)

    def _variable(self, info: VariableInfo) -> Variable:
        return Variable(self._link, info)

    def variable(self, variable_id: str, *, timeout_s: float | None = None) -> Variable:
        """One that is there. NotFound if none has this id."""
        return self._variable(self._link.ask("GetVariable", timeout_s, VariableInfo, variable_id=variable_id))

    def call(self, template: str | Template, /, *, timeout_s: float | None = None, **places: Any) -> Call[Variable]:
        """Submit a semantic call or native step, which runs when somebody asks for an output of it.

        What stands at a place is a text, a variable, the last output of a call, or an `Output` of this one.
        """
        asked = template if isinstance(template, Template) else Template(text=template)
        timeout = requests.duration("timeout", asked.limit_s)
        parameters = [{"name": name, **standing(value)} for name, value in asked.filled(places).items()]
        what = {"function": asked.function} if asked.function else {"template": asked.text}
        fields = {**what, "model_id": asked.model_id, "timeout": timeout, "parameters": parameters}
        call = self._link.ask("SubmitCall", timeout_s, SubmitCallResult, **fields)
        return Call(call.call_id, {each.name: self._variable(each) for each in call.outputs})

    def gather(
        self, *variables: Variable, criterion: Criterion = Criterion.LATENCY, timeout_s: float | None = None
    ) -> list[str]:
        """The texts of these, all asked for before one is waited for; or the first error, once all have ended."""
        in_turn([each.look(criterion=criterion, timeout_s=timeout_s) for each in variables])
        return in_turn([each.get(criterion, timeout_s=timeout_s) for each in variables])

    def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel what runs and delete the session. What is gone already is no error."""
        with suppress(NotFound):
            self._link.call("DeleteSession", timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}>"
