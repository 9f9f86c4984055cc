"""POST /v1/messages/count_tokens: how many tokens a prompt has."""

from typing import Any

from starlette.responses import JSONResponse, Response

from jaxctx.errors import JaxctxError
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest
from jaxctx_server.http.anthropic.request import NAMES_OF_FIELDS, parse_prompt_fields
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.field_names import renamed
from jaxctx_server.http.openai.request import parse_object


async def count_tokens(call: HttpCall) -> Response:
    """POST /v1/messages/count_tokens."""
    model_id, prompt = await call.parse_body(parse_count_request)
    request = ApplyChatTemplateRequest(model_id=model_id, messages=prompt)
    try:
        rendered = await call.unary(call.services.models.apply_chat_template, request)
    except JaxctxError as error:
        raise renamed(error, NAMES_OF_FIELDS) from None
    body: dict[str, Any] = {"input_tokens": len(rendered.tokens)}
    return JSONResponse(body)


def parse_count_request(data: bytes) -> tuple[str, ChatMessages]:
    """Model and prompt of a body. Raises InvalidArgument naming the field."""
    create, prompt, _ = parse_prompt_fields(parse_object(data))
    return create.model_id, prompt
