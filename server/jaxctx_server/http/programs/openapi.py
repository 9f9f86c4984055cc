"""The description of the paths of programs: the messages of the contract, as JSON."""

from collections.abc import Sequence

from google.protobuf.descriptor import Descriptor

from jaxctx.v1 import session_service_pb2 as pb
from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    event_stream_response,
    json_response,
    operation,
    path_parameter,
    schema_ref,
)
from jaxctx_server.http.message_schemas import ID_PATTERN, query_parameters, request_schemas, response_schemas

TAG = "programs"
DESCRIPTION = "Sessions, semantic variables and calls: texts that do not exist yet, and the calls that make them."
ERRORS = (404, 409, 499, 504)  # 499 and 504: of what a variable was made by
PICTURE: Json = {"description": "The picture.", "content": {"image/svg+xml": {"schema": {"type": "string"}}}}
TEXT_EVENTS = event_stream_response(
    "The text as it comes: events of a `ReadVariableResponse` each, then [DONE], or an event `error` with an `Error`.",
    {"anyOf": [schema_ref("ReadVariableResponse"), schema_ref("Error")]},
)
EXAMPLES: dict[str, Json] = {
    "CreateSession": {"session_id": "mine", "ttl": "600s"},
    "CreateVariable": {"session_id": "mine", "name": "topic", "text": "pages"},
    "SetVariable": {"session_id": "mine", "text": "pages"},
    "SubmitCall": {
        "session_id": "mine",
        "template": "def {{name}}(n):{{body}}",
        "parameters": [{"name": "name", "text": "fib"}, {"name": "body", "output": {"max_tokens": 8}}],
    },
    "SubmitNativeCall": {
        "session_id": "mine",
        "function": "strip",
        "parameters": [{"name": "text", "text": " pages "}, {"name": "bare", "output": {}}],
    },
}


def programs_description() -> ApiDescription:
    """All paths of programs."""
    messages = pb.DESCRIPTOR.message_types_by_name
    paths: dict[str, Json] = {
        "/v1/session": {
            "post": from_body("CreateSession", "Make a session."),
            "get": from_query("ListSessions", "The caller's sessions."),
        },
        "/v1/session/{session_id}": {
            "get": from_query("GetSession", "A session.", "session_id"),
            "delete": from_query("DeleteSession", "End a session.", "session_id"),
        },
        "/v1/session/{session_id}/graph": {
            "get": from_query("GetGraph", "The tasks of a session.", "session_id"),
        },
        "/v1/session/{session_id}/graph.svg": {
            "get": described(
                "GetGraphPicture",
                "The tasks of a session as a picture.",
                parameters=parameters(messages["GetGraphRequest"], "session_id"),
                success=PICTURE,
            ),
        },
        "/v1/semantic_var": {
            "post": from_body("CreateVariable", "Make a variable."),
            "get": from_query("ListVariables", "A session's variables, without their texts."),
        },
        "/v1/semantic_var/{variable_id}": {
            "put": from_body("SetVariable", "Set a variable, for ever.", "variable_id"),
            "get": from_query("GetVariable", "A variable as it is, or with `wait` once it is set.", "variable_id"),
        },
        "/v1/semantic_var/{variable_id}/text": {
            "get": described(
                "ReadVariable",
                "The text of a variable as it comes.",
                parameters=parameters(messages["ReadVariableRequest"], "variable_id"),
                success=TEXT_EVENTS,
            ),
        },
        "/v1/semantic_call": {"post": from_body("SubmitCall", "Add a semantic call, or a native step.")},
        "/v1/native_call": {
            "post": described(
                "SubmitNativeCall",
                "Add a native step, or a semantic call.",
                body=schema_ref("SubmitCallRequest"),
                success=json_response("The call.", schema_ref("SubmitCallResponse")),
            )
        },
        "/v1/semantic_call/{call_id}": {"delete": from_query("CancelCall", "Cancel a call.", "call_id")},
    }
    return ApiDescription(tag=TAG, description=DESCRIPTION, paths=paths, schemas=program_schemas())


def program_schemas() -> dict[str, Json]:
    """The schemas of all messages in bodies."""
    messages = pb.DESCRIPTOR.message_types_by_name
    schemas: dict[str, Json] = {}
    for name in ("CreateSession", "CreateVariable", "SubmitCall"):
        schemas |= request_schemas(messages[f"{name}Request"])
    schemas |= request_schemas(messages["SetVariableRequest"], without=("variable_id",))
    for method in pb.DESCRIPTOR.services_by_name["SessionService"].methods:
        schemas |= response_schemas(method.output_type)
    return schemas


def from_body(method: str, summary: str, *path_names: str) -> Json:
    """The operation of a method whose request is the body; `path_names` are its fields that the path has."""
    return described(
        method,
        summary,
        parameters=path_parameters(path_names),
        body=schema_ref(f"{method}Request"),
        success=json_response("Done.", schema_ref(f"{method}Response")),
    )


def from_query(method: str, summary: str, *path_names: str) -> Json:
    """The operation of a method whose request is the path and the query."""
    request = pb.DESCRIPTOR.message_types_by_name[f"{method}Request"]
    return described(
        method,
        summary,
        parameters=parameters(request, *path_names),
        success=json_response("Done.", schema_ref(f"{method}Response")),
    )


def described(
    operation_id: str, summary: str, *, success: Json, parameters: Sequence[Json] = (), body: Json | None = None
) -> Json:
    """An operation of this API."""
    return operation(
        operation_id=operation_id,
        tag=TAG,
        summary=summary,
        success=success,
        body=body,
        example=EXAMPLES.get(operation_id),
        parameters=parameters,
        errors=ERRORS,
    )


def parameters(request: Descriptor, *path_names: str) -> list[Json]:
    """The fields of a request as parts of the path and the query."""
    return [*path_parameters(path_names), *query_parameters(request, without=path_names)]


def path_parameters(names: Sequence[str]) -> list[Json]:
    """Ids in the path."""
    return [path_parameter(name, f"The {name}.", {"type": "string", "pattern": ID_PATTERN}) for name in names]
