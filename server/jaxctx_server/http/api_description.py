"""How each API describes its paths, in the form of OpenAPI 3.1.

Each package of an API has a module `openapi.py` with a function that returns its `ApiDescription`:

    def programs_description() -> ApiDescription:
        return ApiDescription(tag="programs", description="...", paths={...}, schemas={...})

    paths     by path, with `{name}` for a part of it, and by the method in lower case: what `operation` returns
    schemas   by name, which must be unique in the whole document; `schema_ref("Name")` refers to one

`jaxctx_server.http.openapi` merges the descriptions of all packages, and adds what is common: the schema of errors, the
ways of sending a key, the version. A new package is added to its list `descriptions`. Its test compares the document
with the routes of the application, both ways, so that a path is described exactly if it is served.

An operation lists what a client may get. `operation` adds the errors that every request can meet (`ERRORS_OF_ALL`),
those of a body if there is one, and those of a key unless it needs none; `errors` adds others by their status. Each has
the schema `Error` unless `error_schema` names another one of the package's own.

Messages of the contract get their schemas from `jaxctx_server.http.message_schemas`.

Schemas must be exact: a generator of requests (tests/e2e/test_openapi_contract.py) sends what they allow and what they
do not, and compares each response with its schema.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxctx_server.http.errors import JSON_MEDIA_TYPE

Json = dict[str, Any]

EVENT_STREAM_MEDIA_TYPE = "text/event-stream"
SCHEMAS_PATH = "#/components/schemas/"
ERRORS_OF_ALL = (400, 408, 429, 431, 500, 503)
ERRORS_OF_A_BODY = (413, 415)
ERRORS_OF_A_KEY = (401, 403)
KEY_SECURITY: list[Json] = [{"bearer": []}, {"apiKey": []}]  # either; left out by a server without keys
MEANING_OF_STATUS = {
    400: "The request is wrong. `param` names the field, if there is one.",
    401: "No key, or an unknown one.",
    403: "The key's role does not allow this.",
    404: "There is no such object, or not for this caller.",
    408: "The request took too long to arrive.",
    409: "The object is in use, exists already, or belongs to another model.",
    413: "The body is too large.",
    415: "The body is not application/json, or it is compressed.",
    429: "Too many requests, or no more memory or quota now. `retry-after` says when to try again, if that helps.",
    431: "The headers are too large.",
    499: "The work was cancelled, by closing the context for example.",
    500: "A defect of the server.",
    503: "The server loads, drains, or cannot reach an engine or its store.",
    504: "The request's time is over.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiDescription:
    """What one package serves."""

    tag: str  # of its operations in the document
    description: str
    paths: Mapping[str, Json]
    schemas: Mapping[str, Json]


def schema_ref(name: str) -> Json:
    """A schema that refers to another one by its name."""
    return {"$ref": SCHEMAS_PATH + name}


def nullable(schema: Json) -> Json:
    """A schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def json_response(description: str, schema: Json) -> Json:
    """A response with JSON."""
    return {"description": description, "content": {JSON_MEDIA_TYPE: {"schema": schema}}}


def event_schema(data: Json) -> Json:
    """The schema of one server-sent event: its data is JSON of the schema `data`, or [DONE]."""
    text = {"type": "string", "contentMediaType": JSON_MEDIA_TYPE, "contentSchema": data}
    with_json = {"properties": {"event": {"type": "string"}, "data": text}}
    return {"type": "object", "required": ["data"], "anyOf": [{"properties": {"data": {"const": "[DONE]"}}}, with_json]}


def event_stream_response(description: str, data: Json) -> Json:
    """A response of server-sent events with data of the schema `data`. The description tells their order."""
    return {"description": description, "content": {EVENT_STREAM_MEDIA_TYPE: {"schema": event_schema(data)}}}


def json_or_events_response(description: str, schema: Json, data: Json) -> Json:
    """A response of JSON, or of server-sent events with data of the schema `data` if the request asks for a stream."""
    response = json_response(description, schema)
    response["content"][EVENT_STREAM_MEDIA_TYPE] = {"schema": event_schema(data)}
    return response


def path_parameter(name: str, description: str, schema: Json) -> Json:
    """A part of the path."""
    return {"name": name, "in": "path", "required": True, "description": description, "schema": schema}


def query_parameter(name: str, description: str, schema: Json, *, required: bool = False) -> Json:
    """A part of the query."""
    return {"name": name, "in": "query", "required": required, "description": description, "schema": schema}


def header_parameter(name: str, description: str, schema: Json) -> Json:
    """An optional header."""
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def operation(
    *,
    operation_id: str,
    tag: str,
    summary: str,
    success: Json,
    body: Json | None = None,
    example: Json | None = None,
    parameters: Sequence[Json] = (),
    errors: Sequence[int] = (),
    error_schema: str = "Error",
    description: str = "",
    needs_key: bool = True,
) -> Json:
    """One method of a path.

    `success` is the response with status 200, `body` the schema of a body of JSON, `example` such a body. `errors` are
    the statuses of errors beside the common ones, `error_schema` is the name of their schema. `needs_key` False: it is
    open to anybody.
    """
    statuses = {*ERRORS_OF_ALL, *errors}
    if needs_key:
        statuses.update(ERRORS_OF_A_KEY)
    if body is not None:
        statuses.update(ERRORS_OF_A_BODY)
    responses = {"200": success}
    for status in sorted(statuses):
        responses[str(status)] = error_response(status, error_schema)
    described: Json = {"operationId": operation_id, "tags": [tag], "summary": summary}
    if description:
        described["description"] = description
    if parameters:
        described["parameters"] = list(parameters)
    if body is not None:
        content = {"schema": body} if example is None else {"schema": body, "example": example}
        described["requestBody"] = {"required": True, "content": {JSON_MEDIA_TYPE: content}}
    described["responses"] = responses
    described["security"] = KEY_SECURITY if needs_key else []
    return described


def error_response(status: int, error_schema: str) -> Json:
    """The response with an error."""
    response = json_response(MEANING_OF_STATUS[status], schema_ref(error_schema))
    if status in (429, 503):
        schema = {"type": "integer", "minimum": 0}
        response["headers"] = {"retry-after": {"description": "Seconds to wait.", "schema": schema}}
    return response
