"""What holds of every message: its class converts there and back, full and empty, and no field is forgotten.

The other files here have what is special about the messages of one module.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

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
from tests.jaxctx.convert.examples import example_of


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
    Conversion(types.Attention, admin_service_pb2.Attention, convert.attention_from_proto, convert.attention_to_proto),
    Conversion(
        types.EngineStatus, admin_service_pb2.Engine, convert.engine_status_from_proto, convert.engine_status_to_proto
    ),
    Conversion(types.AdapterInfo, admin_service_pb2.Adapter, convert.adapter_from_proto, convert.adapter_to_proto),
    Conversion(
        types.AdapterSpan, context_pb2.AdapterSpan, convert.adapter_span_from_proto, convert.adapter_span_to_proto
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
        types.OutputFormat,
        generation_pb2.OutputFormat,
        convert.output_format_from_proto,
        convert.output_format_to_proto,
    ),
    Conversion(
        types.GenerateRequest,
        context_service_pb2.GenerateRequest,
        convert.generate_request_from_proto,
        convert.generate_request_to_proto,
    ),
    Conversion(
        types.GetSnapshotResult,
        snapshot_service_pb2.GetSnapshotResponse,
        convert.get_snapshot_result_from_proto,
        convert.get_snapshot_result_to_proto,
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
UPDATES = [  # requests in which labels that are not sent stay as they are
    each
    for each in CONVERSIONS
    if each.message.DESCRIPTOR.name in ("UpdateContextRequest", "UpdateSnapshotRequest", "UpdatePublicationRequest")
]
# What else is converted: parts of messages that have no class, and numbers of enums.
PARTS = {"attention_mask", "duration", "engine_model", "stop_match", "timestamp", "top_logprob"}
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


def full_value(conversion: Conversion) -> Any:
    """A value in which no field that the message has is its default."""
    value = example_of(conversion.kind)
    if conversion.message is snapshot_service_pb2.TakeRequest:
        return dataclasses.replace(value, version=None)
    return value


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=conversion_name)
def test_a_full_value_converts_there_and_back(conversion: Conversion) -> None:
    value = full_value(conversion)
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
    """A message without one of its fields is another value."""
    value = full_value(conversion)
    sent = conversion.to_proto(value)
    for field, _ in sent.ListFields():
        without = conversion.message()
        without.CopyFrom(sent)
        without.ClearField(field.name)
        assert conversion.from_proto(without) != value, field.name


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
def test_members_of_an_enum_convert_there_and_back(kind: type[enum.Enum], descriptor: Any) -> None:
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
def test_an_update_tells_no_labels_from_no_change(conversion: Conversion) -> None:
    assert conversion.from_proto(conversion.message()) == conversion.kind()
    assert conversion.from_proto(conversion.message(labels={})) == conversion.kind(labels={})
    assert not conversion.to_proto(conversion.kind()).HasField("labels")
    assert conversion.to_proto(conversion.kind(labels={})).HasField("labels")
