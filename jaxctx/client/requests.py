"""Arguments of the clients' methods as fields of requests. Ranges are checked by the server, and only there.

What no message can hold (another type, a number of too many bits, a lone surrogate) is an InvalidArgument here.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from jaxctx.answers import named
from jaxctx.client.options import Content, GenerateOptions, Message, Output, Ranges, SamplingOptions
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import content_pb2, context_service_pb2, forward_pb2, generation_pb2, lifetime_pb2

M = TypeVar("M", bound=ProtobufMessage)
REFUSALS = (TypeError, ValueError, OverflowError, AttributeError)  # of protobuf's constructors


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


def known(options: Mapping[str, object], kind: type) -> None:
    """Raise TypeError for an option that `kind` does not have."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(map(str, unknown)))}")


def settings(options: Mapping[str, Any], kind: type, *, update: bool = False) -> dict[str, Any]:
    """Options as the fields of these names, times as theirs. TypeError for an option that `kind` does not have.

    In an update labels go into a message of their own, which tells none at all from no change.
    """
    known(options, kind)
    fields = {name: value for name, value in options.items() if name not in ("pin_s", "ttl_s", "sliding")}
    if options.get("pin_s") is not None:
        fields["pin_for"] = duration("pin_for", options["pin_s"])
    if update and options.get("labels") is not None:
        fields["labels"] = {"labels": options["labels"]}
    return {**fields, "ttl": ttl(options.get("ttl_s"), options.get("sliding", False))}


def ttl(ttl_s: float | None, sliding: bool) -> lifetime_pb2.Ttl | None:
    """The field `ttl`; None where none is given, and a Ttl without duration where it is infinite."""
    if ttl_s is None:
        if sliding:
            raise InvalidArgument.field("ttl.sliding", "needs ttl_s")
        return None
    limit = None if ttl_s == math.inf else duration("ttl.duration", ttl_s)
    return make(lifetime_pb2.Ttl, within="ttl.", duration=limit, sliding=sliding)


def duration(path: str, seconds: float) -> timedelta:
    """Raises InvalidArgument for what is no number of seconds."""
    try:
        return timedelta(seconds=seconds)
    except REFUSALS as error:
        raise InvalidArgument.field(path, "must be a number of seconds") from error


def content(text: str | None, options: Content) -> dict[str, Any]:
    """The fields of what to append to a context: exactly one of text, tokens and messages, and its flag."""
    known(options, Content)
    tokens, messages = options.get("tokens"), options.get("messages")
    given = [name for name, value in (("text", text), ("tokens", tokens), ("messages", messages)) if value is not None]
    if len(given) != 1:
        raise InvalidArgument.field("content", f"give one of text, tokens and messages, not {given or 'none'}")
    if isinstance(text, (bytes, list, tuple)):
        raise InvalidArgument.field("text", "a str; token ids go to tokens=, messages to messages=")
    return {
        "text": text,
        "tokens": None if tokens is None else make(content_pb2.TokenIds, within="tokens.", ids=tokens),
        "messages": None if messages is None else chat_messages(messages, options.get("add_generation_prompt")),
        "add_special_tokens": options.get("add_special_tokens"),
    }


def chat_messages(messages: Sequence[Message], add_generation_prompt: bool | None) -> content_pb2.ChatMessages:
    """Raises InvalidArgument for a message with other keys than role and content, which would be lost silently."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidArgument.field("messages", "must be a list of messages")
    made = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgument.field(f"messages[{i}]", "must be a mapping with role and content")
        if unknown := message.keys() - {"role", "content"}:
            raise InvalidArgument.field(f"messages[{i}]", f"unknown keys {sorted(map(str, unknown))}")
        made.append(make(content_pb2.ChatMessage, within=f"messages[{i}].", **message))
    return make(content_pb2.ChatMessages, messages=made, add_generation_prompt=add_generation_prompt)


def generate(context_id: str, n: int, options: GenerateOptions) -> context_service_pb2.GenerateRequest:
    """Of ContextService.Generate. A single stop string may stand for itself."""
    known(options, GenerateOptions)
    drawn = {name: value for name, value in options.items() if name in SamplingOptions.__annotations__}
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in drawn}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    kind = context_service_pb2.GenerateRequest
    return make(kind, context_id=context_id, n=n, sampling=sampling(drawn, "sampling."), **fields)


def sampling(options: Mapping[str, Any], within: str) -> generation_pb2.Sampling:
    """Of GenerateRequest and PassOutput."""
    known(options, SamplingOptions)
    return make(generation_pb2.Sampling, within=within, **options)


def mask(path: str, ranges: Ranges) -> forward_pb2.AttentionMask:
    """Of ForwardRequest."""
    try:
        return forward_pb2.AttentionMask(bounds=[bound for start, stop in ranges for bound in (start, stop)])
    except REFUSALS as error:
        raise InvalidArgument.field(path, "must be pairs of start and stop") from error


def output(path: str, asked: Output) -> forward_pb2.PassOutput:
    """Of ForwardRequest."""
    sample = None if asked.sample is None else sampling(asked.sample, f"{path}.sample.")
    return make(forward_pb2.PassOutput, within=f"{path}.", **named(Output, asked) | {"sample": sample})
