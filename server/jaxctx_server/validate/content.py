"""Content as text | tokens | messages: what a Fill appends, what a Plan asks about; and requests of ModelService."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx_server.validate.field import Field, utf8_size

CHOICES = ("text", "tokens", "messages")
ANSWERED = ("user", "tool")  # roles after which the assistant speaks


@dataclass(frozen=True, slots=True)
class TextContent:
    """Text to tokenise. `add_special_tokens` None: as the context's being empty decides."""

    text: str
    add_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class MessageContent:
    """Messages for the chat template: dicts of `role` and `content`."""

    messages: Sequence[dict[str, str]]
    add_generation_prompt: bool


Content = TextContent | MessageContent | Sequence[int]  # ids of the vocabulary


def content(request: Field) -> Content:
    """Exactly one of the three, not empty."""
    add_special_tokens = request["add_special_tokens"].flag(None)
    match [name for name in CHOICES if request[name].value is not None]:
        case ["text"]:
            return TextContent(request["text"].text(1, request.limits.max_text_bytes), add_special_tokens)
        case ["tokens"]:
            return request["tokens"]["ids"].token_ids(request.limits.max_context_tokens, low=1)
        case ["messages"]:
            return messages(request["messages"])
    request.at("content", None).refuse("exactly one of text, tokens and messages must be set")
    return ()


def messages(field: Field) -> MessageContent:
    """A conversation; by itself it ends with what opens an answer if somebody waits for one."""
    limits = field.limits
    if not field.message("must be set"):
        return MessageContent((), False)
    checked = [
        {
            "role": entry["role"].text(1, limits.max_role_bytes),
            "content": entry["content"].text(0, limits.max_text_bytes),
        }
        for entry in field["messages"].items(limits.max_messages, low=1)
        if entry.message("must be a message")
    ]
    if sum(utf8_size(text) or 0 for message in checked for text in message.values()) > limits.max_text_bytes:
        field["messages"].refuse(f"must be up to {limits.max_text_bytes} bytes together")
    last_role = checked[-1]["role"] if checked else ""
    return MessageContent(checked, field["add_generation_prompt"].flag(last_role in ANSWERED))


def model_id(request: Field) -> str:
    """A model's name; "" for the default one. Whether there is such a model is not a matter of form."""
    return request["model_id"].text(0, request.limits.max_name_bytes)


def tokenize(request: Field) -> tuple[str, str, bool]:
    """The model, the text, and whether to add special tokens."""
    text = request["text"].text(0, request.limits.max_text_bytes)
    return model_id(request), text, request["add_special_tokens"].flag(True)


def detokenize(request: Field) -> tuple[str, list[int], bool]:
    """The model, the tokens, and whether to skip special ones."""
    tokens = request["tokens"].token_ids(request.limits.max_detokenize_tokens)
    return model_id(request), tokens, request["skip_special_tokens"].flag(False)


def apply_chat_template(request: Field) -> tuple[str, MessageContent]:
    """The model, and messages to render."""
    return model_id(request), messages(request["messages"])
