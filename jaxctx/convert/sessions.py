"""Sessions: variables, calls, and the graph of tasks that sets variables."""

from jaxctx.convert.generation import (
    output_format_from_proto,
    output_format_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
)
from jaxctx.convert.times import duration_from_proto, duration_to_proto
from jaxctx.types import (
    CallOutput,
    Criterion,
    GraphTask,
    Parameter,
    SessionInfo,
    SubmitCallRequest,
    SubmitCallResult,
    TaskPhase,
    VariableInfo,
    VariableState,
)
from jaxctx.v1 import session_service_pb2

DEFAULT_CALL_TIMEOUT_S = SubmitCallRequest(parameters=()).timeout_s  # of a call that names none

_CRITERION_TO_PROTO = {
    Criterion.THROUGHPUT: session_service_pb2.CRITERION_THROUGHPUT,
    Criterion.TIME_PER_OUTPUT_TOKEN: session_service_pb2.CRITERION_TIME_PER_OUTPUT_TOKEN,
    Criterion.TIME_TO_FIRST_TOKEN: session_service_pb2.CRITERION_TIME_TO_FIRST_TOKEN,
    Criterion.LATENCY: session_service_pb2.CRITERION_LATENCY,
}
_CRITERION_FROM_PROTO: dict[int, Criterion] = {number: member for member, number in _CRITERION_TO_PROTO.items()}

_VARIABLE_STATE_TO_PROTO = {
    VariableState.UNSET: session_service_pb2.VARIABLE_STATE_UNSET,
    VariableState.SET: session_service_pb2.VARIABLE_STATE_SET,
    VariableState.FAILED: session_service_pb2.VARIABLE_STATE_FAILED,
}
_VARIABLE_STATE_FROM_PROTO: dict[int, VariableState] = {
    number: member for member, number in _VARIABLE_STATE_TO_PROTO.items()
}

_TASK_PHASE_TO_PROTO = {
    TaskPhase.IDLE: session_service_pb2.TASK_PHASE_IDLE,
    TaskPhase.WAITING: session_service_pb2.TASK_PHASE_WAITING,
    TaskPhase.STARTED: session_service_pb2.TASK_PHASE_STARTED,
    TaskPhase.DONE: session_service_pb2.TASK_PHASE_DONE,
    TaskPhase.FAILED: session_service_pb2.TASK_PHASE_FAILED,
}
_TASK_PHASE_FROM_PROTO: dict[int, TaskPhase] = {number: member for member, number in _TASK_PHASE_TO_PROTO.items()}


def criterion_from_proto(number: int) -> Criterion | None:
    """The criterion of this number; None for 0. A number that only a later version knows is THROUGHPUT."""
    if number == session_service_pb2.CRITERION_UNSPECIFIED:
        return None
    return _CRITERION_FROM_PROTO.get(number, Criterion.THROUGHPUT)


def criterion_to_proto(value: Criterion | None) -> session_service_pb2.Criterion.ValueType:
    """The criterion's number; 0 for None."""
    return session_service_pb2.CRITERION_UNSPECIFIED if value is None else _CRITERION_TO_PROTO[value]


def variable_state_from_proto(number: int) -> VariableState:
    """The state. A number that only a later version knows is UNSET."""
    return _VARIABLE_STATE_FROM_PROTO.get(number, VariableState.UNSET)


def variable_state_to_proto(value: VariableState) -> session_service_pb2.VariableState.ValueType:
    """The state's number."""
    return _VARIABLE_STATE_TO_PROTO[value]


def task_phase_from_proto(number: int) -> TaskPhase:
    """The phase. A number that only a later version knows is IDLE."""
    return _TASK_PHASE_FROM_PROTO.get(number, TaskPhase.IDLE)


def task_phase_to_proto(value: TaskPhase) -> session_service_pb2.TaskPhase.ValueType:
    """The phase's number."""
    return _TASK_PHASE_TO_PROTO[value]


def session_info_from_proto(message: session_service_pb2.Session) -> SessionInfo:
    """A session and how much there is in it."""
    return SessionInfo(
        session_id=message.session_id,
        ttl_s=duration_from_proto(message.ttl),
        variables=message.variables,
        calls=message.calls,
        started=message.started,
    )


def session_info_to_proto(value: SessionInfo) -> session_service_pb2.Session:
    """A session and how much there is in it."""
    return session_service_pb2.Session(
        session_id=value.session_id,
        ttl=duration_to_proto(value.ttl_s),
        variables=value.variables,
        calls=value.calls,
        started=value.started,
    )


def variable_info_from_proto(message: session_service_pb2.Variable) -> VariableInfo:
    """A variable and its text."""
    return VariableInfo(
        variable_id=message.variable_id,
        name=message.name,
        description=message.description,
        state=variable_state_from_proto(message.state),
        text=message.text,
        error_reason=message.error_reason,
        error_message=message.error_message,
    )


def variable_info_to_proto(value: VariableInfo) -> session_service_pb2.Variable:
    """A variable and its text."""
    return session_service_pb2.Variable(
        variable_id=value.variable_id,
        name=value.name,
        description=value.description,
        state=variable_state_to_proto(value.state),
        text=value.text,
        error_reason=value.error_reason,
        error_message=value.error_message,
    )


def call_output_from_proto(message: session_service_pb2.CallOutput) -> CallOutput:
    """An output of a call."""
    return CallOutput(
        criterion=criterion_from_proto(message.criterion),
        sampling=sampling_params_from_proto(message.sampling),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        output_format=output_format_from_proto(message.output_format) if message.HasField("output_format") else None,
    )


def call_output_to_proto(value: CallOutput) -> session_service_pb2.CallOutput:
    """An output of a call."""
    return session_service_pb2.CallOutput(
        criterion=criterion_to_proto(value.criterion),
        sampling=sampling_params_to_proto(value.sampling),
        max_tokens=value.max_tokens,
        min_tokens=value.min_tokens,
        stop=value.stop,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        include_stop=value.include_stop,
        output_format=None if value.output_format is None else output_format_to_proto(value.output_format),
    )


def parameter_from_proto(message: session_service_pb2.Parameter) -> Parameter:
    """The value of a place in a template: exactly one of a text, a variable and an output is not None."""
    return Parameter(
        name=message.name,
        text=message.text if message.HasField("text") else None,
        variable_id=message.variable_id if message.HasField("variable_id") else None,
        output=call_output_from_proto(message.output) if message.HasField("output") else None,
    )


def parameter_to_proto(value: Parameter) -> session_service_pb2.Parameter:
    """The value of a place in a template: a text, a variable or an output."""
    if value.output is not None:
        return session_service_pb2.Parameter(name=value.name, output=call_output_to_proto(value.output))
    if value.variable_id is not None:
        return session_service_pb2.Parameter(name=value.name, variable_id=value.variable_id)
    if value.text is not None:
        return session_service_pb2.Parameter(name=value.name, text=value.text)
    return session_service_pb2.Parameter(name=value.name)


def submit_call_request_from_proto(message: session_service_pb2.SubmitCallRequest) -> SubmitCallRequest:
    """A semantic call or native step: exactly one of `template` and `function` is not None."""
    return SubmitCallRequest(
        model_id=message.model_id,
        template=message.template if message.HasField("template") else None,
        function=message.function if message.HasField("function") else None,
        parameters=tuple(parameter_from_proto(each) for each in message.parameters),
        timeout_s=duration_from_proto(message.timeout) if message.HasField("timeout") else DEFAULT_CALL_TIMEOUT_S,
    )


def submit_call_request_to_proto(
    value: SubmitCallRequest, *, session_id: str = ""
) -> session_service_pb2.SubmitCallRequest:
    """A semantic call or native step of this session."""
    message = session_service_pb2.SubmitCallRequest(
        session_id=session_id,
        model_id=value.model_id,
        parameters=[parameter_to_proto(each) for each in value.parameters],
        timeout=duration_to_proto(value.timeout_s),
    )
    if value.function is not None:
        message.function = value.function
    elif value.template is not None:
        message.template = value.template
    return message


def submit_call_result_from_proto(message: session_service_pb2.SubmitCallResponse) -> SubmitCallResult:
    """A call that was submitted."""
    return SubmitCallResult(
        call_id=message.call_id,
        outputs=tuple(variable_info_from_proto(each) for each in message.outputs),
    )


def submit_call_result_to_proto(value: SubmitCallResult) -> session_service_pb2.SubmitCallResponse:
    """A call that was submitted."""
    return session_service_pb2.SubmitCallResponse(
        call_id=value.call_id,
        outputs=[variable_info_to_proto(each) for each in value.outputs],
    )


def graph_task_from_proto(message: session_service_pb2.GraphTask) -> GraphTask:
    """A task, which makes a variable."""
    return GraphTask(
        call_id=message.call_id,
        phase=task_phase_from_proto(message.phase),
        criterion=criterion_from_proto(message.criterion),
        inputs=tuple(message.inputs),
        output=message.output,
        engine_id=message.engine_id,
        why=message.why,
        function=message.function,
        context_id=message.context_id,
    )


def graph_task_to_proto(value: GraphTask) -> session_service_pb2.GraphTask:
    """A task, which makes a variable."""
    return session_service_pb2.GraphTask(
        call_id=value.call_id,
        phase=task_phase_to_proto(value.phase),
        criterion=criterion_to_proto(value.criterion),
        inputs=value.inputs,
        output=value.output,
        engine_id=value.engine_id,
        why=value.why,
        function=value.function,
        context_id=value.context_id,
    )
