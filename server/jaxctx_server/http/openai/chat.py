"""POST /v1/chat/completions: an answer to messages."""

from typing import Any

from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import ChatMessages
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.openai.fields import NOTHING, UNSUPPORTED_MESSAGE_FIELDS
from jaxctx_server.http.openai.generation import answer
from jaxctx_server.http.openai.request import Json, check_asks_for_nothing, check_entries, set_field


async def chat_completions(call: HttpCall) -> Response:
    """POST /v1/chat/completions."""
    return await answer(ChatForm(), call)


class ChatForm:
    """Requests have messages, answers have a message of the assistant."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    adds_special_tokens = False  # beside those that the chat template writes

    def fill_prompt(self, fields: Json, fill: FillRequest) -> None:
        messages = fields.get("messages")
        if not isinstance(messages, list):
            raise InvalidArgument.field("messages", "must be a list of messages")
        check_entries(ChatMessages(), "messages", messages, "messages")
        parsed = [parse_message(index, message) for index, message in enumerate(messages)]
        set_field(fill, "messages", {"messages": parsed}, "messages")

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "logprobs": None, "finish_reason": finish_reason, "message": message}

    def chunk_choice(self, index: int, text: str, finish_reason: str | None, *, is_first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if is_first else {"content": text}
        return {"index": index, "logprobs": None, "finish_reason": finish_reason, "delta": delta}


def parse_message(index: int, message: object) -> dict[str, str]:
    """Role and text of a message. Raises InvalidArgument, naming the field of the message."""
    fields: Json = message if isinstance(message, dict) else {}
    for name in UNSUPPORTED_MESSAGE_FIELDS:
        if fields.get(name) is not None:
            check_asks_for_nothing(f"messages[{index}].{name}", fields[name], NOTHING)
    role, content = fields.get("role"), text_of(fields.get("content"))
    if not isinstance(role, str):
        raise InvalidArgument.field(f"messages[{index}].role", "must be text")
    if content is None:
        raise InvalidArgument.field(f"messages[{index}].content", "must be text")
    return {"role": role, "content": content}


def text_of(content: object) -> str | None:
    """The text of a message's content, which may be in parts; None if any part is something else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)
