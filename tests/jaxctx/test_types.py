"""The classes of jaxctx.types, and the client's options, have the fields of the messages of protos/jaxctx/v1."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import jaxctx.v1
from jaxctx import aio, types
from jaxctx.client import options, streams
from jaxctx.rpc import METHODS
from jaxctx.v1 import (
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    engine_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
)
from tests.jaxctx.contract import (
    ENUMS,
    PAIRS,
    TYPES_OF_ENUMS,
    TYPES_OF_MESSAGES,
    Pair,
    differences,
    enum_differences,
    type_of_field,
)

FILES = [
    admin_service_pb2,
    content_pb2,
    context_pb2,
    context_service_pb2,
    engine_service_pb2,
    error_reason_pb2,
    forward_pb2,
    generation_pb2,
    lifetime_pb2,
    model_service_pb2,
    rules_pb2,
    session_service_pb2,
    snapshot_pb2,
    snapshot_service_pb2,
    stored_pb2,
]
# Messages that have no class: clients say what to write as dicts; the store and the validator have types of their own.
WITHOUT_CLASS = {"ChatMessage", "ChatMessages", "ToolCall", "TokenPiece"}
WITHOUT_CLASS_FILES = {"jaxctx/v1/stored.proto", "jaxctx/v1/rules.proto"}


def pair_name(pair: object) -> str:
    return f"{pair.kind.__name__}-{pair.message.DESCRIPTOR.name}" if isinstance(pair, Pair) else str(pair)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_class_equals_message(pair: Pair) -> None:
    assert differences(pair, pair.message.DESCRIPTOR) == []


@pytest.mark.parametrize(("kind", "descriptor"), ENUMS, ids=lambda each: each.name if hasattr(each, "name") else "")
def test_enum_equals_descriptor(kind: type[enum.Enum], descriptor: Any) -> None:
    assert enum_differences(kind, descriptor) == []


def test_every_class_is_compared() -> None:
    classes = {
        kind
        for kind in vars(types).values()
        if inspect.isclass(kind)
        and kind.__module__.startswith(types.__name__)
        and (dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum))
    }
    assert classes == {pair.kind for pair in PAIRS} | {kind for kind, _ in ENUMS}


def test_every_message_and_enum_has_a_class() -> None:
    """Requests and responses that are no more than arguments and results of one method have none."""
    for file in FILES:
        if file.DESCRIPTOR.name in WITHOUT_CLASS_FILES:
            continue
        for name, message in file.DESCRIPTOR.message_types_by_name.items():
            is_of_one_method = name.endswith(("Request", "Response"))
            assert is_of_one_method or name in WITHOUT_CLASS or message.full_name in TYPES_OF_MESSAGES, name
        for name, descriptor in file.DESCRIPTOR.enum_types_by_name.items():
            assert name == "ErrorReason" or descriptor.full_name in TYPES_OF_ENUMS, name


# --- What the client takes


def taken_fields(kind: type[Any]) -> dict[str, Any]:
    """The fields of a TypedDict or dataclass of the client, with their types."""
    return get_type_hints(kind)


@pytest.mark.parametrize(
    ("kind", "message", "elsewhere", "also"),
    [
        (options.SamplingOptions, generation_pb2.SamplingParams, set(), set()),
        (
            options.GenerateOptions,
            context_service_pb2.GenerateRequest,
            {"context_id", "n", "sampling"},  # arguments of `generate`, and the SamplingOptions
            set(taken_fields(options.SamplingOptions)),
        ),
        (
            options.CallOutputOptions,
            session_service_pb2.CallOutput,
            {"sampling"},
            set(taken_fields(options.SamplingOptions)),
        ),
        (options.ForwardOutputOptions, forward_pb2.ForwardOutputParams, set(), set()),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_options_equal_messages(kind: type[Any], message: Any, elsewhere: set[str], also: set[str]) -> None:
    names = {field.name for field in message.DESCRIPTOR.fields}
    assert taken_fields(kind).keys() - also == names - elsewhere
    for field in message.DESCRIPTOR.fields:
        if field.name not in elsewhere and field.name != "sample":  # SamplingOptions, not SamplingParams
            hint = taken_fields(kind)[field.name]
            assert hint in (type_of_field(field), type_of_field(field) | None), field.name
    if issubclass(kind, dict) or TypedDict in getattr(kind, "__orig_bases__", ()):
        assert not kind.__required_keys__


def test_chat_options_are_fields_of_the_message() -> None:
    """All but the messages and the flag, which are arguments of their own."""
    fields = {field.name for field in content_pb2.ChatMessages.DESCRIPTOR.fields}
    assert taken_fields(options.ChatOptions).keys() == fields - {"messages", "add_generation_prompt"}


@pytest.mark.parametrize("kind", [streams.Piece, streams.Completion])
def test_outputs_of_the_client_have_the_fields_of_a_piece(kind: type[Any]) -> None:
    fields = [field.name for field in dataclasses.fields(kind)]
    assert fields == [field.name for field in dataclasses.fields(types.GeneratePiece)]


CHAT = {"messages", "add_generation_prompt", "chat_options"}
CONTENT = {"text", "tokens", "add_special_tokens"} | CHAT
TTL = {"ttl_s", "sliding"}
# For each method of the client that takes arguments of its own: the method of the contract, arguments that stand for a
# field of another name, and fields that are not chosen by the caller of this method.
CLIENT_METHODS: list[tuple[Callable[..., Any], str, dict[str, set[str]], set[str]]] = [
    (aio.Context.flush, "Flush", {}, {"context_id"}),
    (aio.Context.fill, "Fill", {"messages": CHAT}, {"context_id"}),
    (aio.Context.forward, "Forward", {}, {"context_id"}),
    (aio.Context.fork, "Fork", {"child_ids": {"ids"}}, {"context_id"}),
    (aio.Context.truncate, "Truncate", {}, {"context_id"}),
    (aio.Context.rewind, "Rewind", {}, {"context_id"}),
    (aio.Context.switch_adapter, "SwitchAdapter", {}, {"context_id"}),
    (aio.Context.reserve, "ReservePages", {}, {"context_id"}),
    (aio.Context.commit, "CommitPages", {}, {"context_id"}),
    (aio.Context.release, "ReleasePages", {}, {"context_id"}),
    (aio.Context.update, "UpdateContext", {"ttl": TTL, "pin_for": {"pin_s"}}, {"context_id"}),
    (aio.Context.save, "Save", {"ttl": TTL}, {"context_id", "for_move"}),  # the last one is for routers
    (aio.Context.publish, "Publish", {"ttl": TTL}, {"context_id"}),
    (
        aio.Context.plan,
        "Plan",
        {"messages": CHAT},
        {"context_id", "model_id", "salt", "adapter"},
    ),
    (aio.Context.close, "CloseContext", {}, {"context_id"}),
    (aio.Client.plan, "Plan", {"messages": CHAT}, {"context_id"}),
    (aio.Client.contexts, "ListContexts", {"limit": {"page"}}, {"page_token", "tenants_only"}),  # as there
    (aio.Client.watch, "WatchContexts", {}, set()),
    (aio.Client.open, "Open", {"ttl": TTL, "pin_for": {"pin_s"}}, set()),
    (aio.Client.take, "Take", {"ttl": TTL, "pin_for": {"pin_s"}}, set()),
    (aio.Client.snapshot, "GetSnapshot", {}, {"include_attachment", "include_tokens"}),
    (aio.Client.snapshot_content, "GetSnapshot", {}, set()),
    (aio.Client.snapshots, "ListSnapshots", {"limit": {"page"}}, {"page_token"}),
    (aio.Client.history, "ListSnapshotVersions", {}, {"page_token", "limit"}),
    (aio.Client.update_snapshot, "UpdateSnapshot", {"ttl": TTL}, set()),
    (aio.Client.delete_snapshot, "DeleteSnapshot", {}, set()),
    (aio.Client.publications, "ListPublications", {}, {"page_token", "limit"}),
    (aio.Client.update_publication, "UpdatePublication", {"ttl": TTL}, set()),
    (aio.Client.unpublish, "Unpublish", {}, set()),
    (aio.Client.models, "ListModels", {}, {"page_token", "limit"}),
    (aio.Client.model, "GetModel", {}, {"with_tokenizer"}),
    (aio.Client.tokenize, "Tokenize", {}, {"with_entries"}),
    (aio.Client.detokenize, "Detokenize", {}, {"with_pieces"}),
    (aio.Client.apply_chat_template, "ApplyChatTemplate", {"messages": CHAT}, {"with_entries"}),
    (aio.Client.create_session, "CreateSession", {"ttl": {"ttl_s"}}, set()),
    (aio.Client.session, "GetSession", {}, set()),
    (aio.Client.sessions, "ListSessions", {"limit": {"page"}}, {"page_token"}),
    (aio.Client.engines, "GetStats", {}, set()),
    (aio.Client.drain, "Drain", {}, set()),
    (aio.Client.clear_cache, "ClearCache", {}, set()),
    (aio.Client.load_adapter, "LoadAdapter", {}, set()),
    (aio.Client.unload_adapter, "UnloadAdapter", {}, set()),
    (aio.Client.adapters, "ListAdapters", {}, set()),
    (aio.Session.create_variable, "CreateVariable", {}, {"session_id"}),
    (aio.Session.variables, "ListVariables", {"limit": {"page"}}, {"session_id", "page_token"}),
    (aio.Session.cancel, "CancelCall", {}, {"session_id"}),
    (aio.Session.graph, "GetGraph", {}, {"session_id"}),
    (aio.Session.close, "DeleteSession", {}, {"session_id"}),
    (aio.Variable.inspect, "GetVariable", {}, {"session_id", "variable_id"}),
    (aio.Variable.read, "ReadVariable", {}, {"session_id", "variable_id"}),
    (aio.Variable.set, "SetVariable", {}, {"session_id", "variable_id"}),
]
# Methods whose arguments are compared elsewhere: options above; `create` below; the others choose what to read.
OTHER_METHODS = {"Generate", "CreateContext", "SubmitCall", "GetContext", "Compare"}


@pytest.mark.parametrize(
    ("method", "rpc", "renamed", "not_chosen"), CLIENT_METHODS, ids=[each[1] for each in CLIENT_METHODS]
)
def test_client_methods_take_the_fields_of_their_requests(
    method: Callable[..., Any], rpc: str, renamed: dict[str, set[str]], not_chosen: set[str]
) -> None:
    expected = {"self", "timeout_s"}
    for field in METHODS[rpc].input_type.fields:
        if field.name not in not_chosen:
            expected |= renamed.get(field.name, {field.name})
    assert set(inspect.signature(method).parameters) == expected


def test_create_takes_the_fields_of_a_new_context_and_of_its_content() -> None:
    fields = {field.name for field in METHODS["CreateContext"].input_type.fields}
    expected = {"self", "timeout_s", "pin_s"} | TTL | CONTENT | fields - {"ttl", "pin_for"}
    assert set(inspect.signature(aio.Client.create).parameters) == expected


def test_every_method_of_the_contract_is_one_of_the_client() -> None:
    assert {rpc for _, rpc, _, _ in CLIENT_METHODS} | OTHER_METHODS | {"Register"} == METHODS.keys()


# --- The comparison finds what it is for


def usage_descriptor(change: Callable[[Any], None]) -> Descriptor:
    """The descriptor of Usage after a change of its definition."""
    file = descriptor_pb2.FileDescriptorProto(name="planted.proto", package="planted", syntax="proto3")
    generation_pb2.Usage.DESCRIPTOR.CopyToProto(file.message_type.add())
    change(file.message_type[0])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindMessageTypeByName("planted.Usage")


def add_field(message: Any) -> None:
    message.field.add(name="drafted_tokens", number=9, type=FieldDescriptor.TYPE_INT32, label=1)


def rename_field(message: Any) -> None:
    message.field[0].name = "input_tokens"


def remove_field(message: Any) -> None:
    del message.field[0]


def retype_field(message: Any) -> None:
    message.field[0].type = FieldDescriptor.TYPE_DOUBLE


def repeat_field(message: Any) -> None:
    message.field[0].label = FieldDescriptor.LABEL_REPEATED


def make_field_optional(message: Any) -> None:
    message.oneof_decl.add(name="_prompt_tokens")
    message.field[0].proto3_optional = True
    message.field[0].oneof_index = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_field, ["drafted_tokens: only in the message"]),
        (rename_field, ["prompt_tokens: only in the class", "input_tokens: only in the message"]),
        (remove_field, ["prompt_tokens: only in the class"]),
        (retype_field, ["prompt_tokens: <class 'int'> in the class, <class 'float'> in the message"]),
        (repeat_field, ["prompt_tokens: <class 'int'> in the class, collections.abc.Sequence[int] in the message"]),
        (make_field_optional, ["prompt_tokens: may be unset in the message, but None is not the default"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_changed_message_is_found(change: Callable[[Any], None], said: list[str]) -> None:
    pair = next(pair for pair in PAIRS if pair.kind is types.Usage)
    assert differences(pair, usage_descriptor(lambda message: None)) == []
    assert differences(pair, usage_descriptor(change)) == said


def test_a_changed_default_is_found() -> None:
    pair = next(pair for pair in PAIRS if pair.kind is types.SamplingParams)
    changed = dataclasses.replace(pair, unset={**pair.unset, "temperature": 0.7})
    assert differences(changed, pair.message.DESCRIPTOR) == ["temperature: means 0.7 if unset, but the default is 1.0"]


@pytest.mark.parametrize("is_numbered", [False, True])
def test_a_changed_enum_is_found(is_numbered: bool) -> None:
    kind = types.Criterion if is_numbered else types.TaskPhase
    original = next(descriptor for each, descriptor in ENUMS if each is kind)
    file = descriptor_pb2.FileDescriptorProto(name="planted.proto", package="planted", syntax="proto3")
    original.CopyToProto(file.enum_type.add())
    prefix = file.enum_type[0].value[0].name.removesuffix("UNSPECIFIED")
    file.enum_type[0].value.add(name=f"{prefix}PLANTED", number=9)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    value = 9 if is_numbered else "planted"
    found = enum_differences(kind, pool.FindEnumTypeByName(f"planted.{original.name}"))
    assert found == [f"PLANTED: None in the class, {value} in the message"]


# --- Rules of the contract


def test_every_method_has_messages_of_its_own() -> None:
    messages: list[Descriptor] = []
    for method in METHODS.values():
        assert method.input_type.name == f"{method.name}Request"
        assert method.output_type.name == f"{method.name}Response"
        messages += [method.input_type, method.output_type]
    assert len({message.full_name for message in messages}) == len(messages)


def test_what_adds_or_takes_away_may_not_be_repeated() -> None:
    """Nobody knows whether a call that was lost was made: only what does no more the second time is sent once more."""
    level = {name: method.GetOptions().idempotency_level for name, method in METHODS.items()}
    may = ("Get", "List", "Watch", "Read", "Update", "Plan", "Compare", "Tokenize", "Detokenize", "ApplyChatTemplate")
    closes = {"CloseContext", "DeleteSession"}  # what is closed already is not closed again
    assert {name for name in level if level[name]} == closes | {name for name in level if name.startswith(may)}


def test_names_of_methods_are_unique() -> None:
    methods = [
        each for file in FILES for service in file.DESCRIPTOR.services_by_name.values() for each in service.methods
    ]
    assert len(methods) == len(METHODS)


def test_stubs_lie_beside_every_proto() -> None:
    stubs = {path.name for path in Path(next(iter(jaxctx.v1.__path__))).glob("*_pb2.py")}
    assert stubs == {Path(file.DESCRIPTOR.name).stem + "_pb2.py" for file in FILES}
