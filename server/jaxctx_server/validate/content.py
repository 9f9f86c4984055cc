"""Content: what a Fill appends and a Plan asks about, as text | tokens | messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx_server import requests
from jaxctx_server.validate.checks import Checks, utf8_size
from jaxctx_server.validate.limits import Limits

CHOICES = ("text", "tokens", "messages")
ANSWERED = ("user", "tool")  # roles after which the assistant speaks


@dataclass(frozen=True, slots=True)
class TextContent:
    """Text to tokenise. `add_special_tokens` None: as the context's being empty decides."""

    text: str
    add_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class TokenContent:
    """Ids of the vocabulary."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """Messages for the chat template: dicts of `role` and `content`."""

    messages: Sequence[dict[str, str]]
    add_generation_prompt: bool


Content = TextContent | TokenContent | MessageContent


def content(checks: Checks, limits: Limits, request: requests.FillRequest | requests.PlanRequest) -> Content:
    """Exactly one of the three, not empty."""
    given = [name for name in CHOICES if getattr(request, name) is not None]
    add_special_tokens = checks.flag("add_special_tokens", request.add_special_tokens, None)
    if len(given) != 1:
        checks.refuse("content", "exactly one of text, tokens and messages must be set")
        return TokenContent(())
    if request.text is not None:
        return TextContent(checks.string("text", request.text, 1, limits.max_text_bytes), add_special_tokens)
    if request.messages is not None:
        return messages(checks, limits, request.messages)
    ids = request.tokens.ids if isinstance(request.tokens, requests.TokenIds) else request.tokens
    high = limits.max_context_tokens
    return TokenContent(checks.token_ids("tokens.ids", ids, limits.vocab_size, high, low=1))


def messages(checks: Checks, limits: Limits, value: object) -> MessageContent:
    """A conversation; by itself it ends with what opens an answer if somebody waits for one."""
    if not isinstance(value, requests.ChatMessages):
        checks.refuse("messages", "must be set")
        return MessageContent((), False)
    entries = checks.items("messages.messages", value.messages, limits.max_messages, low=1)
    checked = [
        _message(checks, limits, f"messages.messages[{place}]", entry)
        for place, entry in enumerate(_within(checks, limits, entries))
    ]
    last_role = checked[-1]["role"] if checked else ""
    path = "messages.add_generation_prompt"
    return MessageContent(checked, checks.flag(path, value.add_generation_prompt, last_role in ANSWERED))


def _within(checks: Checks, limits: Limits, entries: Sequence[object]) -> Sequence[object]:
    """The entries if their texts together are within the limit, else none."""
    total = 0
    for entry in entries:
        if isinstance(entry, requests.ChatMessage):
            total += sum(utf8_size(part) or 0 for part in (entry.role, entry.content) if isinstance(part, str))
        if total > limits.max_text_bytes:
            checks.refuse("messages.messages", f"must be up to {limits.max_text_bytes} bytes together")
            return ()
    return entries


def _message(checks: Checks, limits: Limits, path: str, entry: object) -> dict[str, str]:
    if not isinstance(entry, requests.ChatMessage):
        checks.refuse(path, "must be a message")
        return {"role": "", "content": ""}
    return {
        "role": checks.string(f"{path}.role", entry.role, 1, limits.max_role_bytes),
        "content": checks.string(f"{path}.content", entry.content, 0, limits.max_text_bytes),
    }
