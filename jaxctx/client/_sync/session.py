# Generated from jaxctx/client/session.py by scripts/stubs. Not edited by hand.
"""Programs of many calls: sessions, semantic variables, and the calls that set them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from jaxctx import convert
from jaxctx.client import requests
from jaxctx.client._sync.channel import Channel, Closeable
from jaxctx.client.gathering import in_turn
from jaxctx.client.templates import Call, Template, parameter
from jaxctx.errors import NotFound
from jaxctx.types import Criterion, GraphTask, SessionInfo, VariableInfo
from jaxctx.v1 import session_service_pb2


class Variable:
    """A text of a session that is set once, by `set` or by a call. Made by its session's methods."""

    def __init__(self, channel: Channel, session_id: str, info: VariableInfo) -> None:
        self.id = info.variable_id
        self.name = info.name
        self._channel = channel
        self._session_id = session_id

    def get(self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None) -> str:
        """Its text, once it is set; the call that makes it runs, if it did not.

        Raises the error with which the variable failed, if it did.
        """
        return self.inspect(criterion=criterion, wait=True, timeout_s=timeout_s).text

    def read(self, criterion: Criterion = Criterion.LATENCY, *, timeout_s: float | None = None) -> Iterator[str]:
        """As `get`, in parts as they come. Leaving the iteration early cancels nothing but the reading."""
        request = requests.build_request(
            session_service_pb2.ReadVariableRequest,
            session_id=self._session_id,
            variable_id=self.id,
            criterion=criterion,
        )
        responses = self._channel.stream(self._channel.sessions.ReadVariable, request, timeout_s)
        with closing(responses) as parts:
            for part in parts:
                yield part.text

    def inspect(
        self, *, criterion: Criterion | None = None, wait: bool = False, timeout_s: float | None = None
    ) -> VariableInfo:
        """The variable as it is now, or once it is set.

        Args:
            criterion: Ask for the variable, so that the call that makes it runs. None: asking does not make it run.
            wait: Return when it is set. If it fails, its error is raised.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            session_service_pb2.GetVariableRequest,
            session_id=self._session_id,
            variable_id=self.id,
            criterion=criterion,
            wait=wait,
        )
        response = self._channel.call(self._channel.sessions.GetVariable, request, timeout_s)
        return convert.variable_info_from_proto(response.variable)

    def set(self, text: str, *, timeout_s: float | None = None) -> VariableInfo:
        """Set the variable to a text of up to 2 MiB, for ever.

        Raises AlreadyExists if it is set, FailedPrecondition if a call makes it.
        """
        request = requests.build_request(
            session_service_pb2.SetVariableRequest, session_id=self._session_id, variable_id=self.id, text=text
        )
        response = self._channel.call(self._channel.sessions.SetVariable, request, timeout_s)
        return convert.variable_info_from_proto(response.variable)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id} {self.name}>"


class Session(Closeable):
    """A namespace of variables on the server, and calls that set them. Made by `Client.create_session`.

    Leaving its `with` block deletes it, and cancels what runs in it; otherwise it stays until it was not used for
    its time to live.
    """

    def __init__(self, channel: Channel, info: SessionInfo) -> None:
        self.id = info.session_id
        self._channel = channel

    def _variable(self, info: VariableInfo) -> Variable:
        return Variable(self._channel, self.id, info)

    def info(self, *, timeout_s: float | None = None) -> SessionInfo:
        """The session and how much there is in it. Starts its time to live again, as every call here does."""
        request = requests.build_request(session_service_pb2.GetSessionRequest, session_id=self.id)
        response = self._channel.call(self._channel.sessions.GetSession, request, timeout_s)
        return convert.session_info_from_proto(response.session)

    def create_variable(
        self, name: str, *, description: str = "", text: str | None = None, timeout_s: float | None = None
    ) -> Variable:
        """A new variable, set or not.

        Args:
            name: Its name; up to 256 bytes, and need not be unique.
            description: A note; up to 4096 bytes.
            text: Its text, for ever; up to 2 MiB. None: to be set later.
            timeout_s: Deadline in seconds. None: the client's.
        """
        request = requests.build_request(
            session_service_pb2.CreateVariableRequest,
            session_id=self.id,
            name=name,
            description=description,
            text=text,
        )
        response = self._channel.call(self._channel.sessions.CreateVariable, request, timeout_s)
        return self._variable(convert.variable_info_from_proto(response.variable))

    def variable(self, variable_id: str, *, timeout_s: float | None = None) -> Variable:
        """A variable that exists. Raises NotFound if none has this id."""
        request = requests.build_request(
            session_service_pb2.GetVariableRequest, session_id=self.id, variable_id=variable_id
        )
        response = self._channel.call(self._channel.sessions.GetVariable, request, timeout_s)
        return self._variable(convert.variable_info_from_proto(response.variable))

    def variables(self, *, page: int = 100, timeout_s: float | None = None) -> Iterator[Variable]:
        """The session's variables in the order of their ids, fetched `page` (1 to 1000) at a time."""
        request = requests.build_request(session_service_pb2.ListVariablesRequest, session_id=self.id, limit=page)
        for response in self._channel.pages(self._channel.sessions.ListVariables, request, timeout_s):
            for variable in response.variables:
                yield self._variable(convert.variable_info_from_proto(variable))

    def call(self, template: str | Template, /, *, timeout_s: float | None = None, **places: Any) -> Call[Variable]:
        """Submit a semantic call or native step, which runs when somebody asks for an output of it.

        The value of a place is a text, a variable, the last output of a call, or an `Output` of this one.
        """
        if not isinstance(template, Template):
            template = Template(text=template)
        values = template.fill_places(places)
        request = requests.build_request(
            session_service_pb2.SubmitCallRequest,
            session_id=self.id,
            function=template.function or None,
            template=None if template.function else template.text,
            model_id=template.model_id,
            timeout=requests.duration_field("timeout", template.limit_s),
            parameters=[parameter(place, name, value) for place, (name, value) in enumerate(values.items())],
        )
        response = self._channel.call(self._channel.sessions.SubmitCall, request, timeout_s)
        submitted = convert.submit_call_result_from_proto(response)
        return Call(submitted.call_id, {output.name: self._variable(output) for output in submitted.outputs})

    def cancel(self, call_id: str, *, timeout_s: float | None = None) -> None:
        """Fail the tasks of a call that have not ended, and what needs them.

        Raises NotFound (CALL_NOT_FOUND) for an unknown call.
        """
        request = requests.build_request(session_service_pb2.CancelCallRequest, session_id=self.id, call_id=call_id)
        self._channel.call(self._channel.sessions.CancelCall, request, timeout_s)

    def graph(self, *, timeout_s: float | None = None) -> list[GraphTask]:
        """The tasks that make variables: how far each is, on which engine, and why there."""
        request = requests.build_request(session_service_pb2.GetGraphRequest, session_id=self.id)
        response = self._channel.call(self._channel.sessions.GetGraph, request, timeout_s)
        return [convert.graph_task_from_proto(task) for task in response.tasks]

    def gather(
        self, *variables: Variable, criterion: Criterion = Criterion.LATENCY, timeout_s: float | None = None
    ) -> list[str]:
        """The texts of these, all asked for before one is waited for; or the first error, once all have ended."""
        in_turn([each.inspect(criterion=criterion, timeout_s=timeout_s) for each in variables])
        return in_turn([each.get(criterion, timeout_s=timeout_s) for each in variables])

    def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel what runs and delete the session. What is gone already is no error."""
        request = requests.build_request(session_service_pb2.DeleteSessionRequest, session_id=self.id)
        with suppress(NotFound):
            self._channel.call(self._channel.sessions.DeleteSession, request, timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.id}>"
