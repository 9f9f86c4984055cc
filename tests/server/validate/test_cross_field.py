"""Rules between fields of a request, and the limits of one server."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import grpc
import pytest

from jaxctx import rpc
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2, session_service_pb2, snapshot_service_pb2
from jaxctx.v1.forward_pb2 import ForwardOutputParams
from jaxctx_server.validate import Limits, prompt_length_error, validate
from jaxctx_server.validate.cross_field import CROSS_FIELD_RULES
from tests.server.fake_engine import INFO
from tests.server.validate.requests import refused_fields


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


def test_only_a_single_output_can_be_resumed(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(context_id="a", max_tokens=9, resume_tokens=8)
    validate(limits, request)
    request.n = 1
    validate(limits, request)
    request.n = 2
    assert refused_fields(limits, request) == ["n"]


def test_logits_fit_into_an_answer(limits: Any) -> None:
    big = dataclasses.replace(limits, vocab_size=1 << 20)  # 4 MiB a row
    outputs = [{"index": i, "logits": True} for i in range(13)]
    validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs[:12]))
    with pytest.raises(InvalidArgument, match="up to 12 tokens, not 13"):
        validate(big, context_service_pb2.ForwardRequest(context_id="a", tokens=[1] * 13, outputs=outputs))


def violations(message: Any, limits: Any) -> list[str]:
    """The fields that the rules of a message between its fields name, those of single fields aside."""
    return [path for path, _ in CROSS_FIELD_RULES[type(message)](message, limits)]


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "named"),
    [(3, 3, []), (3, 4, ["min_tokens"]), (None, 16, []), (None, 17, ["min_tokens"]), (20, 17, [])],
)
def test_an_output_has_no_fewer_tokens_than_its_least(
    limits: Any, max_tokens: int | None, min_tokens: int, named: list[str]
) -> None:
    """Without a number of its own it has the server's, which is 16."""
    for kind in (context_service_pb2.GenerateRequest, session_service_pb2.CallOutput):
        assert violations(kind(max_tokens=max_tokens, min_tokens=min_tokens), limits) == named


@pytest.mark.parametrize(
    ("max_tokens", "resume_tokens", "named"),
    [(5, 4, []), (5, 5, ["resume_tokens"]), (None, 15, []), (None, 16, ["resume_tokens"])],
)
def test_a_resumed_output_has_tokens_left(
    limits: Any, max_tokens: int | None, resume_tokens: int, named: list[str]
) -> None:
    request = context_service_pb2.GenerateRequest(max_tokens=max_tokens, resume_tokens=resume_tokens)
    assert violations(request, limits) == named


def test_several_outputs_may_begin_anew(limits: Any) -> None:
    assert violations(context_service_pb2.GenerateRequest(max_tokens=5, n=4), limits) == []
    assert violations(context_service_pb2.GenerateRequest(max_tokens=5, n=4, resume_tokens=1), limits) == ["n"]


def test_a_wrong_number_of_tokens_is_told_by_its_own_rule_only(limits: Any) -> None:
    request = context_service_pb2.GenerateRequest(max_tokens=-1, min_tokens=4, resume_tokens=2)
    assert violations(request, limits) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2, "child_ids": ["x", "y"]}, []),
        ({"child_ids": ["x", "y"]}, []),
        ({"n": 3}, []),
        ({"n": 1, "child_ids": ["x", "y"]}, ["n"]),
    ],
)
def test_a_fork_has_as_many_children_as_ids(limits: Any, fields: dict[str, Any], named: list[str]) -> None:
    assert violations(context_service_pb2.ForkRequest(**fields), limits) == named


@pytest.mark.parametrize(
    ("tokens", "indices", "named"),
    [
        (2, [0, 1], []),
        (2, [1, 0], []),
        (2, [2], ["outputs[0].index"]),
        (2, [1, 1], ["outputs[1].index"]),
        (2, [3, 3], ["outputs[0].index", "outputs[1].index", "outputs[1].index"]),
        (0, [0], []),
    ],
)
def test_outputs_of_a_pass_are_of_different_tokens_of_it(
    limits: Any, tokens: int, indices: list[int], named: list[str]
) -> None:
    outputs: Any = [{"index": index} for index in indices]
    request = context_service_pb2.ForwardRequest(tokens=[1] * tokens, outputs=outputs)
    assert violations(request, limits) == named


def test_masks_have_a_limit_together(limits: Any) -> None:
    full: Any = [{"bounds": range(128)}] * 1024
    assert violations(context_service_pb2.ForwardRequest(tokens=[1], masks=full), limits) == []
    one_more: Any = [*full, {"bounds": [0, 1]}]
    assert violations(context_service_pb2.ForwardRequest(tokens=[1], masks=one_more), limits) == ["masks"]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.0}, []),
        ({"repetition_penalty": 1.1}, ["sample.repetition_penalty"]),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.5},
            ["sample.presence_penalty", "sample.frequency_penalty"],
        ),
        ({"logit_bias": {3: 0.0}}, ["sample.logit_bias"]),
        ({"allowed_token_ids": [3]}, ["sample.allowed_token_ids"]),
        ({"bad_words": ["x"]}, ["sample.bad_words"]),
    ],
)
def test_a_pass_applies_no_option_that_needs_the_tokens_before(
    limits: Any, sampling: dict[str, Any], named: list[str]
) -> None:
    assert violations(ForwardOutputParams(sample=sampling), limits) == named


@pytest.mark.parametrize("token", ["", "1", "2147483647", "0000000001"])
def test_a_page_of_versions_begins_behind_a_version(limits: Any, token: str) -> None:
    assert violations(snapshot_service_pb2.ListSnapshotVersionsRequest(page_token=token), limits) == []


@pytest.mark.parametrize("token", ["x", "-1", "1.5", "٣", "²", "12345678901"])
def test_a_page_token_that_is_no_version(limits: Any, token: str) -> None:
    request = snapshot_service_pb2.ListSnapshotVersionsRequest(page_token=token)
    assert violations(request, limits) == ["page_token"]


def test_limits_are_those_of_the_engine_and_on_a_router_none_but_the_queues() -> None:
    limits = Limits.of(INFO, queue_limit=7)
    assert limits == Limits(vocab_size=512, max_context_tokens=10_000, default_max_tokens=16, queue_limit=7)
    router = Limits(queue_limit=7)
    assert router.vocab_size == router.max_context_tokens == router.default_max_tokens == 2**31 - 1


def test_a_prompt_that_is_too_long_is_called_so_in_words_that_clients_look_for() -> None:
    """Claude Code reads both numbers; opencode and litellm look for the sentence of the OpenAI API."""
    assert prompt_length_error(0, 8) == "must be 1 to 8 tokens, is 0"
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", prompt_length_error(9, 8))
    assert found is not None
    assert found.groups() == ("9", "8")
    for tokens in (9, None):
        assert "prompt is too long" in prompt_length_error(tokens, 8)
        assert "this model's maximum context length is 8 tokens" in prompt_length_error(tokens, 8)
