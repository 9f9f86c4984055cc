"""Sessions: values of a oneof, numbers that only a later server knows, and defaults of a call."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx import types
from jaxctx.convert import sessions
from jaxctx.v1 import session_service_pb2

UNKNOWN: Any = 99  # a number that only a later server knows


def test_numbers_that_only_a_later_server_knows() -> None:
    assert sessions.criterion_from_proto(UNKNOWN) is types.Criterion.THROUGHPUT
    assert sessions.variable_state_from_proto(UNKNOWN) is types.VariableState.UNSET
    assert sessions.task_phase_from_proto(UNKNOWN) is types.TaskPhase.IDLE
    task = session_service_pb2.GraphTask(criterion=UNKNOWN, phase=UNKNOWN)
    assert sessions.graph_task_from_proto(task).criterion is types.Criterion.THROUGHPUT
    assert sessions.graph_task_from_proto(task).phase is types.TaskPhase.IDLE
    variable = session_service_pb2.Variable(state=UNKNOWN)
    assert sessions.variable_info_from_proto(variable).state is types.VariableState.UNSET


def test_no_criterion_is_none() -> None:
    assert sessions.criterion_from_proto(session_service_pb2.CRITERION_UNSPECIFIED) is None
    assert sessions.criterion_to_proto(None) == session_service_pb2.CRITERION_UNSPECIFIED


def test_criteria_can_be_compared() -> None:
    assert types.Criterion.LATENCY > types.Criterion.THROUGHPUT


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        (types.Parameter(name="a"), None),
        (types.Parameter(name="a", text=""), "text"),
        (types.Parameter(name="a", variable_id=""), "variable_id"),
        (types.Parameter(name="a", output=types.CallOutput()), "output"),
    ],
    ids=["nothing", "empty text", "empty id", "output by default"],
)
def test_a_parameter_has_one_value_or_none(parameter: types.Parameter, value: str | None) -> None:
    sent = sessions.parameter_to_proto(parameter)
    assert sent.WhichOneof("value") == value
    assert sessions.parameter_from_proto(sent) == parameter


def test_a_call_with_a_template() -> None:
    output = session_service_pb2.CallOutput(criterion=session_service_pb2.CRITERION_LATENCY, max_tokens=4)
    places: Any = [{"name": "a", "text": ""}, {"name": "b", "variable_id": "v"}, {"name": "c", "output": output}]
    request = session_service_pb2.SubmitCallRequest(session_id="s", template="t", parameters=places)
    call = sessions.submit_call_request_from_proto(request)
    assert (call.template, call.function, call.timeout_s) == ("t", None, 600.0)
    assert [(each.text, each.variable_id) for each in call.parameters] == [("", None), (None, "v"), (None, None)]
    assert call.parameters[2].output == types.CallOutput(criterion=types.Criterion.LATENCY, max_tokens=4)
    assert sessions.submit_call_request_from_proto(sessions.submit_call_request_to_proto(call)) == call


def test_a_call_has_a_template_or_a_function() -> None:
    step = types.SubmitCallRequest(function="strip", parameters=())
    sent = sessions.submit_call_request_to_proto(step, session_id="s")
    assert (sent.session_id, sent.function, sent.HasField("template")) == ("s", "strip", False)
    assert sessions.submit_call_request_from_proto(sent) == step
    empty = types.SubmitCallRequest(template="", parameters=())
    sent = sessions.submit_call_request_to_proto(empty)
    assert (sent.HasField("template"), sent.HasField("function")) == (True, False)
    assert sessions.submit_call_request_from_proto(sent) == empty


def test_a_call_that_names_no_timeout_has_the_default() -> None:
    request = session_service_pb2.SubmitCallRequest(template="t")
    assert sessions.submit_call_request_from_proto(request).timeout_s == sessions.DEFAULT_CALL_TIMEOUT_S == 600.0
    request.timeout.FromSeconds(2)
    assert sessions.submit_call_request_from_proto(request).timeout_s == 2.0
    request.timeout.FromSeconds(0)
    assert sessions.submit_call_request_from_proto(request).timeout_s == 0.0


def test_an_output_without_max_tokens_leaves_them_to_the_server() -> None:
    assert sessions.call_output_from_proto(session_service_pb2.CallOutput()) == types.CallOutput()
    assert not sessions.call_output_to_proto(types.CallOutput()).HasField("max_tokens")
    assert sessions.call_output_from_proto(session_service_pb2.CallOutput(max_tokens=0)).max_tokens == 0


def test_the_time_to_live_of_a_session_is_in_seconds() -> None:
    info = types.SessionInfo(session_id="s", ttl_s=1.5, variables=1, calls=2, started=3)
    sent = sessions.session_info_to_proto(info)
    assert (sent.ttl.seconds, sent.ttl.nanos) == (1, 500_000_000)
    assert (sent.variables, sent.calls, sent.started) == (1, 2, 3)
    assert sessions.session_info_from_proto(sent) == info


def test_outputs_of_a_call_stay_in_their_order() -> None:
    outputs = [
        types.VariableInfo(
            variable_id=name,
            name=name,
            description="",
            state=types.VariableState.UNSET,
            text="",
            error_reason="",
            error_message="",
        )
        for name in ("b", "a")
    ]
    sent = sessions.submit_call_result_to_proto(types.SubmitCallResult(call_id="c", outputs=outputs))
    assert [variable.variable_id for variable in sent.outputs] == ["b", "a"]
    assert sessions.submit_call_result_from_proto(sent).outputs == tuple(outputs)


def test_a_failed_variable_has_its_error() -> None:
    message = session_service_pb2.Variable(
        state=session_service_pb2.VARIABLE_STATE_FAILED, error_reason="QUOTA", error_message="too many"
    )
    info = sessions.variable_info_from_proto(message)
    assert (info.state, info.error_reason, info.error_message) == (types.VariableState.FAILED, "QUOTA", "too many")
