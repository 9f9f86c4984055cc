"""Every field of every method out of its range: INVALID_ARGUMENT that names it, over real gRPC."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from jaxctx import convert, rpc, types
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import admin_service_pb2, context_service_pb2, model_service_pb2, rules_pb2, snapshot_service_pb2
from jaxctx_server.validate import validate

ANY = object()  # every value of its type is in range
BIG = "x" * ((2 << 20) + 1)
NUMBERS = (math.nan, math.inf, -math.inf)

CONTEXT_ID: list[Any] = ["", "a" * 65, ".a", "a b", "é", "a\n"]
MODEL_ID: list[Any] = ["m" * 257]
SALT: list[Any] = ["s" * 257, "é" * 129]
PRIORITY: list[Any] = [-101, 101, 2**31 - 1]
COUNT: list[Any] = [-1, -(2**31)]
LIMIT: list[Any] = [-1, 1001]
PAGE_TOKEN: list[Any] = ["t" * 257]
TEXT: list[Any] = [BIG]

NAME: list[Any] = ["", "n" * 101, "é" * 51, "a\nb", "\x00", "a\x7f", "\x85"]
VERSION: list[Any] = [0, -1]
YEARS = 315_576_000  # ten
DURATION: list[Any] = [
    {},
    {"seconds": -1},
    {"seconds": YEARS, "nanos": 1},
    {"seconds": 1, "nanos": -1},
    {"seconds": 1, "nanos": 10**9},
    {"nanos": -1},
    {"seconds": 2**62},
]
TTL: list[Any] = [({"duration": each, "sliding": True}, "ttl.duration") for each in DURATION]
LABELS: list[Any] = [{f"k{i}": "" for i in range(33)}, {"": "v"}, {"k" * 65: "v"}, {"k": "v" * 257}]
TOKENS: list[Any] = [
    {"ids": []},
    {"ids": [1] * 10_001},
    ({"ids": [3, 4, 512]}, "tokens.ids[2]"),
    ({"ids": [-1]}, "tokens.ids[0]"),
]
MESSAGES: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "u"}] * 1025},
    {"messages": [{"role": "u", "content": "x" * (1 << 20)}] * 3},
    ({"messages": [{"role": "user"}, {"role": "", "content": "c"}]}, "messages.messages[1].role"),
    ({"messages": [{"role": "r" * 65}]}, "messages.messages[0].role"),
]

# Of each request, each field: ANY, or values to refuse, with the path in the message where it says more than the field.
TABLE: dict[str, dict[str, Any]] = {
    "CreateContextRequest": {
        "context_id": CONTEXT_ID,
        "model_id": MODEL_ID,
        "salt": SALT,
        "priority": PRIORITY,
        "manual_commit": ANY,
        "pinned": ANY,
        "labels": LABELS,
        "ttl": TTL,
        "pin_for": DURATION,
    },
    "FillRequest": {
        "context_id": CONTEXT_ID,
        "text": ["", *TEXT],
        "tokens": TOKENS,
        "messages": MESSAGES,
        "add_special_tokens": ANY,
        "defer": ANY,
    },
    "FlushRequest": {"context_id": CONTEXT_ID},
    "GenerateRequest": {
        "context_id": CONTEXT_ID,
        "max_tokens": [0, -1, 10_001],
        "min_tokens": [-1, 17],  # the default of max_tokens is 16
        "n": [0, -1, 65, 129],  # the queue holds 64
        "sampling": {
            "temperature": [-0.1, 100.1, *NUMBERS],
            "top_k": [-1, 513],
            "top_p": [0.0, -0.5, 1.1, *NUMBERS],
            "min_p": [-0.1, 1.1, *NUMBERS],
            "repetition_penalty": [0.0, -1.0, 10.1, *NUMBERS],
            "presence_penalty": [-2.1, 2.1, *NUMBERS],
            "frequency_penalty": [-2.1, 2.1, *NUMBERS],
            "logit_bias": [
                dict.fromkeys(range(301), 0.0),
                ({512: 1.0}, "sampling.logit_bias[512]"),
                ({-1: 1.0}, "sampling.logit_bias[-1]"),
                ({7: 100.5}, "sampling.logit_bias[7]"),
                ({7: math.nan}, "sampling.logit_bias[7]"),
            ],
            "seed": [-1, -(2**63)],
        },
        "logprobs": ANY,
        "top_logprobs": [-1, 21, 5],  # 5 needs logprobs
        "stop": [["x"] * 17, (["a", ""], "stop[1]"), (["a", "b", "c", "x" * 257], "stop[3]")],
        "stop_token_ids": [[1] * 65, ([1, 512], "stop_token_ids[1]"), ([-1], "stop_token_ids[0]")],
        "ignore_eos": ANY,
        "include_stop": ANY,
        "resume_tokens": [-1, 16, 10_000],  # below max_tokens
    },
    "ForkRequest": {
        "context_id": CONTEXT_ID,
        "n": [0, -1, 1025],
        "child_ids": [
            [f"c{i}" for i in range(1025)],
            (["a", "b", ""], "child_ids[2]"),
            (["a", "b", "a"], "child_ids[2]"),
        ],
    },
    "TruncateRequest": {"context_id": CONTEXT_ID, "tokens": COUNT},
    "RewindRequest": {"context_id": CONTEXT_ID, "to": COUNT},
    "GetContextRequest": {
        "context_id": CONTEXT_ID,
        "include_pages": ANY,
        "include_tokens": ANY,
        "include_ancestors": ANY,
    },
    "ListContextsRequest": {"limit": LIMIT, "page_token": PAGE_TOKEN, "include_program_contexts": ANY},
    "UpdateContextRequest": {
        "context_id": CONTEXT_ID,
        "priority": PRIORITY,
        "pinned": ANY,
        "labels": [{"labels": each} for each in LABELS],
        "ttl": TTL,
        "pin_for": DURATION,
    },
    "CompareRequest": {"a": CONTEXT_ID, "b": CONTEXT_ID},
    "WatchContextsRequest": {"include_program_contexts": ANY},
    "ForwardRequest": {
        "context_id": CONTEXT_ID,
        "tokens": [[], [1] * 10_001, ([3, 512], "tokens[1]"), ([-1], "tokens[0]")],
        "positions": [[1, 2], [1] * 10_001, ([-1], "positions[0]"), ([10_000], "positions[0]")],
        "masks": [
            [{}, {}],
            [{}] * 10_001,
            *(
                ([{"bounds": bounds}], "masks[0].bounds")
                for bounds in (
                    [0],  # no stop
                    [-1, 1],
                    [1, 1],
                    [2, 1],
                    [0, 2, 1, 3],  # overlapping
                    [2, 3, 0, 1],  # descending
                    [0, 10_001],
                    [bound for i in range(65) for bound in (2 * i, 2 * i + 1)],
                )
            ),
        ],
        "keep_working": ANY,
        "outputs": [
            [{}] * 257,
            ([{"index": 1}], "outputs[0].index"),
            ([{"index": -1}], "outputs[0].index"),
            ([{}, {}], "outputs[1].index"),
            ([{"sample": {"temperature": math.nan}}], "outputs[0].sample.temperature"),
            ([{"sample": {"repetition_penalty": 1.5}}], "outputs[0].sample.repetition_penalty"),
            ([{"sample": {"presence_penalty": 1}}], "outputs[0].sample.presence_penalty"),
            ([{"sample": {"frequency_penalty": -1}}], "outputs[0].sample.frequency_penalty"),
            ([{"sample": {"logit_bias": {3: 1}}}], "outputs[0].sample.logit_bias"),
            ([{"logprob_ids": [1] * 1025}], "outputs[0].logprob_ids"),
            ([{"logprob_ids": [1, 512]}], "outputs[0].logprob_ids[1]"),
            ([{"top": 65}], "outputs[0].top"),
            ([{"top": -1}], "outputs[0].top"),
        ],
    },
    "SaveRequest": {
        "context_id": CONTEXT_ID,
        "name": NAME,
        "durable": ANY,
        "overwrite_version": VERSION,
        "ttl": TTL,
        "labels": LABELS,
    },
    "OpenRequest": {
        "name": NAME,
        "version": VERSION,
        "recompute": ANY,
        "context_id": CONTEXT_ID,
        "priority": PRIORITY,
        "pinned": ANY,
        "pin_for": DURATION,
        "ttl": TTL,
    },
    "TakeRequest": {
        "name": NAME,
        "recompute": ANY,
        "context_id": CONTEXT_ID,
        "priority": PRIORITY,
        "pinned": ANY,
        "pin_for": DURATION,
        "ttl": TTL,
    },
    "GetSnapshotRequest": {"name": NAME, "version": VERSION},
    "ListSnapshotsRequest": {"prefix": ["p" * 101], "limit": LIMIT, "page_token": PAGE_TOKEN},
    "ListSnapshotVersionsRequest": {
        "name": NAME,
        "limit": LIMIT,
        "page_token": [*PAGE_TOKEN, "x", "-1", "٣", "1" * 11],
    },
    "UpdateSnapshotRequest": {
        "name": NAME,
        "version": VERSION,
        "ttl": TTL,
        "labels": [{"labels": each} for each in LABELS],
    },
    "DeleteSnapshotRequest": {"name": NAME, "version": VERSION},
    "PublishRequest": {"context_id": CONTEXT_ID, "ttl": TTL, "labels": LABELS},
    "UpdatePublicationRequest": {
        "publication_id": CONTEXT_ID,
        "ttl": TTL,
        "labels": [{"labels": each} for each in LABELS],
    },
    "UnpublishRequest": {"publication_id": CONTEXT_ID},
    "ListPublicationsRequest": {"limit": LIMIT, "page_token": PAGE_TOKEN},
    "PlanRequest": {
        "context_id": CONTEXT_ID,
        "model_id": MODEL_ID,
        "salt": SALT,
        "text": ["", *TEXT],
        "tokens": TOKENS,
        "messages": MESSAGES,
        "add_special_tokens": ANY,
    },
    "ReservePagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "CommitPagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "ReleasePagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "CloseContextRequest": {"context_id": CONTEXT_ID},
    "ListModelsRequest": {"limit": LIMIT, "page_token": PAGE_TOKEN},
    "GetModelRequest": {"model_id": MODEL_ID},
    "TokenizeRequest": {"model_id": MODEL_ID, "text": TEXT, "add_special_tokens": ANY},
    "DetokenizeRequest": {
        "model_id": MODEL_ID,
        "tokens": [[1] * ((1 << 17) + 1), ([1, 512], "tokens[1]"), ([-5], "tokens[0]")],
        "skip_special_tokens": ANY,
    },
    "ApplyChatTemplateRequest": {"model_id": MODEL_ID, "messages": MESSAGES},
    "GetStatsRequest": {},
    "DrainRequest": {},
    "ClearCacheRequest": {},
}
FILES = (context_service_pb2, snapshot_service_pb2, model_service_pb2, admin_service_pb2)
METHODS = {
    method.input_type.name: (service.name, method)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# What else a request needs.
VALID: dict[str, Any] = {"context_id": "a", "publication_id": "p", "text": "x", "name": "n", "a": "a", "b": "b"}


def cases() -> list[Any]:
    return [
        pytest.param(name, path, value, named, id=f"{name}.{path}-{number}")
        for name, fields in TABLE.items()
        for path, values in flat(fields)
        if values is not ANY
        for number, (value, named) in enumerate(each if isinstance(each, tuple) else (each, path) for each in values)
    ]


def flat(fields: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, values in fields.items():
        found += flat(values, f"{prefix}{name}.") if isinstance(values, dict) else [(prefix + name, values)]
    return found


def request(name: str, path: str, value: Any) -> Any:
    """The request `name` with one field set, and whatever else it needs to be valid."""
    message_type = METHODS[name][1].input_type
    field, _, inner = path.partition(".")
    content = {"text", "tokens", "messages"}
    valid = {
        key: each
        for key, each in VALID.items()
        if key in message_type.fields_by_name
        and key != field
        and not (key in content and field in content)
        and not (name == "PlanRequest" and key == "context_id" and field in ("model_id", "salt"))
    }
    if name == "ForwardRequest" and field != "tokens":
        valid["tokens"] = [1]
    if field == "pin_for":
        valid["pinned"] = True
    if name == "ApplyChatTemplateRequest" and field != "messages":
        valid["messages"] = {"messages": [{"role": "user"}]}
    module = next(module for module in FILES if hasattr(module, name))
    return getattr(module, name)(**valid, **{field: {inner: value} if inner else value})


def test_the_table_has_every_field_of_every_request() -> None:
    assert TABLE.keys() == METHODS.keys()
    for name, (_, method) in METHODS.items():
        assert TABLE[name].keys() == {field.name for field in method.input_type.fields}, name
    sampling = METHODS["GenerateRequest"][1].input_type.fields_by_name["sampling"].message_type
    assert TABLE["GenerateRequest"]["sampling"].keys() == {field.name for field in sampling.fields}


async def test_each_field_out_of_range_is_refused_by_name(grpc_server: Any) -> None:
    """One server for all cases: none of them may leave it any different."""
    await grpc_server.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    calls = len(grpc_server.engine.calls)
    for case in cases():
        name, path, value, named = case.values
        service, method = METHODS[name]
        call = getattr(grpc_server.stub(service), method.name)(request(name, path, value))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            if method.server_streaming:
                _ = [piece async for piece in call]
            else:
                await call
        error = rpc.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument), case.id
        assert error.reason == "INVALID_FIELD"
        fields = [violation.field for violation in error.violations]
        assert len(fields) == 1, (case.id, fields)
        assert fields[0] == named or fields[0].startswith(named), (case.id, fields)
    assert len(grpc_server.engine.calls) == calls


async def test_all_wrong_fields_are_reported_together(grpc_server: Any) -> None:
    call = grpc_server.contexts.Generate(
        context_service_pb2.GenerateRequest(
            context_id="", max_tokens=0, n=0, sampling={"temperature": math.nan, "top_p": 2}, stop=[""]
        )
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    error = rpc.from_rpc_error(raised.value)
    fields = {violation.field for violation in error.violations}
    assert fields == {"context_id", "max_tokens", "n", "sampling.temperature", "sampling.top_p", "stop[0]"}


async def test_no_more_than_16_are_reported(grpc_server: Any) -> None:
    request = context_service_pb2.FillRequest(context_id="a", tokens={"ids": [600] * 1000})
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await grpc_server.contexts.Fill(request)
    assert len(rpc.from_rpc_error(raised.value).violations) == 16


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (context_service_pb2.FillRequest(context_id="a"), "content"),
        (context_service_pb2.PlanRequest(context_id="a"), "content"),
        (context_service_pb2.PlanRequest(context_id="a", text="x", salt="s"), "salt"),
        (context_service_pb2.PlanRequest(context_id="a", text="x", model_id="fake"), "model_id"),
        (context_service_pb2.CreateContextRequest(pin_for={"seconds": 1}), "pin_for"),
        (context_service_pb2.UpdateContextRequest(context_id="a", pinned=False, pin_for={"seconds": 1}), "pin_for"),
        (context_service_pb2.UpdateContextRequest(context_id="a", pin_for={"seconds": 1}), "pin_for"),
        (
            context_service_pb2.ForwardRequest(
                context_id="a", tokens=[1] * 1025, masks=[{"bounds": range(128)}] * 1025
            ),
            "masks",
        ),
        (context_service_pb2.ForkRequest(context_id="a", n=3, child_ids=["x", "y"]), "n"),
        (context_service_pb2.FillRequest(context_id="a", text="x" * 20_001), "text"),
        (
            context_service_pb2.FillRequest(
                context_id="a", messages={"messages": [{"role": "u", "content": "x" * 20_001}]}
            ),
            "messages",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
async def test_fields_that_are_wrong_together(grpc_server: Any, request_: Any, named: str) -> None:
    await grpc_server.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    name = type(request_).__name__.removesuffix("Request")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await getattr(grpc_server.contexts, name)(request_)
    error = rpc.from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [named]


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x02\xff\xfe", b"\x0a\x7fshort", b"\xff\xff\xff\xff"],
    ids=["wrong UTF-8", "cut short", "no message"],
)
async def test_bytes_that_are_no_message(grpc_server: Any, data: bytes) -> None:
    for path, kind in [("Fill", "unary_unary"), ("Generate", "unary_stream")]:
        call = getattr(grpc_server.channel, kind)(f"/jaxctx.v1.ContextService/{path}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (call if kind == "unary_unary" else call.read())
        error = rpc.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == ["request"]


def refused(limits: Any, request: Any) -> list[str]:
    """The fields that the validator names."""
    with pytest.raises(InvalidArgument) as raised:
        validate(limits, request)
    return [violation.field for violation in raised.value.violations]


def test_fields_that_are_wrong_and_fields_that_are_wrong_together_are_told_together(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(
        context_id="a", max_tokens=3, min_tokens=4, top_logprobs=1, stop=["ok", ""], sampling={"top_k": -1}
    )
    assert sorted(refused(limits, request)) == ["min_tokens", "sampling.top_k", "stop[1]", "top_logprobs"]


def test_only_a_single_output_can_be_resumed(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(context_id="a", max_tokens=9, resume_tokens=8)
    validate(limits, request)
    request.n = 1
    validate(limits, request)
    request.n = 2
    assert refused(limits, request) == ["n"]


def test_a_field_that_is_wrong_twice_is_told_once(limits: Any) -> None:
    assert refused(limits, context_service_pb2.ForkRequest(context_id="a", n=2000, child_ids=["x"])) == ["n"]
    assert refused(limits, context_service_pb2.CreateContextRequest(pin_for={"seconds": -1})) == ["pin_for"]


def test_a_list_that_is_far_too_long_is_not_looked_at(limits: Any) -> None:
    outputs = [{"index": 7, "logits": True, "top": -1}] * 100_000
    request = context_service_pb2.ForwardRequest(context_id="", tokens=[1], outputs=outputs, positions=[1, 2])
    assert refused(limits, request) == ["context_id", "outputs", "positions"]


def test_labels_are_named_by_their_keys_unless_these_are_wrong(limits: Any) -> None:
    request = context_service_pb2.CreateContextRequest(labels={"team": "v" * 257})
    assert refused(limits, request) == ["labels[team]"]
    request = context_service_pb2.CreateContextRequest(labels={"private" * 50: "v" * 257})
    assert refused(limits, request) == ["labels.key", "labels[]"]


def test_descriptions_repeat_no_text(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(context_id="my secret", stop=["private" * 50])
    with pytest.raises(InvalidArgument) as raised:
        validate(limits, request)
    assert "secret" not in str(raised.value)
    assert "private" not in str(raised.value)


def test_logits_fit_into_an_answer(limits: Any) -> None:
    big = dataclasses.replace(limits, vocab_size=1 << 20)  # 4 MiB a row
    outputs = [{"index": i, "logits": True} for i in range(13)]
    validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs[:12]))
    with pytest.raises(InvalidArgument, match="up to 12 tokens, not 13"):
        validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs))


def test_masks_may_touch_and_end_anywhere_in_the_context(limits: Any) -> None:
    masks = [{"bounds": [0, 4, 4, 10_000]}, {}]
    request = context_service_pb2.ForwardRequest(context_id="a", tokens=[1, 2], masks=masks)
    validate(limits, request)
    assert convert.forward_request_from_proto(request).masks == (((0, 4), (4, 10_000)), ())


def test_what_is_not_sent_is_made_what_the_contract_says(limits: Any) -> None:
    """And what is sent as zero is not the same."""
    request = context_service_pb2.GenerateRequest(context_id="a")
    validate(limits, request)
    assert convert.generate_request_from_proto(request) == types.GenerateRequest(context_id="a")
    request = context_service_pb2.GenerateRequest(context_id="a", sampling={"temperature": 0, "seed": 0})
    validate(limits, request)
    sampling = types.SamplingParams(temperature=0.0, seed=0)
    assert convert.generate_request_from_proto(request) == types.GenerateRequest(context_id="a", sampling=sampling)
    update = context_service_pb2.UpdateContextRequest(context_id="a")
    assert convert.update_context_request_from_proto(update) == types.UpdateContextRequest()
    update = context_service_pb2.UpdateContextRequest(context_id="a", pinned=False, priority=0, ttl={}, labels={})
    nothing = types.UpdateContextRequest(pinned=False, priority=0, ttl=types.Ttl(None), labels={})
    assert convert.update_context_request_from_proto(update) == nothing
    create = context_service_pb2.CreateContextRequest(pinned=True, pin_for={"seconds": 1, "nanos": 500_000_000})
    assert convert.create_context_request_from_proto(create) == types.CreateContextRequest(pinned=True, pin_s=1.5)


# --- the contract's rules ---------------------------------------------------------------------------------------------


def parts(message_type: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, field, rule) of all fields of a request and of the messages in it."""
    for field in message_type.fields:
        yield path + field.name, field, field.GetOptions().Extensions[rules_pb2.rule]
        kind = field.message_type
        if kind is not None and kind.file.package == "jaxctx.v1" and not kind.GetOptions().map_entry:
            yield from parts(kind, f"{path}{field.name}.")


FIELDS = [
    pytest.param(name, path, field, rule, id=f"{name}.{path}")
    for name, (_, method) in METHODS.items()
    for path, field, rule in parts(method.input_type)
]


@pytest.mark.parametrize(("name", "path", "field", "rule"), FIELDS)
def test_every_field_of_a_request_has_a_rule(name: str, path: str, field: Any, rule: Any, limits: Any) -> None:
    """Any value of a bool or an enum may be sent, and a message has the rules of its fields; nothing else goes free."""
    kind = field.message_type
    sizes = [(field, rule)]
    if kind is not None and kind.GetOptions().map_entry:
        sizes = [(kind.fields_by_name["key"], rule.keys), (kind.fields_by_name["value"], rule)]
    if field.is_repeated:
        assert rule.max_items or rule.max_items_of, "a list or map of any length"
    for each, bounds in sizes:
        if each.type == each.TYPE_STRING:
            assert bounds.max_bytes or bounds.id or bounds.name, "a text of any size"
        elif each.type == each.TYPE_DOUBLE:
            assert bounds.HasField("gte") or bounds.HasField("gt"), "any number"
            assert bounds.HasField("lte"), "any number"
        elif each.type in (each.TYPE_INT32, each.TYPE_INT64):
            assert bounds.HasField("gte") or bounds.token_id or bounds.ranges, "any number"
        elif each.type == each.TYPE_MESSAGE and each.message_type.full_name == "google.protobuf.Duration":
            assert bounds.HasField("gt"), "any time"
            assert bounds.HasField("lte"), "any time"
        else:
            ours = each.message_type is not None and each.message_type.file.package == "jaxctx.v1"
            assert ours or each.type in (each.TYPE_BOOL, each.TYPE_ENUM), "a type without rules"
    for limit in (rule.lte_of, rule.lt_of, rule.max_items_of):
        assert not limit or type(getattr(limits, limit)) is int
    for other in (rule.needs, rule.excludes, rule.one_for_each):
        assert not other or other in field.containing_type.fields_by_name


def violating(field: Any, rule: Any, limits: Any) -> list[tuple[Any, str]]:
    """For each rule of a field by itself a value that breaks it, and where that is in the field."""
    kind, found = field.message_type, []
    most = getattr(limits, rule.max_items_of) if rule.max_items_of else rule.max_items
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        good = 1 if key.type == key.TYPE_INT32 else "k"
        found += [({wrong: 0 if good == 1 else ""}, "") for wrong, _ in single(key, rule.keys, limits)]
        found += [({good: wrong}, f"[{good}]") for wrong, _ in single(value, rule, limits)]
        found += [({i if good == 1 else f"k{i}": 0 if good == 1 else "" for i in range(most + 1)}, "")]
        return found
    if not field.is_repeated:
        return single(field, rule, limits)
    one = {field.TYPE_STRING: "x", field.TYPE_MESSAGE: {}}.get(field.type, 1)
    found += [([one] * (most + 1), "")]
    if rule.min_items:
        found += [([], "")]
    if rule.unique:
        found += [([one, one], "[1]")]
    if rule.max_total_bytes:
        text = next(each.name for each in kind.fields if each.name == "content")
        found += [([{"role": "r", text: "x" * (rule.max_total_bytes // 2)}] * 3, "")]
    if rule.ranges:
        high = getattr(limits, rule.lte_of)
        return found + [(bounds, "") for bounds in ([1], [-1, 2], [2, 2], [3, 2], [0, 3, 2, 4], [0, high + 1])]
    return found + [([wrong], f"[0]{below}") for wrong, below in single(field, rule, limits)]


def single(field: Any, rule: Any, limits: Any) -> list[tuple[Any, str]]:
    """Likewise of one value."""
    if field.type == field.TYPE_STRING:
        texts = [" ", "", "x" * 65] if rule.id else ["\n", "", "x" * 101] if rule.name else ["x" * (rule.max_bytes + 1)]
        return [(text, "") for text in (*texts, *[""] * bool(rule.min_bytes))]
    if field.type == field.TYPE_MESSAGE:
        if field.message_type.full_name != "google.protobuf.Duration":
            return []
        return [({"seconds": int(rule.gt)}, ""), ({"seconds": int(rule.lte), "nanos": 1}, "")]
    wrong: list[Any] = []
    wrong += (
        [rule.gte - 1] * rule.HasField("gte") + [rule.gt] * rule.HasField("gt") + [rule.lte + 1] * rule.HasField("lte")
    )
    wrong += [getattr(limits, rule.lte_of) + 1] if rule.lte_of else []
    wrong += [getattr(limits, rule.lt_of)] if rule.lt_of else []
    wrong += [-1, limits.vocab_size] if rule.token_id else []
    if field.type == field.TYPE_DOUBLE:
        return [(each, "") for each in (*wrong, *NUMBERS)]
    return [(int(each), "") for each in wrong]


def around(message_type: Any, path: str, value: Any) -> dict[str, Any]:
    """The fields of such a message, with one somewhere in it set, and whatever is needed to find no other fault."""
    name, _, below = path.partition(".")
    field = message_type.fields_by_name[name]
    if below:
        inner = around(field.message_type, below, value)
        value = [inner] if field.is_repeated else inner
    needed = {key: each for key, each in VALID.items() if key in message_type.fields_by_name and key != name}
    oneof = field.containing_oneof
    for key in [each.name for each in oneof.fields] if oneof else []:
        needed.pop(key, None)
    if message_type.name == "PlanRequest":
        needed.pop("context_id", None)
    if message_type.name == "ForwardRequest" and name != "tokens":
        needed["tokens"] = [1]
    if message_type.name == "ChatMessage" and name != "role":
        needed["role"] = "user"
    if message_type.name == "ApplyChatTemplateRequest" and name != "messages":
        needed["messages"] = {"messages": [{"role": "user"}]}
    rule = field.GetOptions().Extensions[rules_pb2.rule]
    if rule.needs:
        needed[rule.needs] = True
    return needed | {name: value}


@pytest.mark.parametrize(("name", "path", "field", "rule"), FIELDS)
def test_every_rule_is_kept(name: str, path: str, field: Any, rule: Any, limits: Any) -> None:
    """A value that breaks it is refused, with the field's name, and by no other rule."""
    message_type = METHODS[name][1].input_type
    module = next(module for module in FILES if hasattr(module, name))
    pattern = re.escape(path).replace(r"\.", r"(\[0\])?\.")
    for value, below in violating(field, rule, limits):
        message = getattr(module, name)(**around(message_type, path, value))
        named = refused(limits, message)
        assert all(re.match(pattern, each) for each in named), (str(value)[:100], named)
        assert any(re.match(pattern + re.escape(below), each) for each in named), (str(value)[:100], named)
    if rule.required:
        assert refused(limits, getattr(module, name)()) == [path]
    if rule.needs:
        value = {"seconds": 1} if field.type == field.TYPE_MESSAGE else 1
        fields = around(message_type, path, value) | {rule.needs: False}
        assert refused(limits, getattr(module, name)(**fields)) == [path]
    if rule.excludes:
        fields = around(message_type, path, "x") | {rule.excludes: "x"}
        assert refused(limits, getattr(module, name)(**fields)) == [path]
    if rule.one_for_each:
        value = [{}] * 2 if field.type == field.TYPE_MESSAGE else [0] * 2
        fields = around(message_type, path, value) | {rule.one_for_each: [1] * 3}
        assert refused(limits, getattr(module, name)(**fields)) == [path]


def test_the_rules_that_a_test_knows_are_all_there_are() -> None:
    """A new one needs a value above that breaks it."""
    known = {"required", "gt", "gte", "lte", "lte_of", "lt_of", "token_id", "min_bytes", "max_bytes", "id", "name"}
    known |= {"min_items", "max_items", "max_items_of", "unique", "max_total_bytes", "ranges", "keys"}
    known |= {"needs", "excludes", "one_for_each"}
    assert known == {field.name for field in rules_pb2.FieldRules.DESCRIPTOR.fields}
    assert {field.name for field in rules_pb2.OneofRules.DESCRIPTOR.fields} == {"required"}


@pytest.mark.parametrize("kind", [context_service_pb2.FillRequest, context_service_pb2.PlanRequest])
def test_a_required_choice_is_made(kind: Any, limits: Any) -> None:
    assert refused(limits, kind(context_id="a")) == ["content"]
