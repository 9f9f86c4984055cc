"""Arguments of the client's methods to request messages. Pure; ranges are checked by the server, and only there.

What no message can hold (another type, a number of too many bits, a lone surrogate) is an InvalidArgument here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtobufMessage

from jaxctx.client.options import CreateOptions, GenerateOptions, SamplingOptions, Settings, UpdateOptions
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import content_pb2, context_service_pb2, generation_pb2, lifetime_pb2, model_service_pb2

Message = Mapping[str, str]  # {"role": …, "content": …}
M = TypeVar("M", bound=ProtobufMessage)
REFUSALS = (TypeError, ValueError, OverflowError, AttributeError)  # of protobuf's constructors


@dataclass(frozen=True, slots=True)
class Content:
    """What to append to a context: exactly one of text, tokens and messages."""

    text: str | None = None
    tokens: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("text", "tokens", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgument.field("content", f"give one of text, tokens and messages, not {given or 'none'}")
        if isinstance(self.text, (bytes, list, tuple)):
            raise InvalidArgument.field("text", "a str; token ids go to tokens=, messages to messages=")

    @property
    def token_ids(self) -> content_pb2.TokenIds | None:
        """The field `tokens` of a request."""
        return None if self.tokens is None else make(content_pb2.TokenIds, within="tokens.", ids=self.tokens)

    @property
    def chat(self) -> content_pb2.ChatMessages | None:
        """The field `messages` of a request."""
        return None if self.messages is None else chat_messages(self.messages, self.add_generation_prompt)


def make(kind: type[M], /, *, within: str = "", **fields: Any) -> M:
    """A message of these fields. Raises InvalidArgument naming the field that it cannot hold, `within` before it."""
    try:
        return kind(**fields)
    except REFUSALS as error:
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except REFUSALS:
                raise InvalidArgument.field(within + name, "is not of its type, or out of its range") from error
        raise


def new_id() -> str:
    """128 random bits: an id that only a retry of ours can have used before."""
    return secrets.token_hex(16)


def chat_messages(messages: Sequence[Message], add_generation_prompt: bool | None) -> content_pb2.ChatMessages:
    """Raises InvalidArgument for a message with other keys than role and content, which would be lost silently."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidArgument.field("messages", "must be a list of messages")
    return make(
        content_pb2.ChatMessages,
        messages=[_chat_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt,
    )


def _chat_message(path: str, message: object) -> content_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidArgument.field(path, "must be a mapping with role and content")
    if unknown := message.keys() - {"role", "content"}:
        raise InvalidArgument.field(path, f"unknown keys {sorted(map(str, unknown))}")
    return make(content_pb2.ChatMessage, within=f"{path}.", **message)


def settings(options: Settings, kind: type[Settings]) -> dict[str, Any]:
    """Fields of the settings that every context has, and its id. TypeError for an option that `kind` does not have."""
    known(options, kind)
    given: Mapping[str, Any] = options
    return {
        "context_id": given.get("context_id"),
        "priority": options.get("priority"),
        "pinned": options.get("pinned"),
        "pin_for": duration("pin_for", options.get("pin_s")),
        "ttl": ttl(options.get("ttl_s"), options.get("sliding", False)),
    }


def known(options: Mapping[str, object], kind: type) -> None:
    """Raise TypeError for an option that `kind` does not have."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(map(str, unknown)))}")


def ttl(ttl_s: float | None, sliding: bool) -> lifetime_pb2.Ttl | None:
    """The field `ttl`; None where none is given, and a Ttl without duration where it is infinite."""
    if ttl_s is None:
        if sliding:
            raise InvalidArgument.field("ttl.sliding", "needs ttl_s")
        return None
    return make(
        lifetime_pb2.Ttl,
        within="ttl.",
        duration=None if ttl_s == math.inf else duration("ttl.duration", ttl_s),
        sliding=sliding,
    )


def duration(path: str, seconds: float | None) -> Duration | None:
    """Raises InvalidArgument for what is no number of seconds."""
    if seconds is None:
        return None
    message = Duration()
    try:
        message.FromNanoseconds(round(seconds * 1e9))
    except REFUSALS as error:
        raise InvalidArgument.field(path, "must be a number of seconds") from error
    return message


def create(context_id: str, options: CreateOptions) -> context_service_pb2.CreateContextRequest:
    """Of ContextService.CreateContext."""
    fields = settings(options, CreateOptions)
    return make(
        context_service_pb2.CreateContextRequest,
        model_id=options.get("model_id", ""),
        salt=options.get("salt", ""),
        manual_commit=options.get("manual_commit", False),
        labels=options.get("labels") or {},
        **{**fields, "context_id": context_id},
    )


def fill(context_id: str, content: Content, defer: bool) -> context_service_pb2.FillRequest:
    """Of ContextService.Fill."""
    return make(
        context_service_pb2.FillRequest,
        context_id=context_id,
        text=content.text,
        tokens=content.token_ids,
        messages=content.chat,
        add_special_tokens=content.add_special_tokens,
        defer=defer,
    )


def plan(
    content: Content, *, context_id: str | None = None, model_id: str = "", salt: str = ""
) -> context_service_pb2.PlanRequest:
    """Of ContextService.Plan."""
    return make(
        context_service_pb2.PlanRequest,
        context_id=context_id,
        model_id=model_id,
        salt=salt,
        text=content.text,
        tokens=content.token_ids,
        messages=content.chat,
        add_special_tokens=content.add_special_tokens,
    )


def generate(context_id: str, n: int, options: GenerateOptions) -> context_service_pb2.GenerateRequest:
    """Of ContextService.Generate. A single stop string may stand for itself."""
    known(options, GenerateOptions)
    stop = options.get("stop", ())
    return make(
        context_service_pb2.GenerateRequest,
        context_id=context_id,
        n=n,
        max_tokens=options.get("max_tokens"),
        min_tokens=options.get("min_tokens", 0),
        sampling=sampling({k: v for k, v in options.items() if k in SamplingOptions.__annotations__}, "sampling."),
        logprobs=options.get("logprobs", False),
        top_logprobs=options.get("top_logprobs", 0),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        include_stop=options.get("include_stop", False),
    )


def sampling(options: Mapping[str, Any], within: str) -> generation_pb2.Sampling:
    """Of GenerateRequest and PassOutput."""
    known(options, SamplingOptions)
    return make(generation_pb2.Sampling, within=within, **options)


def fork(context_id: str, n: int | None, ids: Sequence[str] | None) -> context_service_pb2.ForkRequest:
    """Of ContextService.Fork. Children get ids here, so that a retry cannot fork twice; n is checked by the server."""
    if ids is None:
        ids = [new_id() for _ in range(min(n, 4096) if isinstance(n, int) else 1)]
    return make(context_service_pb2.ForkRequest, context_id=context_id, n=n, child_ids=ids)


def update(context_id: str, options: UpdateOptions) -> context_service_pb2.UpdateContextRequest:
    """Of ContextService.UpdateContext; None leaves a setting as it is."""
    request, labels = context_service_pb2.UpdateContextRequest, options.get("labels")
    fields = settings(options, UpdateOptions)
    new = None if labels is None else make(request.Labels, labels=labels)
    return make(request, labels=new, **{**fields, "context_id": context_id})


def apply_chat_template(
    messages: Sequence[Message], add_generation_prompt: bool | None, model_id: str
) -> model_service_pb2.ApplyChatTemplateRequest:
    """Of ModelService.ApplyChatTemplate."""
    return make(
        model_service_pb2.ApplyChatTemplateRequest,
        model_id=model_id,
        messages=chat_messages(messages, add_generation_prompt),
    )
