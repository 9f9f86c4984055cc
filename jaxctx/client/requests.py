"""Arguments of the client's methods as request messages. The server alone checks ranges.

Each method of the client names the fields of its request as keywords of `build_request`, which calls the message's own
constructor with them. The constructor refuses what no message can hold: a value of another type, a number of too many
bits, a lone surrogate. Such a value raises InvalidArgument with the path of its field, as the server would write it.
Protobuf's errors do not name the field, so its path is searched afterwards, in the message's descriptor.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.client.options import ChatOptions, ForwardOutputOptions, SamplingOptions
from jaxctx.convert import output_format_to_proto
from jaxctx.errors import InvalidArgument

MessageT = TypeVar("MessageT", bound=Message)
REFUSALS = (TypeError, ValueError, OverflowError, AttributeError)  # raised by protobuf's constructors


def build_request(message_class: type[MessageT], /, **fields: Any) -> MessageT:
    """A message with these fields; None leaves a field unset, and messages inside it are given as dicts.

    Raises InvalidArgument, with the path of the field, for a value that the message cannot hold.
    """
    try:
        return message_class(**fields)
    except REFUSALS as error:
        path = _path_of_refused_field(message_class, fields)
        raise InvalidArgument.field(path, "is not of its type, or out of its range") from error


def _path_of_refused_field(message_class: type[Message], fields: Mapping[str, Any]) -> str:
    """The path of the first field that the message class refuses; empty if it takes each of them."""
    for name, value in fields.items():
        try:
            message_class(**{name: value})
        except REFUSALS:
            return _path_below(message_class, str(name), value)
    return ""


def _path_below(message_class: type[Message], name: str, value: object) -> str:
    """The path of what is refused in the value of this field: the field itself, or a field of a message in it."""
    field = message_class.DESCRIPTOR.fields_by_name.get(name)
    if field is None or field.message_type is None or field.message_type.GetOptions().map_entry:
        return name
    inner_class = GetMessageClass(cast(Descriptor, field.message_type))
    if isinstance(value, list) and value:
        values_by_path = {f"{name}[{position}]": entry for position, entry in enumerate(value)}
    else:
        values_by_path = {name: value}
    for path, inner_fields in values_by_path.items():
        if not isinstance(inner_fields, dict):
            return path
        inner_path = _path_of_refused_field(inner_class, inner_fields)
        if inner_path:
            return f"{path}.{inner_path}"
    return name


def ttl_fields(ttl_s: float | None, sliding: bool | None) -> dict[str, Any] | None:
    """The fields of a Ttl message; None if no time to live is given. `math.inf` seconds are no duration: for ever.

    Raises InvalidArgument for `sliding` without `ttl_s`.
    """
    if ttl_s is None:
        if sliding:
            raise InvalidArgument.field("ttl.sliding", "needs ttl_s")
        return None
    if ttl_s == math.inf:
        return {"duration": None, "sliding": sliding}
    return {"duration": duration_field("ttl.duration", ttl_s), "sliding": sliding}


def duration_field(path: str, seconds: float | None) -> timedelta | None:
    """Seconds as the value of the Duration field at this path; None leaves it unset.

    Raises InvalidArgument for what is no number of seconds.
    """
    if seconds is None:
        return None
    try:
        return timedelta(seconds=seconds)
    except REFUSALS as error:
        raise InvalidArgument.field(path, "must be a number of seconds") from error


def labels_fields(labels: Mapping[str, str] | None) -> dict[str, Any] | None:
    """The fields of a Labels message, which replaces all labels; None leaves them as they are."""
    return None if labels is None else {"labels": labels}


def content_fields(
    text: str | None,
    tokens: Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool | None,
    add_special_tokens: bool | None,
    chat_options: ChatOptions | None = None,
) -> dict[str, Any]:
    """The fields of what a Fill appends or a Plan plans to: exactly one of text, tokens and messages, and its flag.

    Raises InvalidArgument if none or several are given.
    """
    contents = {"text": text, "tokens": tokens, "messages": messages}
    given = [name for name, content in contents.items() if content is not None]
    if len(given) != 1:
        raise InvalidArgument.field("content", f"give one of text, tokens and messages, not {given or 'none'}")
    if isinstance(text, (bytes, list, tuple)):
        raise InvalidArgument.field("text", "a str; token ids go to tokens=, messages to messages=")
    return {
        "text": text,
        "tokens": None if tokens is None else {"ids": tokens},
        "messages": None if messages is None else chat_fields(messages, add_generation_prompt, chat_options),
        "add_special_tokens": add_special_tokens,
    }


def chat_fields(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None, chat_options: ChatOptions | None
) -> dict[str, Any]:
    """The fields of a ChatMessages message. What is JSON there may be given as Python's objects too.

    Raises InvalidArgument for an object that JSON cannot hold.
    """
    options = chat_options or {}
    unknown = options.keys() - ChatOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown chat options: {', '.join(sorted(map(str, unknown)))}")
    fields: dict[str, Any] = {
        "messages": _chat_messages(messages),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": options.get("continue_final_message"),
    }
    tools, arguments = options.get("tools"), options.get("template_arguments")
    if tools is not None:
        if not isinstance(tools, (list, tuple)):
            raise InvalidArgument.field("tools", "must be a list")
        fields["tools"] = [json_text(f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    if arguments is not None:
        fields["template_arguments"] = json_text("template_arguments", arguments)
    return fields


def _chat_messages(messages: Sequence[Mapping[str, Any]]) -> Any:
    """The fields of ChatMessage messages."""
    if not isinstance(messages, (list, tuple)):
        return messages  # the constructor says what is wrong with it
    return [_message_fields(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _message_fields(path: str, message: Mapping[str, Any]) -> Any:
    """The fields of a ChatMessage message."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, (list, tuple)):
        return message  # as it is; if it is no message, the constructor says so
    return {
        **message,
        "tool_calls": [_tool_call_fields(f"{path}.tool_calls[{place}]", call) for place, call in enumerate(calls)],
    }


def _tool_call_fields(path: str, call: Any) -> Any:
    """The fields of a ToolCall message."""
    if not isinstance(call, dict) or call.get("arguments") is None:
        return call
    return {**call, "arguments": json_text(f"{path}.arguments", call["arguments"])}


def json_text(path: str, value: object) -> str:
    """A value as JSON; a text is JSON already. Raises InvalidArgument, with this path, for what JSON cannot hold."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument.field(path, "must be JSON") from error


def output_fields(options: Mapping[str, Any], options_class: type) -> dict[str, Any]:
    """Options of an output as fields of a GenerateRequest or CallOutput: those of sampling go into `sampling`.

    A single stop string may be given without a list. Raises TypeError for an option that `options_class` (a TypedDict)
    does not have.
    """
    unknown = options.keys() - options_class.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(map(str, unknown)))}")
    sampling: dict[str, Any] = {}
    fields: dict[str, Any] = {"sampling": sampling}
    for name, value in options.items():
        if name in SamplingOptions.__annotations__:
            sampling[name] = value
        else:
            fields[name] = value
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if fields.get("output_format") is not None:
        fields["output_format"] = output_format_to_proto(fields["output_format"])
    return fields


def forward_output_fields(output: ForwardOutputOptions) -> dict[str, Any]:
    """The fields of a ForwardOutputParams message."""
    return {
        "index": output.index,
        "sample": output.sample,
        "logprob_ids": output.logprob_ids,
        "top": output.top,
        "logits": output.logits,
        "entropy": output.entropy,
    }


def mask_fields(masks: Sequence[Sequence[tuple[int, int]]]) -> list[dict[str, Any]]:
    """The fields of the AttentionMask messages of a ForwardRequest, one for each token.

    Raises InvalidArgument for a mask that is not of pairs.
    """
    fields = []
    for position, ranges in enumerate(masks):
        try:
            bounds = [bound for start, stop in ranges for bound in (start, stop)]
        except REFUSALS as error:
            raise InvalidArgument.field(f"masks[{position}]", "must be pairs of start and stop") from error
        fields.append({"bounds": bounds})
    return fields
