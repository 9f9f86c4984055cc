"""Arguments of the clients' methods as fields of requests. Ranges are checked by the server, and only there.

What no message can hold (another type, a number of too many bits, a lone surrogate) is an InvalidArgument here, which
names the field as the server would.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.client.options import SamplingOptions
from jaxctx.errors import InvalidArgument

M = TypeVar("M", bound=Message)
REFUSALS = (TypeError, ValueError, OverflowError, AttributeError)  # of protobuf's constructors


def make(kind: type[M], /, **fields: Any) -> M:
    """A message of these fields; messages in it are dicts of theirs. Raises InvalidArgument for what it cannot hold."""
    try:
        return kind(**fields)
    except REFUSALS as error:
        raise InvalidArgument.field(_refused(kind, fields), "is not of its type, or out of its range") from error


def _refused(kind: type[Message], fields: Mapping[str, Any]) -> str:
    """The path of the first of these fields that a message of this class cannot hold; empty if it can hold each."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except REFUSALS:
            inner = getattr(kind.DESCRIPTOR.fields_by_name.get(str(name)), "message_type", None)
            entries = {f"{name}[{place}]": each for place, each in enumerate(value)} if isinstance(value, list) else {}
            for path, each in (entries or {str(name): value}).items():
                if inner is not None and not inner.GetOptions().map_entry:
                    if not isinstance(each, dict):
                        return path
                    if below := _refused(GetMessageClass(inner), each):
                        return f"{path}.{below}"
            return str(name)
    return ""


def ttl(ttl_s: float | None, sliding: bool | None) -> dict[str, Any] | None:
    """The field of this name. One that is infinite has no duration."""
    if ttl_s is not None:
        return {"duration": None if ttl_s == math.inf else duration("ttl.duration", ttl_s), "sliding": sliding}
    if sliding:
        raise InvalidArgument.field("ttl.sliding", "needs ttl_s")
    return None


def duration(path: str, seconds: float | None) -> timedelta | None:
    """Seconds as the field at this path; None is unset. Raises InvalidArgument for what is no number of seconds."""
    try:
        return None if seconds is None else timedelta(seconds=seconds)
    except REFUSALS as error:
        raise InvalidArgument.field(path, "must be a number of seconds") from error


def content(
    text: str | None,
    tokens: Sequence[int] | None = None,
    messages: Sequence[dict[str, str]] | None = None,
    add_generation_prompt: bool | None = None,
    add_special_tokens: bool | None = None,
) -> dict[str, Any]:
    """The fields of what to append to a context: exactly one of text, tokens and messages, and its flag."""
    given = [name for name, value in (("text", text), ("tokens", tokens), ("messages", messages)) if value is not None]
    if len(given) != 1:
        raise InvalidArgument.field("content", f"give one of text, tokens and messages, not {given or 'none'}")
    if isinstance(text, (bytes, list, tuple)):
        raise InvalidArgument.field("text", "a str; token ids go to tokens=, messages to messages=")
    chat = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    return {
        "text": text,
        "tokens": None if tokens is None else {"ids": tokens},
        "messages": None if messages is None else chat,
        "add_special_tokens": add_special_tokens,
    }


def said(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Options of an output as fields, `sampling` of how tokens are drawn. A single stop string may stand for itself.

    Raises TypeError for an option that `kind` does not have.
    """
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(map(str, unknown)))}")
    drawn = {name: value for name, value in options.items() if name in SamplingOptions.__annotations__}
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in drawn}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return {"sampling": drawn, **fields}


def masks(of_tokens: Sequence[Sequence[tuple[int, int]]]) -> list[dict[str, Any]]:
    """The field of this name of ForwardRequest."""
    made = []
    for place, ranges in enumerate(of_tokens):
        try:
            made.append({"bounds": [bound for start, stop in ranges for bound in (start, stop)]})
        except REFUSALS as error:
            raise InvalidArgument.field(f"masks[{place}]", "must be pairs of start and stop") from error
    return made
