"""Schemas of messages: they allow what the server takes, refuse what rules of fields refuse, and fit what it writes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2, model_service_pb2
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.http.api_description import Json
from jaxctx_server.http.message_schemas import query_parameters, request_schemas, response_schemas
from jaxctx_server.http.messages import message_fields
from jaxctx_server.validate import Limits
from jaxctx_server.validate.rules import validate

LIMITS = Limits(vocab_size=512, max_context_tokens=1536, default_max_tokens=16, queue_limit=64)


def validator(schemas: dict[str, Json], name: str) -> jsonschema.Draft202012Validator:
    text = json.dumps({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})
    return jsonschema.Draft202012Validator(json.loads(text))


def allows(descriptor: Descriptor, value: Any) -> bool:
    return validator(request_schemas(descriptor), descriptor.name).is_valid(value)


def server_takes(descriptor: Descriptor, value: Any) -> bool:
    try:
        validate(LIMITS, json_format.ParseDict(value | {}, GetMessageClass(descriptor)()))
    except (json_format.ParseError, InvalidArgument, AttributeError, TypeError, ValueError):
        return False
    return True


CALL: Json = {"session_id": "s", "template": "a {{x}}", "parameters": [{"name": "x", "output": {}}]}
OUTPUT: Json = {"max_tokens": 4, "stop": ["a"], "stop_token_ids": [1, 2], "sampling": {"temperature": 0.5, "seed": "7"}}

ACCEPTED: list[tuple[Descriptor, Json]] = [
    (pb.CreateSessionRequest.DESCRIPTOR, {}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"session_id": "a", "ttl": "1.5s"}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"session_id": None, "ttl": None}),
    (pb.CreateVariableRequest.DESCRIPTOR, {"session_id": "a", "text": "", "name": ""}),
    (pb.SubmitCallRequest.DESCRIPTOR, CALL),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": OUTPUT}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"criterion": 4}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"max_tokens": "4"}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"max_tokens": 4.0}}]}),
    (
        pb.SubmitCallRequest.DESCRIPTOR,
        {**CALL, "parameters": [{"name": "x", "output": {"sampling": {"logit_bias": {"3": -1.5}}}}]},
    ),
]
REFUSED: list[tuple[Descriptor, Any]] = [
    (pb.CreateSessionRequest.DESCRIPTOR, []),
    (pb.CreateSessionRequest.DESCRIPTOR, {"session_id": ""}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"session_id": "-a"}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"session_id": 1}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"ttl": 1}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"ttl": "1"}),
    (pb.CreateSessionRequest.DESCRIPTOR, {"other": 1}),
    (pb.CreateVariableRequest.DESCRIPTOR, {"name": "x"}),
    (pb.CreateVariableRequest.DESCRIPTOR, {"session_id": None}),
    (pb.CreateVariableRequest.DESCRIPTOR, {"session_id": "a", "name": "x" * 257}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "template": None}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "template": ""}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": []}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x"}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"max_tokens": 0}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"max_tokens": 1.5}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"stop": [""]}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"stop": ["a"] * 17}}]}),
    (pb.SubmitCallRequest.DESCRIPTOR, {**CALL, "parameters": [{"name": "x", "output": {"stop_token_ids": [-1]}}]}),
    (
        pb.SubmitCallRequest.DESCRIPTOR,
        {**CALL, "parameters": [{"name": "x", "output": {"sampling": {"temperature": -1}}}]},
    ),
]


@pytest.mark.parametrize(("descriptor", "value"), ACCEPTED)
def test_what_the_server_takes_is_allowed(descriptor: Descriptor, value: Json) -> None:
    assert server_takes(descriptor, value)
    assert allows(descriptor, value)


@pytest.mark.parametrize(("descriptor", "value"), REFUSED)
def test_what_the_rules_refuse_is_not_allowed(descriptor: Descriptor, value: Any) -> None:
    assert not server_takes(descriptor, value)
    assert not allows(descriptor, value)


def test_fields_of_the_path_need_not_be_in_the_body() -> None:
    schemas = request_schemas(pb.SetVariableRequest.DESCRIPTOR, without=["variable_id"])
    check = validator(schemas, "SetVariableRequest")
    assert check.is_valid({"session_id": "a", "text": ""})
    assert not check.is_valid({"variable_id": "v"})


def test_every_response_of_the_contract_has_a_schema() -> None:
    for file in (context_service_pb2, model_service_pb2, pb):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                schemas = response_schemas(method.output_type)
                jsonschema.Draft202012Validator.check_schema(schemas[method.output_type.name])


def test_what_the_server_writes_fits() -> None:
    response = pb.GetGraphResponse(tasks=[pb.GraphTask(call_id="c", phase=pb.TASK_PHASE_DONE, inputs=["v"])])
    check = validator(response_schemas(response.DESCRIPTOR), "GetGraphResponse")
    check.validate(message_fields(response))
    assert not check.is_valid({**message_fields(response), "more": 1})
    assert not check.is_valid({})
    model = model_service_pb2.Model(model_id="echo", parameters=2**40)
    written = message_fields(model)
    assert written["parameters"] == str(2**40)  # 64 bits are text in JSON
    check = validator(response_schemas(model.DESCRIPTOR), "Model")
    check.validate(written)
    assert not check.is_valid({**written, "parameters": 2**40})


def test_a_query() -> None:
    described = query_parameters(pb.GetVariableRequest.DESCRIPTOR, without=["variable_id"])
    by_name = {each["name"]: each for each in described}
    assert list(by_name) == ["session_id", "criterion", "wait"]
    assert [each["required"] for each in described] == [True, False, False]
    assert by_name["wait"]["schema"] == {"type": "boolean"}
    assert by_name["criterion"]["schema"]["enum"][0] == "CRITERION_UNSPECIFIED"
    with pytest.raises(ValueError, match="no query"):
        query_parameters(pb.CreateSessionRequest.DESCRIPTOR)
