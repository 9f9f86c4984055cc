"""GET /openapi.json: the description of all paths."""

import functools

from starlette.responses import Response

from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.errors import JSON_MEDIA_TYPE, json_text
from jaxctx_server.http.openapi import openapi_document


async def openapi(call: HttpCall) -> Response:
    """GET /openapi.json."""
    with_keys = call.frontend.backend.pipeline.has_keys
    return Response(document_json(with_keys=with_keys), media_type=JSON_MEDIA_TYPE)


@functools.cache
def document_json(*, with_keys: bool) -> str:
    """The document as JSON."""
    return json_text(openapi_document(with_keys=with_keys))
