"""Prompts of completions: a text, a list of texts, a list of token ids, or a list of such lists."""

from typing import Any

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.http.openai.request import set_field
from jaxctx_server.http.request_body import PARSE_ERRORS

MAX_PROMPTS = 1024  # of a request


def parse_prompts(prompt: object) -> list[FillRequest]:
    """What each prompt fills. Raises InvalidArgument, naming `prompt`."""
    if isinstance(prompt, str):
        return [text_fill(prompt, "prompt")]
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return [token_fill(prompt, "prompt")]
        if any(type(each) is int for each in prompt):
            raise InvalidArgument.field("prompt", "must not mix token ids with others")
        if len(prompt) == 1:
            return [one_fill(prompt[0], "prompt")]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidArgument.field("prompt", f"must have up to {MAX_PROMPTS} prompts, not {len(prompt)}")
        return [one_fill(each, f"prompt[{place}]") for place, each in enumerate(prompt)]
    raise InvalidArgument.field("prompt", "must be text, token ids, or a list of those")


def one_fill(prompt: Any, name: str) -> FillRequest:
    """What one prompt of several fills."""
    if isinstance(prompt, str):
        return text_fill(prompt, name)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return token_fill(prompt, name)
    raise InvalidArgument.field(name, "must be text or token ids")


def text_fill(text: str, name: str) -> FillRequest:
    """What a text fills."""
    fill = FillRequest()
    set_field(fill, "text", text, name)
    return fill


def token_fill(token_ids: list[int], name: str) -> FillRequest:
    """What token ids fill: without `json_format`, which takes seconds for very many."""
    fill = FillRequest()
    fill.tokens.SetInParent()  # there may be none
    try:
        fill.tokens.ids.extend(token_ids)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field(name, "must be token ids") from error
    return fill
