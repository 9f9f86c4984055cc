"""Every field of every method out of its range: INVALID_ARGUMENT that names it, over real gRPC."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import grpc
import pytest

from jaxctx import wire
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import admin_service_pb2, context_service_pb2, model_service_pb2, snapshot_service_pb2
from jaxctx_server.validate import contexts, generation, snapshots, validate

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
    "ListContextsRequest": {"limit": LIMIT, "page_token": PAGE_TOKEN},
    "UpdateContextRequest": {
        "context_id": CONTEXT_ID,
        "priority": PRIORITY,
        "pinned": ANY,
        "labels": [{"labels": each} for each in LABELS],
        "ttl": TTL,
        "pin_for": DURATION,
    },
    "CompareRequest": {"a": CONTEXT_ID, "b": CONTEXT_ID},
    "WatchContextsRequest": {},
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


def test_a_name_that_no_field_has_is_a_defect_and_not_a_field_that_was_not_sent(limits: Any) -> None:
    message = context_service_pb2.FillRequest(context_id="a", messages={"messages": [{}]})
    names = ("context_id", "text", "add_special_tokens", "defer")
    values = validate(lambda request: [request[name].value for name in names], limits, message)
    assert values == ["a", None, None, False]
    with pytest.raises(KeyError, match="content"):
        validate(lambda request: request["content"], limits, message)


async def test_each_field_out_of_range_is_refused_by_name(door: Any) -> None:
    """One server for all cases: none of them may leave it any different."""
    await door.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    calls = len(door.engine.calls)
    for case in cases():
        name, path, value, named = case.values
        service, method = METHODS[name]
        call = getattr(door.stub(service), method.name)(request(name, path, value))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            if method.server_streaming:
                _ = [piece async for piece in call]
            else:
                await call
        error = wire.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument), case.id
        assert error.reason == "INVALID_FIELD"
        fields = [violation.field for violation in error.violations]
        assert len(fields) == 1, (case.id, fields)
        assert fields[0] == named or fields[0].startswith(named), (case.id, fields)
    assert len(door.engine.calls) == calls


async def test_all_wrong_fields_are_reported_together(door: Any) -> None:
    call = door.contexts.Generate(
        context_service_pb2.GenerateRequest(
            context_id="", max_tokens=0, n=0, sampling={"temperature": math.nan, "top_p": 2}, stop=[""]
        )
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    error = wire.from_rpc_error(raised.value)
    fields = {violation.field for violation in error.violations}
    assert fields == {"context_id", "max_tokens", "n", "sampling.temperature", "sampling.top_p", "stop[0]"}


async def test_no_more_than_16_are_reported(door: Any) -> None:
    request = context_service_pb2.FillRequest(context_id="a", tokens={"ids": [600] * 1000})
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await door.contexts.Fill(request)
    assert len(wire.from_rpc_error(raised.value).violations) == 16


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
async def test_fields_that_are_wrong_together(door: Any, request_: Any, named: str) -> None:
    await door.contexts.CreateContext(context_service_pb2.CreateContextRequest(context_id="a"))
    name = type(request_).__name__.removesuffix("Request")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await getattr(door.contexts, name)(request_)
    error = wire.from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [named]


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x02\xff\xfe", b"\x0a\x7fshort", b"\xff\xff\xff\xff"],
    ids=["wrong UTF-8", "cut short", "no message"],
)
async def test_bytes_that_are_no_message(door: Any, data: bytes) -> None:
    for path, kind in [("Fill", "unary_unary"), ("Generate", "unary_stream")]:
        call = getattr(door.channel, kind)(f"/jaxctx.v1.ContextService/{path}")(data)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (call if kind == "unary_unary" else call.read())
        error = wire.from_rpc_error(raised.value)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == ["request"]


# --- what only a door of untyped values (JSON) can send ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"context_id": 7}, "context_id"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"stop": [b"x"]}, "stop[0]"),
        ({"stop": ["\ud800"]}, "stop[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [10**400]}, "stop_token_ids[0]"),
        ({"stop_token_ids": {"1": 2}}, "stop_token_ids"),
        ({"sampling": [1]}, "sampling"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"temperature": 10**400}}, "sampling.temperature"),
        ({"sampling": {"logit_bias": [1]}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {"1": 1}}}, "sampling.logit_bias[]"),
    ],
)
def test_values_of_wrong_types(limits: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(generation.generate, limits, {"context_id": "a", **fields})
    assert [violation.field for violation in raised.value.violations] == [named]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"text": "a\udfffb"}, "text"),
        ({"messages": {"messages": [{"role": "u", "content": "\ud800"}]}}, "messages.messages[0].content"),
    ],
)
def test_lone_surrogates_never_reach_the_tokenizer(limits: Any, content: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(contexts.fill, limits, {"context_id": "a", **content})
    assert [violation.field for violation in raised.value.violations] == [named]


def test_whole_numbers_are_numbers(limits: Any) -> None:
    request = {"context_id": "a", "sampling": {"temperature": 0, "seed": None}}
    checked = validate(generation.generate, limits, request)
    assert checked.sampling.temperature == 0.0
    assert type(checked.sampling.temperature) is float


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hello", "messages"),
        ({"messages": ["hello"]}, "messages.messages[0]"),
        ({"messages": [None]}, "messages.messages[0]"),
        ({"messages": [{"role": "u", "content": 7}]}, "messages.messages[0].content"),
    ],
)
def test_messages_of_wrong_types(limits: Any, messages: Any, named: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(contexts.fill, limits, {"context_id": "a", "messages": messages})
    assert [violation.field for violation in raised.value.violations] == [named]


def test_descriptions_repeat_no_text(limits: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(generation.generate, limits, {"context_id": "my secret", "stop": ["private" * 50]})
    assert "secret" not in str(raised.value)
    assert "private" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"masks": [[(0, 1)]]}, "masks[0]"),
        ({"masks": [{"bounds": ["0", "1"]}]}, "masks[0].bounds"),
        ({"masks": [{"bounds": [0, True]}]}, "masks[0].bounds"),
        ({"positions": ["0"]}, "positions[0]"),
        ({"outputs": [0]}, "outputs[0]"),
        ({"outputs": [{"sample": [{"top_k": 1}]}]}, "outputs[0].sample"),
    ],
)
def test_passes_of_wrong_types(limits: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(generation.forward, limits, {"context_id": "a", "tokens": [1], **fields})
    assert [violation.field for violation in raised.value.violations] == [named]


def test_logits_fit_into_an_answer(limits: Any) -> None:
    big = dataclasses.replace(limits, vocab_size=1 << 20)  # 4 MiB a row
    outputs = [{"index": i, "logits": True} for i in range(13)]
    request = {"context_id": "a", "tokens": [1] * 13, "outputs": outputs[:12]}
    assert len(validate(generation.forward, big, request).outputs) == 12
    with pytest.raises(InvalidArgument, match="up to 12 tokens, not 13"):
        validate(generation.forward, big, {**request, "outputs": outputs})


@pytest.mark.parametrize("ttl", [7, {"duration": 7}, {"duration": {"seconds": 1.5}}])
def test_times_of_wrong_types(limits: Any, ttl: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        validate(snapshots.save, limits, {"context_id": "a", "name": "n", "ttl": ttl})
    assert raised.value.violations[0].field.startswith("ttl")
    assert len(raised.value.violations) == 1


def test_masks_may_touch_and_end_anywhere_in_the_context(limits: Any) -> None:
    masks = [{"bounds": [0, 4, 4, 10_000]}, {}]
    request = {"context_id": "a", "tokens": [1, 2], "masks": masks}
    assert validate(generation.forward, limits, request).masks == [((0, 4), (4, 10_000)), ()]
