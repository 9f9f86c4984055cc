"""Requests of ModelService, and what names a model anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from jaxctx_server import requests
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.content import MessageContent, TextContent, messages
from jaxctx_server.validate.limits import Limits


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Text to tokenise as for an empty context."""

    model_id: str
    content: TextContent


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Tokens to turn into text."""

    model_id: str
    tokens: list[int]
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class ApplyChatTemplate:
    """Messages to render."""

    model_id: str
    content: MessageContent


def model_id(checks: Checks, limits: Limits, value: object) -> str:
    """A model's name; "" for the default one. Whether there is such a model is not a matter of form."""
    return checks.string("model_id", value, 0, limits.max_name_bytes)


def get(limits: Limits, request: requests.GetModelRequest) -> str:
    """See GetModelRequest: the model's name."""
    checks = Checks()
    name = model_id(checks, limits, request.model_id)
    checks.done()
    return name


def tokenize(limits: Limits, request: requests.TokenizeRequest) -> Tokenize:
    """See TokenizeRequest."""
    checks = Checks()
    checked = Tokenize(
        model_id(checks, limits, request.model_id),
        TextContent(
            checks.string("text", request.text, 0, limits.max_text_bytes),
            checks.flag("add_special_tokens", request.add_special_tokens, True),
        ),
    )
    checks.done()
    return checked


def detokenize(limits: Limits, request: requests.DetokenizeRequest) -> Detokenize:
    """See DetokenizeRequest."""
    checks = Checks()
    checked = Detokenize(
        model_id(checks, limits, request.model_id),
        checks.token_ids("tokens", request.tokens, limits.vocab_size, limits.max_detokenize_tokens),
        checks.flag("skip_special_tokens", request.skip_special_tokens, False),
    )
    checks.done()
    return checked


def apply_chat_template(limits: Limits, request: requests.ApplyChatTemplateRequest) -> ApplyChatTemplate:
    """See ApplyChatTemplateRequest."""
    checks = Checks()
    checked = ApplyChatTemplate(model_id(checks, limits, request.model_id), messages(checks, limits, request.messages))
    checks.done()
    return checked
