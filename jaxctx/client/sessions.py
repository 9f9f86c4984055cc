"""Programs of many calls: sessions, variables, and the calls that set them. Each operation once, for both clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxctx.answers import Criterion, SubmitCallResult, VariableInfo
from jaxctx.client import requests
from jaxctx.client.drive import listing, operation, outcome, outcomes
from jaxctx.client.link import Link
from jaxctx.client.templates import Output, Template
from jaxctx.errors import NotFound
from jaxctx.v1.operations import SessionCalls, VariableCalls


class VariableOperations(VariableCalls):
    """A text that is set once, by `set` or by a call, and every operation on it, as programs for either client."""

    def __init__(self, link: Link, info: VariableInfo) -> None:
        self.id = info.variable_id
        self.name = info.name
        self._link = link.about(variable_id=self.id)

    @operation
    async def get(self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None) -> str:
        """Its text, once it is set; what makes it runs, if it did not. If it failed, the error that it failed with."""
        found: VariableInfo = await outcome(self.look(criterion=criterion, wait=True, timeout_s=timeout_s))
        return found.text

    @listing
    async def read(
        self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None
    ) -> AsyncIterator[str]:
        """As `get`, in parts as they come. Leaving the iteration early cancels nothing but the reading."""
        async with aclosing(self._link.stream("ReadVariable", timeout_s, criterion=criterion)) as parts:
            async for part in parts:
                yield part.text

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id} {self.name}>"


Variable = TypeVar("Variable", bound=VariableOperations)


@dataclass(frozen=True, slots=True)
class Call(Generic[Variable]):
    """A semantic call that was submitted. `call["name"]` is the output of that place."""

    id: str  # for `session.cancel`
    outputs: Mapping[str, Variable]  # in the order in which they stand in the template

    def __getitem__(self, name: str) -> Variable:
        return self.outputs[name]

    @property
    def output(self) -> Variable:
        """The only one, or the last."""
        return list(self.outputs.values())[-1]


class SessionOperations(SessionCalls, Generic[Variable]):
    """A session's id, and every operation on it, as programs for either client."""

    _variable_class: Callable[[Link, VariableInfo], Variable]

    def __init__(self, link: Link, session_id: str) -> None:
        self.id = session_id
        self._link = link.about(session_id=session_id)

    def _made(self, info: VariableInfo) -> Variable:
        return self._variable_class(self._link, info)

    @operation
    async def create_variable(
        self, text: str | None = None, *, name: str = "", description: str = "", timeout_s: float | None = None
    ) -> Variable:
        """A new variable, set if a text is given. `name` and `description` are notes."""
        fields = {"text": text, "name": name, "description": description}
        return self._made(await self._link.ask("CreateVariable", timeout_s, VariableInfo, **fields))

    @operation
    async def variable(self, variable_id: str, *, timeout_s: float | None = None) -> Variable:
        """One that is there. NotFound if none has this id."""
        return self._made(await self._link.ask("GetVariable", timeout_s, VariableInfo, variable_id=variable_id))

    @listing
    async def variables(self, *, page: int = 100, timeout_s: float | None = None) -> AsyncIterator[Variable]:
        """All variables in the order of their ids, fetched `page` at a time."""
        async for info in self._link.items("ListVariables", timeout_s, VariableInfo, limit=page):
            yield self._made(info)

    @operation
    async def call(
        self, template: str | Template, /, *, timeout_s: float | None = None, **places: Any
    ) -> Call[Variable]:
        """Submit a semantic call, which runs when somebody asks for an output of it.

        What stands at a place is a text, a variable, the last output of a call, or an `Output` of this one.
        """
        asked = template if isinstance(template, Template) else Template(text=template)
        timeout = None if asked.limit_s is None else requests.duration("timeout", asked.limit_s)
        parameters = [{"name": name, **_standing(value)} for name, value in asked.filled(places).items()]
        fields = {"template": asked.text, "model_id": asked.model_id, "timeout": timeout, "parameters": parameters}
        call = await self._link.ask("SubmitCall", timeout_s, SubmitCallResult, **fields)
        return Call(call.call_id, {each.name: self._made(each) for each in call.outputs})

    @operation
    async def gather(
        self, *variables: Variable, criterion: Criterion = Criterion.LATENCY, timeout_s: float | None = None
    ) -> list[str]:
        """The texts of these, all of which are asked for before one is waited for; or the first error."""
        await outcomes([each.look(criterion=criterion, timeout_s=timeout_s) for each in variables])
        return await outcomes([each.get(criterion, timeout_s=timeout_s) for each in variables])

    @operation
    async def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel what runs and delete the session. What is gone already is no error."""
        with suppress(NotFound):
            await self._link.call("DeleteSession", timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}>"


def _standing(value: Any) -> dict[str, Any]:
    """The field of a parameter for what stands at a place."""
    if isinstance(value, Output):
        return {"output": value.fields}
    if isinstance(value, Call):
        value = value.output
    return {"variable_id": value.id} if isinstance(value, VariableOperations) else {"text": value}
