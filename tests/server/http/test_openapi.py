"""The document of all paths: it has exactly the paths that are served, and is valid OpenAPI."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from jaxctx_server.http.api_description import ApiDescription, json_response, operation
from jaxctx_server.http.app import make_app
from jaxctx_server.http.openapi import merge, openapi_document
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend


def served_operations() -> set[tuple[str, str]]:
    """Path and method of every route of the application, but HEAD, which every GET has, and the page's own paths."""
    app = make_app(Backend.make(ServerLifecycle(), None, max_calls=1))
    return {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in route.methods or ()
        if method != "HEAD"
    }


def described_operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(path, method) for path, methods in document["paths"].items() for method in methods}


def references(value: Any) -> set[str]:
    """All references within a part of the document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_every_route_is_described_and_nothing_else() -> None:
    served, described = served_operations(), described_operations(openapi_document(with_keys=True))
    assert served == described


def test_it_is_valid() -> None:
    OpenAPIV31SpecValidator(openapi_document(with_keys=True)).validate()


def test_ids_of_operations_are_different() -> None:
    ids = [
        each["operationId"]
        for methods in openapi_document(with_keys=True)["paths"].values()
        for each in methods.values()
    ]
    assert len(set(ids)) == len(ids)


def test_every_schema_that_is_referred_to_is_there_and_used() -> None:
    document = openapi_document(with_keys=True)
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names == document["components"]["schemas"].keys()


def test_every_part_of_a_path_is_a_parameter() -> None:
    for path, methods in openapi_document(with_keys=True)["paths"].items():
        for described in methods.values():
            names = {each["name"] for each in described.get("parameters", ()) if each["in"] == "path"}
            assert names == set(re.findall(r"{(\w+)}", path)), path


def api(path: str, summary: str, schema: dict[str, Any]) -> ApiDescription:
    described = operation(operation_id=summary, tag="t", summary=summary, success=json_response("", {}))
    return ApiDescription(tag="t", description="", paths={path: {"get": described}}, schemas={"Thing": schema})


def test_descriptions_are_merged() -> None:
    document = merge([api("/b", "one", {"type": "string"}), api("/a", "two", {"type": "string"})], with_keys=True)
    assert list(document["paths"]) == ["/a", "/b"]
    assert document["components"]["schemas"]["Thing"] == {"type": "string"}
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}


def test_a_server_without_keys_asks_for_none() -> None:
    with_keys, without = (merge([api("/a", "one", {})], with_keys=has_keys) for has_keys in (True, False))
    assert with_keys["paths"]["/a"]["get"]["security"] == [{"bearer": []}, {"apiKey": []}]
    assert without["paths"]["/a"]["get"]["security"] == []


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ValueError, match="schemas: Thing is described twice"):
        merge([api("/a", "one", {"type": "string"}), api("/b", "two", {"type": "integer"})], with_keys=True)
    with pytest.raises(ValueError, match="/a: get is described twice"):
        merge([api("/a", "one", {}), api("/a", "two", {})], with_keys=True)
