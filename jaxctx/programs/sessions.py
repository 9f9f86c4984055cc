"""Sessions: a tenant's namespaces of variables and calls, and the one place where all of this room comes together.

A session ends when it is deleted, or was idle for its time to live: nobody asked anything of it and nothing of it ran.
Then its calls are cancelled and every page of them is given back; constant prefixes, which are the tenant's, live on
for a while of their own.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from weakref import WeakValueDictionary

from jaxctx.errors import (
    AlreadyExists,
    Cancelled,
    InvalidArgument,
    JaxctxError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from jaxctx.programs import native_functions
from jaxctx.programs.calls import Call, Task
from jaxctx.programs.dispatcher import Dispatcher, Policy
from jaxctx.programs.engine_registry import BEAT_S
from jaxctx.programs.executor import PREFIX_TIMEOUT_S, Execution
from jaxctx.programs.graph import Graph
from jaxctx.programs.template import Output, Segment, chains, constant_prefix
from jaxctx.programs.variables import Variable
from jaxctx.types import CallOutput, Criterion, Parameter, SessionInfo, SubmitCallRequest, TaskPhase

MAX_SESSIONS = 100  # of a tenant
MAX_VARIABLES = 4096  # of a session
MAX_TEXT_BYTES = 64 << 20  # of what a tenant's sessions were given
SWEEP_S = 1.0
RETRY_S = 5.0  # after which another session may have ended


class Session:
    """One of a tenant's sessions. Ids that it does not know are NotFound."""

    def __init__(self, programs: "Programs", session_id: str, tenant: str, ttl_s: float) -> None:
        self.id = session_id
        self.tenant = tenant
        self.ttl_s = ttl_s
        self.variables: dict[str, Variable] = {}
        self.calls: dict[str, Call] = {}
        self.graph = Graph(self._start, self._stop, programs.clock)
        self._programs = programs
        self._bytes = 0
        self._used_at = programs.clock()

    @property
    def info(self) -> SessionInfo:
        """As it is told."""
        return SessionInfo(
            session_id=self.id,
            ttl_s=self.ttl_s,
            variables=len(self.variables),
            calls=len(self.calls),
            started=sum(task.phase is TaskPhase.STARTED for task in self.tasks()),
        )

    def use(self) -> None:
        """Its time to live begins again."""
        self._used_at = self._programs.clock()

    def over(self) -> bool:
        """Whether its time to live has ended. It begins again while something runs."""
        if self._programs.clock() - self._used_at < self.ttl_s:
            return False
        if any(task.phase is TaskPhase.STARTED for task in self.tasks()):
            self.use()
            return False
        return True

    def tasks(self) -> list[Task]:
        """Of all calls, in the order of their coming."""
        return [task for call in self.calls.values() for task in call.tasks]

    def variable(self, variable_id: str) -> Variable:
        """One of its variables."""
        if (found := self.variables.get(variable_id)) is None:
            raise NotFound("the session has no such variable", reason="VARIABLE_NOT_FOUND")
        return found

    def add_variable(self, name: str, description: str = "", text: str | None = None) -> Variable:
        """A new variable; with a text one that is set."""
        self._bytes += self._room(1, description, text or "")
        variable = Variable(name, description)
        self.variables[variable.id] = variable
        if text is not None:
            variable.set(text)
        return variable

    def set(self, variable_id: str, text: str) -> Variable:
        """Give a variable its text. AlreadyExists if it has one, FailedPrecondition for the output of a call."""
        variable = self.variable(variable_id)
        variable.check_free()
        self._keep(text)
        variable.set(text)
        self.graph.settled(variable)
        return variable

    def ask(self, variable_id: str, criterion: Criterion) -> Variable:
        """Have a variable made, and all that it needs."""
        variable = self.variable(variable_id)
        self.graph.ask(variable, criterion)
        return variable

    def submit(self, request: SubmitCallRequest) -> Call:
        """Add a call or a native step, and run nothing of it but what a criterion asks for.

        Raises InvalidArgument naming what is wrong with what was asked, NotFound for a model or a variable.
        """
        if self._programs.draining:
            raise Unavailable("the server takes no more calls", reason="DRAINING", retry_after_s=5.0)
        function, template = request.function or "", request.template or ""
        engines = self._programs.dispatcher.engines
        model_id, longest = ("", float("inf")) if function else engines.model(request.model_id)
        stops = [stop for each in request.parameters if each.output is not None for stop in each.output.stop]
        texts = [each.text or "" for each in request.parameters]
        size = self._room(len(request.parameters), template, *texts, *stops)
        segments: dict[str, Segment] = {}
        for index, parameter in enumerate(request.parameters):
            if parameter.name in segments:
                raise InvalidArgument.field(f"parameters[{index}].name", "must be different from those before it")
            if (output := parameter.output) is not None and (output.max_tokens or 1) >= longest:
                raise InvalidArgument.field(f"parameters[{index}].output.max_tokens", f"must be below {longest}")
            if function and output is not None and output != CallOutput(criterion=output.criterion):
                raise InvalidArgument.field(f"parameters[{index}].output", "must have nothing but a criterion")
            segments[parameter.name] = self._segment(parameter)
        made = [self._programs.steps.chain(function, segments)] if function else chains(template, segments)
        call = Call(
            graph=self.graph,
            tenant=self.tenant,
            model_id=model_id,
            prefix=constant_prefix(template),
            timeout_s=request.timeout_s,
            chains=made,
        )
        self.graph.add(call)
        self.calls[call.id] = call
        self._bytes += size
        outputs = [task.chain.output for task in call.tasks]
        self.variables |= {each.variable.id: each.variable for each in outputs}
        for each in outputs:
            if each.settings.criterion is not None:
                self.graph.ask(each.variable, each.settings.criterion)
        return call

    def cancel(self, call_id: str) -> None:
        """Fail what has not ended of a call, and what needs it."""
        if (call := self.calls.get(call_id)) is None:
            raise NotFound("the session has no such call", reason="CALL_NOT_FOUND")
        for task in call.tasks:
            self.graph.fail(task, Cancelled("the call was cancelled"))

    def end(self, gone: JaxctxError) -> None:
        """Fail everything."""
        for task in self.tasks():
            self.graph.fail(task, gone)
        for variable in self.variables.values():
            variable.fail(gone)

    def _segment(self, parameter: Parameter) -> Segment:
        if (output := parameter.output) is None:
            return self.variable(parameter.variable_id) if parameter.variable_id else parameter.text or ""
        return Output(Variable(parameter.name), output)

    def _room(self, variables: int, *texts: str) -> int:
        """Bytes of the texts. Raises ResourceExhausted if there is no room for them and so many variables."""
        size, given = sum(len(text.encode()) for text in texts), self._programs.sessions(self.tenant)
        too_many = len(self.variables) + variables > MAX_VARIABLES  # which no time changes
        if too_many or sum(each._bytes for each in given) + size > MAX_TEXT_BYTES:
            message = f"a session has up to {MAX_VARIABLES} variables, a tenant {MAX_TEXT_BYTES} bytes of text"
            later_s = None if too_many or size > MAX_TEXT_BYTES else RETRY_S
            raise ResourceExhausted(message, reason="QUOTA", retry_after_s=later_s)
        return size

    def _keep(self, text: str) -> None:
        self._bytes += self._room(0, text)

    def _start(self, task: Task) -> None:
        try:
            task.prepare()
            if task.chain.function:
                task.running = asyncio.create_task(self._programs.steps.run(task, self._keep))
            else:
                self._programs.dispatcher.submit(task)
        except JaxctxError as error:
            self.graph.fail(task, error)

    def _stop(self, task: Task) -> None:
        if task.running is not None:
            task.running.cancel()  # or it has just come to its end
        self._programs.dispatcher.withdraw(task)
        self._programs.execution.ended(task)


class Programs:
    """All sessions, and the dispatcher that they share. Lives on the event loop; `attend` while it serves."""

    def __init__(
        self,
        clock: Callable[[], float],
        functions: Mapping[str, native_functions.Function] = native_functions.BUILT_IN,
        *,
        policy: Policy | None = None,
        prefix_timeout_s: float = PREFIX_TIMEOUT_S,
        beat_s: float = BEAT_S,
    ) -> None:
        """`clock` is that of deadlines, of all engines and of the sessions' time to live; `functions` are steps.

        Contexts of constant prefixes end `prefix_timeout_s` after their last use. For `beat_s` see `Engines`.
        """
        self.clock = clock
        self.steps = native_functions.NativeFunctions(functions)
        self.execution = Execution(clock, prefix_timeout_s)
        self.dispatcher = Dispatcher(self.execution.run, policy=policy, beat_s=beat_s)
        self.draining = False
        self.working: set[object] = set()  # calls of clients that are no program's, and for which a drain waits
        self.attending: WeakValueDictionary[str, asyncio.Task[None]] = WeakValueDictionary()  # to engines elsewhere
        self._sessions: dict[tuple[str, str], Session] = {}

    def create(self, tenant: str, ttl_s: float, session_id: str | None = None) -> Session:
        """A new session. AlreadyExists for an id that the tenant has, ResourceExhausted for one too many."""
        key = tenant, session_id or secrets.token_hex(16)
        if key in self._sessions:
            raise AlreadyExists("there is a session of this id")
        if sum(owner == tenant for owner, _ in self._sessions) >= MAX_SESSIONS:
            raise ResourceExhausted(
                f"a tenant has up to {MAX_SESSIONS} sessions", reason="QUOTA", retry_after_s=RETRY_S
            )
        session = self._sessions[key] = Session(self, key[1], tenant, ttl_s)
        return session

    def session(self, tenant: str, session_id: str) -> Session:
        """A tenant's session, which is used by that. NotFound for any other's, too."""
        session = self._sessions.get((tenant, session_id))
        if session is None or self._end_if_over(session):
            raise NotFound("there is no such session", reason="SESSION_NOT_FOUND")
        session.use()
        return session

    def sessions(self, tenant: str) -> list[Session]:
        """A tenant's, in the order of their ids."""
        return [session for (owner, _), session in sorted(self._sessions.items()) if owner == tenant]

    async def delete(self, tenant: str, session_id: str) -> None:
        """End a session; returns when its pages are given back."""
        self._end(self.session(tenant, session_id), Cancelled("the session was deleted"))
        await self.execution.released()

    async def attend(self, *engines: Coroutine[Any, Any, None]) -> None:
        """Watch over engines (see `Engines.attend`) and idle sessions. Never returns; cancelled, it ends them all."""
        watching = [asyncio.create_task(each) for each in engines]
        try:
            while True:
                for session in list(self._sessions.values()):
                    self._end_if_over(session)
                await asyncio.sleep(SWEEP_S)
        finally:
            for each in (*watching, *self.attending.values()):
                each.cancel()
            for session in list(self._sessions.values()):
                self._end(session, Unavailable("the server stops", reason="NOT_SERVING", retry_after_s=5.0))

    async def drain(self) -> None:
        """Take no more calls, and return when nothing is left of those that have all that they need."""
        self.draining = True
        while self.working or any(session.info.started for session in self._sessions.values()):
            await asyncio.sleep(SWEEP_S / 20)

    def _end_if_over(self, session: Session) -> bool:
        if over := session.over():
            self._end(session, Cancelled("the session's time to live ended"))
        return over

    def _end(self, session: Session, gone: JaxctxError) -> None:
        del self._sessions[session.tenant, session.id]
        session.end(gone)
