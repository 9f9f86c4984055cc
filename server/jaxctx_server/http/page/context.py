"""GET and DELETE /page/context/{context_id}: what a context says; its end."""

from starlette.responses import JSONResponse, Response

from jaxctx.v1.context_service_pb2 import CloseContextRequest, GetContextRequest
from jaxctx.v1.model_service_pb2 import DetokenizeRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.messages import message_from_query
from jaxctx_server.http.page.as_json import context_json

MAX_SHOWN_TOKENS = 2048  # the last ones of a context


async def context_text(call: HttpCall) -> Response:
    """GET /page/context/{context_id}: its counters, and the text of its last MAX_SHOWN_TOKENS tokens.

    `skipped` is the number of tokens before them.
    """
    request = message_from_query(call, GetContextRequest(include_tokens=True))
    response = await call.unary(call.services.contexts.get_context, request)
    tokens = response.tokens.ids[-MAX_SHOWN_TOKENS:]
    text = ""
    if tokens:
        detokenize = DetokenizeRequest(model_id=response.context.model_id, tokens=tokens)
        text = (await call.unary(call.services.models.detokenize, detokenize)).text
    skipped = len(response.tokens.ids) - len(tokens)
    return JSONResponse({"context": context_json(response.context), "text": text, "skipped": skipped})


async def close_context(call: HttpCall) -> Response:
    """DELETE /page/context/{context_id}."""
    request = message_from_query(call, CloseContextRequest())
    await call.unary(call.services.contexts.close_context, request)
    return JSONResponse({"context_id": request.context_id})
