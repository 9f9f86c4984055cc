"""Sessions: a tenant's namespaces of variables and calls; and `Programs`, which holds them all and the dispatcher.

A session ends when it is deleted, or was idle for its time to live: no call used it and none of its tasks ran.
Then its calls are cancelled and all their pages are given back. Constant prefixes belong to the tenant and have a time
to live of their own.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from jaxctx.programs.dispatcher import Dispatcher, Policy
from jaxctx.programs.engine_registry import HEARTBEAT_S
from jaxctx.programs.executor import PREFIX_TIMEOUT_S, Executor
from jaxctx.programs.graph import Graph
from jaxctx.programs.native_functions import BUILT_IN_FUNCTIONS, Function, NativeFunctions
from jaxctx.programs.tasks import Call, Task
from jaxctx.programs.template import Output, Segment, constant_prefix, parse_template
from jaxctx.programs.variables import Variable
from jaxctx.types import CallOutput, Criterion, OutputFormat, Parameter, SessionInfo, SubmitCallRequest, TaskPhase

MAX_SESSIONS = 100  # of a tenant
MAX_VARIABLES = 4096  # of a session
MAX_TEXT_BYTES = 64 << 20  # of what a tenant's sessions were given
SWEEP_S = 1.0
RETRY_S = 5.0  # after which another session may have ended


class Session:
    """One session of a tenant: its variables, calls and graph. Ids that it does not know are NotFound."""

    def __init__(self, programs: "Programs", session_id: str, tenant: str, ttl_s: float) -> None:
        self.id = session_id
        self.tenant = tenant
        self.ttl_s = ttl_s
        self.variables: dict[str, Variable] = {}
        self.calls: dict[str, Call] = {}
        self.graph = Graph(
            self._start, self._stop, programs.dispatcher.regroup, programs.clock, programs.request_numbers
        )
        self.text_bytes = 0  # of all texts that clients have given it
        self._programs = programs
        self._used_at = programs.clock()

    @property
    def info(self) -> SessionInfo:
        """The session as the API states it."""
        return SessionInfo(
            session_id=self.id,
            ttl_s=self.ttl_s,
            variables=len(self.variables),
            calls=len(self.calls),
            started=sum(task.phase is TaskPhase.STARTED for task in self.tasks()),
        )

    @property
    def is_running(self) -> bool:
        """Whether a task of it is started."""
        return any(task.phase is TaskPhase.STARTED for task in self.tasks())

    @property
    def expires_at(self) -> float:
        """When its time to live ends, unless it is used or runs something."""
        return self._used_at + self.ttl_s

    def use(self) -> None:
        """Begin its time to live again."""
        self._used_at = self._programs.clock()

    def tasks(self) -> list[Task]:
        """Return the tasks of all calls, in the order in which they were submitted."""
        return [task for call in self.calls.values() for task in call.tasks]

    def variable(self, variable_id: str) -> Variable:
        """Return one of its variables. Raises NotFound."""
        found = self.variables.get(variable_id)
        if found is None:
            raise NotFound("the session has no such variable", reason="VARIABLE_NOT_FOUND")
        return found

    def create_variable(self, name: str, description: str = "", text: str | None = None) -> Variable:
        """Return a new variable, which is set if there is a text. Raises ResourceExhausted (QUOTA)."""
        self.text_bytes += self._check_quota(1, description, text or "")
        variable = Variable(name, description)
        self.variables[variable.id] = variable
        if text is not None:
            variable.set(text)
        return variable

    def set_variable(self, variable_id: str, text: str) -> Variable:
        """Give a variable its text. AlreadyExists if it has one, FailedPrecondition for the output of a call."""
        variable = self.variable(variable_id)
        variable.raise_if_not_settable()
        self._add_text(text)
        variable.set(text)
        self.graph.variable_set(variable)
        return variable

    def request(self, variable_id: str, criterion: Criterion) -> Variable:
        """Ask for a variable: the task that makes it runs, and all tasks that this one needs."""
        variable = self.variable(variable_id)
        self.graph.request(variable, criterion)
        return variable

    def submit(self, request: SubmitCallRequest) -> Call:
        """Add a call or a native step. Nothing of it runs but what a criterion asks for.

        Raises InvalidArgument naming the field that is wrong, NotFound for a model or a variable that there is not,
        ResourceExhausted (QUOTA) and Unavailable (DRAINING).
        """
        if self._programs.draining:
            raise Unavailable("the server takes no more calls", reason="DRAINING", retry_after_s=5.0)
        function, template = request.function or "", request.template or ""
        model_id, max_context_tokens = "", float("inf")
        if not function:
            model_id, max_context_tokens = self._programs.dispatcher.engines.find_model(request.model_id)
        text_bytes = self._check_quota(len(request.parameters), template, *_texts_of(request.parameters))
        segments = self._segments(request.parameters, max_context_tokens, is_function=bool(function))
        if function:
            specs = [self._programs.native_functions.task_spec(function, segments)]
        else:
            specs = parse_template(template, segments)
        call = Call(
            results=self.graph,
            tenant=self.tenant,
            model_id=model_id,
            prefix=constant_prefix(template),
            timeout_s=request.timeout_s,
        )
        call.add_tasks(specs)
        self.graph.add(call)
        self.calls[call.id] = call
        self.text_bytes += text_bytes
        for task in call.tasks:
            self.variables[task.output.id] = task.output
        for task in call.tasks:
            criterion = task.spec.output.settings.criterion
            if criterion is not None:
                self.graph.request(task.output, criterion)
        return call

    def cancel(self, call_id: str) -> None:
        """Fail what has not ended of a call, and what needs it. Raises NotFound."""
        call = self.calls.get(call_id)
        if call is None:
            raise NotFound("the session has no such call", reason="CALL_NOT_FOUND")
        for task in call.tasks:
            self.graph.fail(task, Cancelled("the call was cancelled"))

    def end(self, error: JaxctxError) -> None:
        """Fail everything with this error."""
        for task in self.tasks():
            self.graph.fail(task, error)
        for variable in self.variables.values():
            variable.fail(error)

    def _segments(
        self, parameters: Sequence[Parameter], max_context_tokens: float, *, is_function: bool
    ) -> dict[str, Segment]:
        """Return what stands at each placeholder, or the arguments of a function, by name. Raises InvalidArgument."""
        segments: dict[str, Segment] = {}
        for index, parameter in enumerate(parameters):
            if parameter.name in segments:
                raise InvalidArgument.field(f"parameters[{index}].name", "must be different from those before it")
            output = parameter.output
            if output is not None and (output.max_tokens or 1) >= max_context_tokens:
                field = f"parameters[{index}].output.max_tokens"
                raise InvalidArgument.field(field, f"must be below {max_context_tokens}")
            if is_function and output is not None and output != CallOutput(criterion=output.criterion):
                raise InvalidArgument.field(f"parameters[{index}].output", "must have nothing but a criterion")
            segments[parameter.name] = self._segment(parameter)
        return segments

    def _segment(self, parameter: Parameter) -> Segment:
        if parameter.output is not None:
            return Output(Variable(parameter.name, is_output=True), parameter.output)
        if parameter.variable_id:
            return self.variable(parameter.variable_id)
        return parameter.text or ""

    def _check_quota(self, variables: int, *texts: str) -> int:
        """Return the bytes of the texts. Raises ResourceExhausted if they, or so many new variables, are too many."""
        text_bytes = sum(len(text.encode()) for text in texts)
        tenant_bytes = sum(session.text_bytes for session in self._programs.sessions(self.tenant))
        too_many_variables = len(self.variables) + variables > MAX_VARIABLES
        if too_many_variables or tenant_bytes + text_bytes > MAX_TEXT_BYTES:
            message = f"a session has up to {MAX_VARIABLES} variables, a tenant {MAX_TEXT_BYTES} bytes of text"
            time_helps = not too_many_variables and text_bytes <= MAX_TEXT_BYTES
            raise ResourceExhausted(message, reason="QUOTA", retry_after_s=RETRY_S if time_helps else None)
        return text_bytes

    def _add_text(self, text: str) -> None:
        self.text_bytes += self._check_quota(0, text)

    def _start(self, task: Task) -> None:
        """Run a task that is ready: on an engine, or if it is a native step on a thread."""
        try:
            task.measure_prompt()
            if task.spec.function:
                task.function_run = asyncio.create_task(self._programs.native_functions.run(task, self._add_text))
            else:
                self._programs.dispatcher.submit(task)
        except JaxctxError as error:
            self.graph.fail(task, error)

    def _stop(self, task: Task) -> None:
        """Stop whatever runs of a task that has ended."""
        if task.function_run is not None:
            task.function_run.cancel()  # no effect if it has just come to its end
        self._programs.dispatcher.withdraw(task)
        self._programs.executor.task_ended(task)


def _texts_of(parameters: Sequence[Parameter]) -> list[str]:
    """Return the texts that count for the quota: those given, and of outputs stop strings, bad words and formats."""
    texts = [parameter.text or "" for parameter in parameters]
    for parameter in parameters:
        if parameter.output is not None:
            texts += parameter.output.stop
            texts += parameter.output.sampling.bad_words
            texts += _texts_of_format(parameter.output.output_format)
    return texts


def _texts_of_format(output_format: OutputFormat | None) -> list[str]:
    """Return the texts that an output's format has."""
    if output_format is None:
        return []
    given = [output_format.json_schema, output_format.regex, output_format.grammar, *(output_format.choices or ())]
    return [text for text in given if text is not None]


class Programs:
    """All sessions, and the dispatcher that they share. Lives on the event loop; run `watch` while it serves."""

    def __init__(
        self,
        clock: Callable[[], float],
        functions: Mapping[str, Function] = BUILT_IN_FUNCTIONS,
        *,
        policy: Policy | None = None,
        prefix_timeout_s: float = PREFIX_TIMEOUT_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`clock` is that of deadlines, of all engines and of the sessions' time to live; `functions` are the native
        functions by name. Contexts of constant prefixes end `prefix_timeout_s` after their last use. For `heartbeat_s`
        see `EngineRegistry`.
        """
        self.clock = clock
        self.native_functions = NativeFunctions(functions)
        self.executor = Executor(clock, prefix_timeout_s)
        self.dispatcher = Dispatcher(self.executor.run, policy=policy, heartbeat_s=heartbeat_s)
        self.request_numbers = itertools.count(1)  # of all sessions: what an older request needs goes first
        self.draining = False
        self.working: set[object] = set()  # calls of clients that are no program's, and for which a drain waits
        self.watching: WeakValueDictionary[str, asyncio.Task[None]] = WeakValueDictionary()  # engines elsewhere
        self._sessions: dict[str, dict[str, Session]] = {}  # by tenant and id; no tenant without sessions

    def create(self, tenant: str, ttl_s: float, session_id: str | None = None) -> Session:
        """Return a new session. AlreadyExists for an id that the tenant has, ResourceExhausted for one too many."""
        session_id = session_id or secrets.token_hex(16)
        others = self._sessions.get(tenant, {})
        if session_id in others:
            raise AlreadyExists("there is a session of this id")
        if len(others) >= MAX_SESSIONS:
            message = f"a tenant has up to {MAX_SESSIONS} sessions"
            raise ResourceExhausted(message, reason="QUOTA", retry_after_s=RETRY_S)
        session = Session(self, session_id, tenant, ttl_s)
        self._sessions.setdefault(tenant, {})[session_id] = session
        return session

    def session(self, tenant: str, session_id: str) -> Session:
        """Return a tenant's session; this counts as a use. NotFound for another tenant's too."""
        session = self._sessions.get(tenant, {}).get(session_id)
        if session is None or self._end_if_expired(session):
            raise NotFound("there is no such session", reason="SESSION_NOT_FOUND")
        session.use()
        return session

    def sessions(self, tenant: str) -> list[Session]:
        """Return a tenant's sessions, in the order of their ids."""
        return [session for _, session in sorted(self._sessions.get(tenant, {}).items())]

    def _all_sessions(self) -> list[Session]:
        """The sessions of all tenants."""
        return [session for sessions in self._sessions.values() for session in sessions.values()]

    async def delete(self, tenant: str, session_id: str) -> None:
        """End a session; return when its pages are given back."""
        self._end(self.session(tenant, session_id), Cancelled("the session was deleted"))
        await self.executor.wait_until_released(tenant)

    async def watch(self, *engines: Coroutine[Any, Any, None]) -> None:
        """Watch over engines (see `EngineRegistry.watch`) and idle sessions. Never returns; cancelled, it ends all."""
        watchers = [asyncio.create_task(each) for each in engines]
        try:
            while True:
                for session in self._all_sessions():
                    self._end_if_expired(session)
                await asyncio.sleep(SWEEP_S)
        finally:
            for each in (*watchers, *self.watching.values()):
                each.cancel()
            for session in self._all_sessions():
                self._end(session, Unavailable("the server stops", reason="NOT_SERVING", retry_after_s=5.0))

    async def drain(self) -> None:
        """Take no more calls, and return when everything that runs is done."""
        self.draining = True
        while self.working or any(session.is_running for session in self._all_sessions()):
            await asyncio.sleep(SWEEP_S / 20)

    def _end_if_expired(self, session: Session) -> bool:
        """End a session whose time to live is over; begin it again if something runs. Returns whether it ended."""
        if self.clock() < session.expires_at:
            return False
        if session.is_running:
            session.use()
            return False
        self._end(session, Cancelled("the session's time to live ended"))
        return True

    def _end(self, session: Session, error: JaxctxError) -> None:
        others = self._sessions[session.tenant]
        del others[session.id]
        if not others:
            del self._sessions[session.tenant]
        session.end(error)
