"""Messages of the contract out of paths, queries and bodies, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.http.messages import (
    SPARE_PARTS,
    fill_message,
    max_json_parts,
    message_fields,
    message_from_body,
    message_from_query,
    message_json,
    message_response,
    typed_fields,
)


def request(body: bytes = b"", *, query: str = "", path: dict[str, str] | None = None) -> Any:
    """As much of a HttpCall as reading its message needs."""

    async def parse_body(parse: Callable[[bytes], Any]) -> Any:
        return parse(body)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query.encode(), "path_params": path or {}}
    return SimpleNamespace(request=Request({**scope, "headers": []}), parse_body=parse_body)


def fields_of(error: InvalidArgument) -> list[str]:
    return [violation.field for violation in error.violations]


async def test_a_body_becomes_a_message() -> None:
    body = json.dumps({"session_id": "s", "text": "é", "name": "topic"}).encode()
    message = await message_from_body(request(body), pb.CreateVariableRequest())
    assert message == pb.CreateVariableRequest(session_id="s", name="topic", text="é")


async def test_the_path_goes_before_the_body() -> None:
    body = json.dumps({"variable_id": "of the body", "text": "x"}).encode()
    message = await message_from_body(request(body, path={"variable_id": "of the path"}), pb.SetVariableRequest())
    assert message == pb.SetVariableRequest(variable_id="of the path", text="x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"{",
        b'{"text": 5}',
        b'{"none": 1}',
        b"\xff",
        b"[" * 900,
    ],
    ids=repr,
)
async def test_a_body_that_is_no_such_message(body: bytes) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await message_from_body(request(body), pb.SetVariableRequest())
    assert fields_of(raised.value) == ["request"]


async def test_a_body_that_holds_more_than_its_message_may() -> None:
    parts = max_json_parts(pb.SetVariableRequest.DESCRIPTOR) + SPARE_PARTS
    with pytest.raises(InvalidArgument, match=f"up to {parts} texts"):
        await message_from_body(request(b"[" * (parts + 1)), pb.SetVariableRequest())


def test_a_query_becomes_a_message() -> None:
    query = "session_id=s&variable_id=of-the-query&criterion=CRITERION_LATENCY&wait=true"
    message = message_from_query(request(query=query, path={"variable_id": "of-the-path"}), pb.GetVariableRequest())
    assert message == pb.GetVariableRequest(
        session_id="s", variable_id="of-the-path", criterion=pb.CRITERION_LATENCY, wait=True
    )


@pytest.mark.parametrize("query", ["none=1", "wait=yes", "wait=1", "criterion=none"])
def test_a_query_that_is_no_such_message(query: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        message_from_query(request(query=query), pb.GetVariableRequest())
    assert fields_of(raised.value) == ["request"]


def test_only_fields_that_are_truth_values_become_such() -> None:
    texts = {"wait": "true", "session_id": "true", "none": "true"}
    assert typed_fields(pb.GetVariableRequest(), texts) == {"wait": True, "session_id": "true", "none": "true"}
    assert typed_fields(pb.GetVariableRequest(), {"wait": "false"}) == {"wait": False}
    assert typed_fields(pb.GetVariableRequest(), {"wait": "True"}) == {"wait": "True"}


def test_an_error_has_one_line_and_names_what_is_wrong() -> None:
    with pytest.raises(InvalidArgument) as raised:
        fill_message(pb.SetVariableRequest(), {"none": 1})
    (violation,) = raised.value.violations
    assert "\n" not in violation.description
    assert "none" in violation.description


def test_numbers_of_a_query_are_read_out_of_their_texts() -> None:
    assert fill_message(pb.ListSessionsRequest(), {"limit": "3"}) == pb.ListSessionsRequest(limit=3)


def test_how_much_a_message_may_hold() -> None:
    """Its own object; for each field its name, what is around its entries, and as many entries as it may have."""
    assert max_json_parts(pb.ListSessionsRequest.DESCRIPTOR) == 1 + 3 + 3
    call = max_json_parts(pb.SubmitCallRequest.DESCRIPTOR)
    parameters = pb.SubmitCallRequest.DESCRIPTOR.fields_by_name["parameters"]
    assert call > 256 * max_json_parts(parameters.message_type)


def test_a_message_whose_limits_only_the_server_knows_is_none_of_these_paths() -> None:
    with pytest.raises(ValueError, match="has no limit of its own"):
        max_json_parts(context_service_pb2.ForwardRequest.DESCRIPTOR)


def test_all_fields_are_told_but_optional_ones_that_are_not_set() -> None:
    variable = pb.Variable(variable_id="v", state=pb.VARIABLE_STATE_UNSET)
    fields = message_fields(pb.CreateVariableResponse(variable=variable))["variable"]
    assert (fields["variable_id"], fields["state"], fields["name"]) == ("v", "VARIABLE_STATE_UNSET", "")
    assert message_fields(pb.Session(session_id="s")).keys() == {"session_id", "variables", "calls", "started"}


def test_a_response_is_json_with_its_characters_as_they_are() -> None:
    response = message_response(pb.ReadVariableResponse(text="é"))
    assert response.media_type == "application/json"
    assert bytes(response.body).decode() == message_json(pb.ReadVariableResponse(text="é")) == '{"text": "é"}'
