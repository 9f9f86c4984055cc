"""Requests and results as messages and back: every class, full and empty; numbers that only a later server knows."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest

from jaxctx import convert, types
from jaxctx.v1 import (
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
)
from tests.jaxctx.contract import ENUMS, PAIRS


class Conversion(NamedTuple):
    """The two functions between a class and a message."""

    kind: type[Any]
    message: Any
    from_proto: Callable[[Any], Any]
    to_proto: Callable[[Any], Any]


CONVERSIONS = [
    Conversion(
        types.EngineInfo, admin_service_pb2.EngineInfo, convert.engine_info_from_proto, convert.engine_info_to_proto
    ),
    Conversion(
        types.EngineStats, admin_service_pb2.EngineStats, convert.engine_stats_from_proto, convert.engine_stats_to_proto
    ),
    Conversion(
        types.EngineStatus, admin_service_pb2.Engine, convert.engine_status_from_proto, convert.engine_status_to_proto
    ),
    Conversion(types.Expiry, lifetime_pb2.Expiry, convert.expiry_from_proto, convert.expiry_to_proto),
    Conversion(types.Ttl, lifetime_pb2.Ttl, convert.ttl_from_proto, convert.ttl_to_proto),
    Conversion(types.ContextInfo, context_pb2.Context, convert.context_info_from_proto, convert.context_info_to_proto),
    Conversion(
        types.FillResult, context_service_pb2.FillResponse, convert.fill_result_from_proto, convert.fill_result_to_proto
    ),
    Conversion(
        types.FillResult,
        context_service_pb2.FlushResponse,
        convert.flush_response_from_proto,
        convert.flush_response_to_proto,
    ),
    Conversion(
        types.FillResult,
        snapshot_service_pb2.OpenResponse,
        convert.open_response_from_proto,
        convert.open_response_to_proto,
    ),
    Conversion(
        types.FillResult,
        snapshot_service_pb2.TakeResponse,
        convert.take_response_from_proto,
        convert.take_response_to_proto,
    ),
    Conversion(
        types.TokenLogprob,
        generation_pb2.TokenLogprob,
        convert.token_logprob_from_proto,
        convert.token_logprob_to_proto,
    ),
    Conversion(types.Usage, generation_pb2.Usage, convert.usage_from_proto, convert.usage_to_proto),
    Conversion(
        types.GeneratePiece,
        context_service_pb2.GenerateResponse,
        convert.generate_piece_from_proto,
        convert.generate_piece_to_proto,
    ),
    Conversion(
        types.ForwardOutputParams,
        forward_pb2.ForwardOutputParams,
        convert.forward_output_params_from_proto,
        convert.forward_output_params_to_proto,
    ),
    Conversion(
        types.ForwardOutputResult,
        forward_pb2.ForwardOutputResult,
        convert.forward_output_result_from_proto,
        convert.forward_output_result_to_proto,
    ),
    Conversion(
        types.ForwardRequest,
        context_service_pb2.ForwardRequest,
        convert.forward_request_from_proto,
        convert.forward_request_to_proto,
    ),
    Conversion(
        types.ForwardResult,
        context_service_pb2.ForwardResponse,
        convert.forward_result_from_proto,
        convert.forward_result_to_proto,
    ),
    Conversion(types.TokenIds, content_pb2.TokenIds, convert.token_ids_from_proto, convert.token_ids_to_proto),
    Conversion(
        types.ContextPages, context_pb2.ContextPages, convert.context_pages_from_proto, convert.context_pages_to_proto
    ),
    Conversion(
        types.GetContextResult,
        context_service_pb2.GetContextResponse,
        convert.get_context_result_from_proto,
        convert.get_context_result_to_proto,
    ),
    Conversion(
        types.ContextEvent,
        context_service_pb2.WatchContextsResponse,
        convert.context_event_from_proto,
        convert.context_event_to_proto,
    ),
    Conversion(
        types.Comparison,
        context_service_pb2.CompareResponse,
        convert.comparison_from_proto,
        convert.comparison_to_proto,
    ),
    Conversion(
        types.PlanResult, context_service_pb2.PlanResponse, convert.plan_result_from_proto, convert.plan_result_to_proto
    ),
    Conversion(types.Model, model_service_pb2.Model, convert.model_from_proto, convert.model_to_proto),
    Conversion(
        types.RenderedChat,
        model_service_pb2.ApplyChatTemplateResponse,
        convert.rendered_chat_from_proto,
        convert.rendered_chat_to_proto,
    ),
    Conversion(
        types.SessionInfo, session_service_pb2.Session, convert.session_info_from_proto, convert.session_info_to_proto
    ),
    Conversion(
        types.VariableInfo,
        session_service_pb2.Variable,
        convert.variable_info_from_proto,
        convert.variable_info_to_proto,
    ),
    Conversion(
        types.SubmitCallResult,
        session_service_pb2.SubmitCallResponse,
        convert.submit_call_result_from_proto,
        convert.submit_call_result_to_proto,
    ),
    Conversion(
        types.GraphTask, session_service_pb2.GraphTask, convert.graph_task_from_proto, convert.graph_task_to_proto
    ),
    Conversion(types.Snapshot, snapshot_pb2.Snapshot, convert.snapshot_from_proto, convert.snapshot_to_proto),
    Conversion(
        types.Publication, snapshot_pb2.Publication, convert.publication_from_proto, convert.publication_to_proto
    ),
    Conversion(
        types.CreateContextRequest,
        context_service_pb2.CreateContextRequest,
        convert.create_context_request_from_proto,
        convert.create_context_request_to_proto,
    ),
    Conversion(
        types.UpdateContextRequest,
        context_service_pb2.UpdateContextRequest,
        convert.update_context_request_from_proto,
        convert.update_context_request_to_proto,
    ),
    Conversion(
        types.SamplingParams,
        generation_pb2.SamplingParams,
        convert.sampling_params_from_proto,
        convert.sampling_params_to_proto,
    ),
    Conversion(
        types.GenerateRequest,
        context_service_pb2.GenerateRequest,
        convert.generate_request_from_proto,
        convert.generate_request_to_proto,
    ),
    Conversion(
        types.SaveRequest,
        snapshot_service_pb2.SaveRequest,
        convert.save_request_from_proto,
        convert.save_request_to_proto,
    ),
    Conversion(
        types.OpenRequest,
        snapshot_service_pb2.OpenRequest,
        convert.open_request_from_proto,
        convert.open_request_to_proto,
    ),
    Conversion(
        types.RetentionUpdate,
        snapshot_service_pb2.UpdateSnapshotRequest,
        convert.update_snapshot_request_from_proto,
        convert.update_snapshot_request_to_proto,
    ),
    Conversion(
        types.RetentionUpdate,
        snapshot_service_pb2.UpdatePublicationRequest,
        convert.update_publication_request_from_proto,
        convert.update_publication_request_to_proto,
    ),
    Conversion(
        types.CallOutput, session_service_pb2.CallOutput, convert.call_output_from_proto, convert.call_output_to_proto
    ),
    Conversion(
        types.Parameter, session_service_pb2.Parameter, convert.parameter_from_proto, convert.parameter_to_proto
    ),
    Conversion(
        types.SubmitCallRequest,
        session_service_pb2.SubmitCallRequest,
        convert.submit_call_request_from_proto,
        convert.submit_call_request_to_proto,
    ),
    Conversion(
        types.OpenRequest,
        snapshot_service_pb2.TakeRequest,
        convert.take_request_from_proto,
        convert.take_request_to_proto,
    ),
    Conversion(
        types.RetentionUpdate,
        snapshot_service_pb2.PublishRequest,
        convert.publish_request_from_proto,
        convert.publish_request_to_proto,
    ),
]
UPDATES = [  # in which no labels are no change
    each
    for each in CONVERSIONS
    if each.message.DESCRIPTOR.name in ("UpdateContextRequest", "UpdateSnapshotRequest", "UpdatePublicationRequest")
]
# What else is converted: parts of messages that are no classes, and numbers of enums.
PARTS = {"attention_mask", "duration", "stop_match", "timestamp", "top_logprob"}
ENUM_NAMES = {
    types.ContextState: "context_state",
    types.Tier: "tier",
    types.ContextChange: "context_change",
    types.FinishReason: "finish_reason",
    types.Criterion: "criterion",
    types.VariableState: "variable_state",
    types.TaskPhase: "task_phase",
}


def conversion_name(each: object) -> str:
    return each.message.DESCRIPTOR.name if isinstance(each, Conversion) else str(each)


def full(hint: Any) -> Any:
    """A value of that type which is not its default."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return full(arguments[0])
    if origin is Sequence:
        return (full(arguments[0]), full(arguments[0]))
    if origin is tuple:
        return tuple(full(each) for each in arguments)
    if origin is Mapping:
        return {full(arguments[0]): full(arguments[1])}
    if issubclass(hint, enum.Enum):
        return list(hint)[-1]
    if hint is types.Parameter:  # one of its values
        return types.Parameter(name="é", output=full(types.CallOutput))
    if hint is types.SubmitCallRequest:  # a prompt or a function
        parameters = full(Sequence[types.Parameter])
        return types.SubmitCallRequest(model_id="é", function="é", timeout_s=0.5, parameters=parameters)
    if dataclasses.is_dataclass(hint):
        make: Any = hint
        return make(**{name: full(each) for name, each in get_type_hints(hint).items()})
    moment = datetime(2026, 7, 1, 12, 30, 15, 123_456, UTC)
    return {int: 2**31 - 1, float: 0.5, bool: True, str: "é", bytes: b"\x00\xff", datetime: moment}[hint]


def full_of(conversion: Conversion) -> Any:
    """A value with all fields that the message has."""
    value = full(conversion.kind)
    if conversion.message is snapshot_service_pb2.TakeRequest:
        return dataclasses.replace(value, version=None)
    return value


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=conversion_name)
def test_there_and_back(conversion: Conversion) -> None:
    value = full_of(conversion)
    sent = conversion.to_proto(value).SerializeToString()
    assert conversion.from_proto(conversion.message.FromString(sent)) == value


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=conversion_name)
def test_an_empty_message_reads_as_the_defaults(conversion: Conversion) -> None:
    empty = conversion.from_proto(conversion.message())
    for field in dataclasses.fields(conversion.kind):
        if field.default is not dataclasses.MISSING:
            assert getattr(empty, field.name) == field.default, field.name
    labels = getattr(empty, "labels", None)
    if labels is not None:
        assert labels == {}
        assert labels is not conversion.from_proto(conversion.message()).labels


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=conversion_name)
def test_every_field_is_converted(conversion: Conversion) -> None:
    """Another value of one field is another message, and that another value again."""
    value = full_of(conversion)
    sent = conversion.to_proto(value)
    for field, content in sent.ListFields():
        without = conversion.message()
        without.CopyFrom(sent)
        without.ClearField(field.name)
        beside = field.name in ("context_id", "name", "version", "publication_id", "session_id", "model_id")
        assert beside or conversion.from_proto(without) != value, field.name
        assert content is not None


def test_every_class_and_every_function_is_tested() -> None:
    assert {each.message for each in CONVERSIONS} >= {pair.message for pair in PAIRS}
    functions = {
        name.removesuffix("_from_proto").removesuffix("_to_proto")
        for name, _ in inspect.getmembers(convert, inspect.isfunction)
        if name.endswith("_proto")
    }
    tested = {each.to_proto.__name__.removesuffix("_to_proto") for each in CONVERSIONS}
    assert functions == tested | PARTS | set(ENUM_NAMES.values())


@pytest.mark.parametrize(("kind", "descriptor"), ENUMS, ids=lambda each: getattr(each, "__name__", ""))
def test_enums_there_and_back(kind: type[enum.Enum], descriptor: Any) -> None:
    functions = dict(inspect.getmembers(convert, inspect.isfunction))
    to_proto = functions[f"{ENUM_NAMES[kind]}_to_proto"]
    from_proto = functions[f"{ENUM_NAMES[kind]}_from_proto"]
    unspecified, *values = descriptor.values
    prefix = unspecified.name.removesuffix("UNSPECIFIED")
    assert {to_proto(member): member.name for member in kind} == {
        value.number: value.name.removeprefix(prefix) for value in values
    }
    assert [from_proto(to_proto(member)) for member in kind] == list(kind)


@pytest.mark.parametrize("conversion", UPDATES, ids=conversion_name)
def test_what_is_not_sent_is_no_change(conversion: Conversion) -> None:
    assert conversion.from_proto(conversion.message()) == conversion.kind()
    assert conversion.from_proto(conversion.message(labels={})) == conversion.kind(labels={})
    assert not conversion.to_proto(conversion.kind()).HasField("labels")
    assert conversion.to_proto(conversion.kind(labels={})).HasField("labels")


def test_ids_that_stand_beside_a_request() -> None:
    update = types.RetentionUpdate(labels={"a": "b"})
    sent = convert.update_snapshot_request_to_proto(update, name="n", version=3)
    assert (sent.name, sent.version, convert.update_snapshot_request_from_proto(sent)) == ("n", 3, update)
    assert convert.update_publication_request_to_proto(update, publication_id="p").publication_id == "p"
    assert convert.publish_request_to_proto(update, context_id="c").context_id == "c"
    assert convert.update_context_request_to_proto(types.UpdateContextRequest(), context_id="c").context_id == "c"
    call = types.SubmitCallRequest(template="t", parameters=())
    assert convert.submit_call_request_to_proto(call, session_id="s").session_id == "s"


def test_calls() -> None:
    """Values of a oneof, members that can be compared, and what is meant where nothing is sent."""
    output = session_service_pb2.CallOutput(criterion=session_service_pb2.CRITERION_LATENCY, max_tokens=4)
    places: Any = [{"name": "a", "text": ""}, {"name": "b", "variable_id": "v"}, {"name": "c", "output": output}]
    request = session_service_pb2.SubmitCallRequest(session_id="s", template="t", parameters=places)
    call = convert.submit_call_request_from_proto(request)
    assert (call.template, call.function, call.timeout_s) == ("t", None, 600.0)
    assert [(each.text, each.variable_id) for each in call.parameters] == [("", None), (None, "v"), (None, None)]
    assert call.parameters[2].output == types.CallOutput(criterion=types.Criterion.LATENCY, max_tokens=4)
    assert types.Criterion.LATENCY > types.Criterion.THROUGHPUT
    assert convert.submit_call_request_from_proto(convert.submit_call_request_to_proto(call)) == call
    request.timeout.FromSeconds(2)
    assert convert.submit_call_request_from_proto(request).timeout_s == 2.0


def test_zero_is_told_from_nothing_where_both_can_be() -> None:
    usage = convert.usage_from_proto(generation_pb2.Usage())
    for match in (0, ""):
        piece = types.GeneratePiece(index=0, context_id="a", stop_match=match, seed=0, usage=usage)
        assert convert.generate_piece_from_proto(convert.generate_piece_to_proto(piece)) == piece
    result = types.ForwardOutputResult(index=0, token_id=0, seed=0, entropy=0.0)
    assert convert.forward_output_result_from_proto(convert.forward_output_result_to_proto(result)) == result


def test_what_only_a_later_server_knows() -> None:
    unknown: Any = 99
    assert convert.context_info_from_proto(context_pb2.Context(state=unknown)).state is types.ContextState.IDLE
    pages = context_pb2.ContextPages(tiers=[context_pb2.TIER_DISK, unknown])
    assert convert.context_pages_from_proto(pages).tiers == (types.Tier.DISK, types.Tier.LINEAGE)
    event = context_service_pb2.WatchContextsResponse(change=unknown)
    assert convert.context_event_from_proto(event).change is types.ContextChange.CHANGED
    piece = context_service_pb2.GenerateResponse(finish=unknown)
    assert convert.generate_piece_from_proto(piece).finish is types.FinishReason.STOP
    task = session_service_pb2.GraphTask(criterion=unknown, phase=unknown)
    assert convert.graph_task_from_proto(task).criterion is types.Criterion.THROUGHPUT
    assert convert.graph_task_from_proto(task).phase is types.TaskPhase.IDLE
    variable = session_service_pb2.Variable(state=unknown)
    assert convert.variable_info_from_proto(variable).state is types.VariableState.UNSET


def test_a_model_of_an_engine() -> None:
    info = full(types.EngineInfo)
    model = convert.model_to_proto(info)
    assert (model.model_id, model.parameters) == (info.model_id, info.parameters)


def test_masks_are_ranges() -> None:
    mask = forward_pb2.AttentionMask(bounds=[0, 4, 7, 9])
    assert convert.attention_mask_from_proto(mask) == ((0, 4), (7, 9))
    assert convert.attention_mask_to_proto([(0, 4), (7, 9)]) == mask
    with pytest.raises(ValueError, match="zip"):
        convert.attention_mask_from_proto(forward_pb2.AttentionMask(bounds=[0, 4, 7]))


@pytest.mark.parametrize("seconds", [1e-9, 0.25, 300.25, 10 * 365 * 86_400.0])
def test_seconds_are_exact_to_the_microsecond(seconds: float) -> None:
    expiry = types.Expiry(at=types.utc_datetime(0.0), seconds=seconds, sliding=False)
    converted = convert.expiry_from_proto(convert.expiry_to_proto(expiry))
    assert math.isclose(converted.seconds, seconds, abs_tol=1e-9)
