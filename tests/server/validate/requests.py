"""Requests of every method, and for each of their fields values that are out of its range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.v1 import admin_service_pb2, context_service_pb2, model_service_pb2, snapshot_service_pb2
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
CHAT: Any = {"messages": [{"role": "user", "content": "c"}]}
CALLING: Any = {"role": "assistant", "tool_calls": [{"name": "f"}]}
MESSAGES: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "u"}] * 8193},
    {"messages": [{"role": "u", "content": "x" * (1 << 20)}] * 3},
    ({"messages": [{"role": "user"}, {"role": "", "content": "c"}]}, "messages.messages[1].role"),
    ({"messages": [{"role": "r" * 65}]}, "messages.messages[0].role"),
    ({"messages": [{"role": "a", "name": "n" * 257}]}, "messages.messages[0].name"),
    ({"messages": [{"role": "a", "tool_call_id": "i" * 257}]}, "messages.messages[0].tool_call_id"),
    ({"messages": [{"role": "a", "reasoning": BIG}]}, "messages.messages[0].reasoning"),
    ({"messages": [{"role": "a", "tool_calls": [{"name": "f"}] * 129}]}, "messages.messages[0].tool_calls"),
    ({"messages": [{"role": "a", "tool_calls": [{"id": "i"}]}]}, "messages.messages[0].tool_calls[0].name"),
    (
        {"messages": [{"role": "a", "tool_calls": [{"name": "f", "arguments": BIG}]}]},
        "messages.messages[0].tool_calls[0].arguments",
    ),
    # Texts count together, wherever they are.
    {
        "messages": [
            {"role": "a", "content": "x" * (1 << 20), "tool_calls": [{"name": "f", "arguments": "x" * (1 << 20)}]}
        ]
    },
    {"messages": [{"role": "a", "content": "x" * (1 << 20), "reasoning": "x" * (1 << 20)}]},
    ({**CHAT, "tools": ["{}"] * 129}, "messages.tools"),
    ({**CHAT, "tools": ["x" * (1 << 19)] * 3}, "messages.tools"),
    ({**CHAT, "tools": ["{}", ""]}, "messages.tools[1]"),
    ({**CHAT, "template_arguments": "x" * 65_537}, "messages.template_arguments"),
    ({**CHAT, "continue_final_message": True}, "messages.continue_final_message"),
    ({"messages": [CALLING], "continue_final_message": True}, "messages.continue_final_message"),
    (
        {"messages": [{"role": "assistant"}], "continue_final_message": True, "add_generation_prompt": True},
        "messages.add_generation_prompt",
    ),
]
# Of each request, each field: ANY, or values to refuse, with the path in the message where it says more than the field.
TABLE: dict[str, dict[str, Any]] = {
    "CreateContextRequest": {
        "context_id": CONTEXT_ID,
        "model_id": MODEL_ID,
        "salt": SALT,
        "adapter": MODEL_ID,
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
            "allowed_token_ids": [
                [1] * 1025,
                ([1, 512], "sampling.allowed_token_ids[1]"),
                ([-1], "sampling.allowed_token_ids[0]"),
            ],
            "bad_words": [["x"] * 65, (["a", ""], "sampling.bad_words[1]"), (["x" * 257], "sampling.bad_words[0]")],
        },
        "logprobs": ANY,
        "top_logprobs": [-1, 21, 5],  # 5 needs logprobs
        "stop": [["x"] * 17, (["a", ""], "stop[1]"), (["a", "b", "c", "x" * 257], "stop[3]")],
        "stop_token_ids": [[1] * 65, ([1, 512], "stop_token_ids[1]"), ([-1], "stop_token_ids[0]")],
        "ignore_eos": ANY,
        "include_stop": ANY,
        "include_special_tokens": ANY,
        "resume_tokens": [-1, 16, 10_000],  # below max_tokens
        "output_format": {
            "json_object": ANY,
            "json_schema": ["", "x" * 65_537],
            "regex": ["", "x" * 8193],
            "grammar": ["", "é" * 32_769],
            "choices": [
                ({"texts": []}, "output_format.choices.texts"),
                ({"texts": [f"{i}" for i in range(1025)]}, "output_format.choices.texts"),
                ({"texts": ["a", ""]}, "output_format.choices.texts[1]"),
                ({"texts": ["a", "x" * 4097]}, "output_format.choices.texts[1]"),
                ({"texts": ["a", "b", "a"]}, "output_format.choices.texts[2]"),
                ({"texts": [f"{i}" + "x" * 4090 for i in range(10, 27)]}, "output_format.choices.texts"),
            ],
        },
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
    "SwitchAdapterRequest": {"context_id": CONTEXT_ID, "adapter": MODEL_ID},
    "GetContextRequest": {
        "context_id": CONTEXT_ID,
        "include_pages": ANY,
        "include_tokens": ANY,
        "include_ancestors": ANY,
    },
    "ListContextsRequest": {
        "limit": LIMIT,
        "page_token": PAGE_TOKEN,
        "include_program_contexts": ANY,
        "tenants_only": ANY,
    },
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
            ([{"sample": {"allowed_token_ids": [3]}}], "outputs[0].sample.allowed_token_ids"),
            ([{"sample": {"bad_words": ["x"]}}], "outputs[0].sample.bad_words"),
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
        "attachment": [b"x" * ((4 << 20) + 1)],
        "max_versions": [-1],
        "for_move": ANY,
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
    "GetSnapshotRequest": {"name": NAME, "version": VERSION, "include_attachment": ANY, "include_tokens": ANY},
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
        "adapter": MODEL_ID,
    },
    "ReservePagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "CommitPagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "ReleasePagesRequest": {"context_id": CONTEXT_ID, "pages": COUNT},
    "CloseContextRequest": {"context_id": CONTEXT_ID},
    "ListModelsRequest": {"limit": LIMIT, "page_token": PAGE_TOKEN},
    "GetModelRequest": {"model_id": MODEL_ID, "with_tokenizer": ANY},
    "TokenizeRequest": {"model_id": MODEL_ID, "text": TEXT, "add_special_tokens": ANY, "with_entries": ANY},
    "DetokenizeRequest": {
        "model_id": MODEL_ID,
        "tokens": [[1] * ((1 << 17) + 1), ([1, 512], "tokens[1]"), ([-5], "tokens[0]")],
        "skip_special_tokens": ANY,
        "with_pieces": ANY,
    },
    "ApplyChatTemplateRequest": {"model_id": MODEL_ID, "messages": MESSAGES, "with_entries": ANY},
    "GetStatsRequest": {},
    "DrainRequest": {},
    "ClearCacheRequest": {},
    "LoadAdapterRequest": {"name": NAME, "directory": MODEL_ID, "model_id": MODEL_ID},
    "UnloadAdapterRequest": {"name": NAME},
    "ListAdaptersRequest": {},
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


def out_of_range_cases() -> list[Any]:
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


def request_with(name: str, path: str, value: Any) -> Any:
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
        and not (name == "PlanRequest" and key == "context_id" and field in ("model_id", "salt", "adapter"))
    }
    if name == "ForwardRequest" and field != "tokens":
        valid["tokens"] = [1]
    if field == "pin_for":
        valid["pinned"] = True
    if name == "ApplyChatTemplateRequest" and field != "messages":
        valid["messages"] = {"messages": [{"role": "user"}]}
    module = next(module for module in FILES if hasattr(module, name))
    return getattr(module, name)(**valid, **{field: {inner: value} if inner else value})


def refused_fields(limits: Any, request: Any) -> list[str]:
    """The fields that the validator names."""
    with pytest.raises(InvalidArgument) as raised:
        validate(limits, request)
    return [violation.field for violation in raised.value.violations]
