"""How an operation is described: which errors it has, who may call it."""

from __future__ import annotations

import pytest

from jaxctx_server.http.api_description import (
    ERRORS_OF_A_BODY,
    ERRORS_OF_A_KEY,
    ERRORS_OF_ALL,
    MEANING_OF_STATUS,
    event_stream_response,
    header_parameter,
    json_or_events_response,
    json_response,
    nullable,
    operation,
    path_parameter,
    query_parameter,
    schema_ref,
)
from jaxctx_server.http.errors import HTTP_STATUS, STATUS_OF_REASON

OK = json_response("It.", schema_ref("It"))


def test_an_open_operation_without_a_body() -> None:
    described = operation(operation_id="A", tag="t", summary="s", success=OK, needs_key=False)
    assert described["security"] == []
    assert set(described["responses"]) == {"200", *map(str, ERRORS_OF_ALL)}
    assert {"requestBody", "parameters", "description"}.isdisjoint(described)
    error = described["responses"]["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/Error"}


def test_an_operation_with_everything() -> None:
    described = operation(
        operation_id="A",
        tag="t",
        summary="s",
        success=OK,
        body={"type": "object"},
        example={"a": 1},
        parameters=[path_parameter("id", "", {}), query_parameter("q", "", {}), header_parameter("x-h", "", {})],
        errors=[404],
        error_schema="OtherError",
        description="More.",
    )
    statuses = {200, 404, *ERRORS_OF_ALL, *ERRORS_OF_A_BODY, *ERRORS_OF_A_KEY}
    assert set(described["responses"]) == set(map(str, statuses))
    assert described["security"] == [{"bearer": []}, {"apiKey": []}]
    assert described["requestBody"]["required"]
    content = {"schema": {"type": "object"}, "example": {"a": 1}}
    assert described["requestBody"]["content"] == {"application/json": content}
    assert [(each["in"], each["required"]) for each in described["parameters"]] == [
        ("path", True),
        ("query", False),
        ("header", False),
    ]
    assert described["responses"]["503"]["headers"]["retry-after"]["schema"]["type"] == "integer"
    assert described["responses"]["404"]["content"]["application/json"]["schema"] == schema_ref("OtherError")


def test_an_error_without_a_meaning_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        operation(operation_id="A", tag="t", summary="s", success=OK, errors=[418])


def test_every_status_of_an_error_has_a_meaning() -> None:
    assert {*HTTP_STATUS.values(), *STATUS_OF_REASON.values(), 500} <= MEANING_OF_STATUS.keys()


def test_responses_of_streams() -> None:
    events = event_stream_response("Events.", schema_ref("Part"))["content"]
    assert set(events) == {"text/event-stream"}
    data = events["text/event-stream"]["schema"]["anyOf"][1]["properties"]["data"]
    assert data["contentSchema"] == schema_ref("Part")
    either = json_or_events_response("Either.", schema_ref("It"), schema_ref("Part"))["content"]
    assert either == {"application/json": {"schema": schema_ref("It")}, **events}
    assert nullable({"type": "string"}) == {"anyOf": [{"type": "string"}, {"type": "null"}]}
