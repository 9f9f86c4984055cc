"""The OpenAPI document of all HTTP paths: the descriptions of all packages, merged.

`jaxctx_server.http.api_description` says how a package describes its paths.
"""

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from jaxctx_server.http.anthropic.openapi import anthropic_description
from jaxctx_server.http.api_description import ApiDescription, Json, nullable
from jaxctx_server.http.contextcache.openapi import contextcache_description
from jaxctx_server.http.decisions.openapi import decisions_description
from jaxctx_server.http.errors import TYPE_OF_STATUS
from jaxctx_server.http.openai.models_openapi import models_description
from jaxctx_server.http.openai.openapi import completions_description
from jaxctx_server.http.openai.responses.openapi import responses_description
from jaxctx_server.http.ops.openapi import ops_description
from jaxctx_server.http.page.openapi import page_description
from jaxctx_server.http.programs.openapi import programs_description

DESCRIPTION = (
    "Inference whose first-class object is the context: filled, continued, forked, saved. Unknown paths give 404, and "
    "methods that a path lacks 405 with the header `allow`, both with an `Error`. Every response of a path has the "
    "header `x-request-id`."
)
SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "For people."},
                "type": {"type": "string", "enum": sorted({*TYPE_OF_STATUS.values(), "api_error"})},
                "code": {
                    "type": "string",
                    "description": "For programs: a value of ErrorReason without its prefix; HTTP; or of a kept "
                    "context: context_not_found, context_expired, context_busy, context_exists, model_mismatch.",
                },
                "param": {**nullable({"type": "string"}), "description": "The first field that is wrong."},
            },
        }
    },
}


def descriptions() -> list[ApiDescription]:
    """The description of each package that serves paths."""
    return [
        models_description(),
        responses_description(),
        anthropic_description(),
        completions_description(),
        decisions_description(),
        contextcache_description(),
        programs_description(),
        ops_description(),
        page_description(),
    ]


@functools.cache
def openapi_document(*, with_keys: bool) -> Json:
    """The document of a server with or without keys, made once. Not to be changed."""
    return merge(descriptions(), with_keys=with_keys)


def merge(apis: Iterable[ApiDescription], *, with_keys: bool) -> Json:
    """One document of these descriptions. Raises ValueError for a name that stands for two things."""
    paths: Json = {}
    schemas: Json = {"Error": ERROR_SCHEMA}
    tags: list[Json] = []
    for api in apis:
        tags.append({"name": api.tag, "description": api.description})
        for path, methods in api.paths.items():
            described = methods if with_keys else {method: without_key(each) for method, each in methods.items()}
            add_all(paths.setdefault(path, {}), described, path)
        add_all(schemas, api.schemas, "schemas")
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxctx", "version": version("jaxctx"), "description": DESCRIPTION},
        "tags": tags,
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": SECURITY_SCHEMES},
    }


def without_key(operation: Json) -> Json:
    """The same operation on a server without keys."""
    return {**operation, "security": []}


def add_all(target: Json, more: Mapping[str, Any], place: str) -> None:
    """Add entries by their names. Raises ValueError for a name that stands for something else already."""
    for name, value in more.items():
        if target.get(name, value) != value:
            raise ValueError(f"{place}: {name} is described twice, differently")
        target[name] = value
