"""POST /v1/completions: an output behind a prompt."""

from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.openai.generation import answer
from jaxctx_server.http.openai.request import Json, set_field
from jaxctx_server.http.request_body import PARSE_ERRORS


async def completions(call: HttpCall) -> Response:
    """POST /v1/completions."""
    return await answer(CompletionsForm(), call)


class CompletionsForm:
    """Prompts are one text or one list of token ids; answers have `text`."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    id_prefix = "cmpl-"
    adds_special_tokens = True  # as the tokenizer does with a text

    def fill_prompt(self, fields: Json, fill: FillRequest) -> None:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            set_field(fill, "text", prompt, "prompt")
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            fill_token_ids(fill, prompt)
        else:
            raise InvalidArgument.field("prompt", "must be one text, or one list of token ids")

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": finish_reason, "text": text}

    def chunk_choice(self, index: int, text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        return self.choice(index, text, finish_reason)


def fill_token_ids(fill: FillRequest, token_ids: list[int]) -> None:
    """Set the token ids of a prompt: without `json_format`, which takes seconds for very many."""
    fill.tokens.SetInParent()  # there may be none
    try:
        fill.tokens.ids.extend(token_ids)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field("prompt", "must be token ids") from error
