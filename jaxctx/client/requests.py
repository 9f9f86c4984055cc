"""Arguments of the client's methods as request messages. The server alone checks ranges.

Each method of the client names the fields of its request as keywords of `build_request`, which calls the message's own
constructor with them. The constructor refuses what no message can hold: a value of another type, a number of too many
bits, a lone surrogate. Such a value raises InvalidArgument with the path of its field, as the server would write it.

Protobuf's errors do not name the field. So every message inside a request is built here by itself, by code that knows
its path, and of the few fields of one message each is tried alone once they were refused together.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from google.protobuf.message import Message

from jaxctx.client.options import ChatOptions, ForwardOutputOptions, SamplingOptions
from jaxctx.convert import output_format_to_proto
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import content_pb2, forward_pb2, generation_pb2, lifetime_pb2

MessageT = TypeVar("MessageT", bound=Message)
REFUSALS = (TypeError, ValueError, OverflowError, AttributeError)  # raised by protobuf's constructors
NOT_ITS_TYPE = "is not of its type, or out of its range"


def build_request(message_class: type[MessageT], /, **fields: Any) -> MessageT:
    """A request with these fields; None leaves a field unset.

    Raises InvalidArgument, with the name of the field, for a value that the request cannot hold.
    """
    return build_message(message_class, "", fields)


def build_message(message_class: type[MessageT], path: str, fields: Mapping[str, Any]) -> MessageT:
    """A message with these fields, to stand at this path of a request; None leaves a field unset.

    Raises InvalidArgument, with the path of the field, for a value that the message cannot hold.
    """
    try:
        return message_class(**fields)
    except REFUSALS as error:
        name = _refused_field(message_class, fields)
        raise InvalidArgument.field(f"{path}.{name}" if path else name, NOT_ITS_TYPE) from error


def _refused_field(message_class: type[Message], fields: Mapping[str, Any]) -> str:
    """The first of these fields that the message class refuses; empty if it takes each of them."""
    for name, value in fields.items():
        try:
            message_class(**{name: value})
        except REFUSALS:
            return str(name)
    return ""


def _message_from(message_class: type[MessageT], path: str, value: object) -> MessageT:
    """A message that a caller gave as a dict of its fields, or as it is. Raises InvalidArgument for anything else."""
    if isinstance(value, message_class):
        return value
    if isinstance(value, dict):
        return build_message(message_class, path, value)
    raise InvalidArgument.field(path, NOT_ITS_TYPE)


def time_to_live(ttl_s: float | None, sliding: bool | None) -> lifetime_pb2.Ttl | None:
    """The field `ttl`; None if no time to live is given. `math.inf` seconds are no duration: for ever.

    Raises InvalidArgument for `sliding` without `ttl_s`.
    """
    if ttl_s is None:
        if sliding:
            raise InvalidArgument.field("ttl.sliding", "needs ttl_s")
        return None
    duration = None if ttl_s == math.inf else duration_field("ttl.duration", ttl_s)
    return build_message(lifetime_pb2.Ttl, "ttl", {"duration": duration, "sliding": sliding})


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


def all_labels(labels_class: type[MessageT], labels: Mapping[str, str] | None) -> MessageT | None:
    """The field `labels` of a request that replaces all labels; None leaves them as they are."""
    return None if labels is None else build_message(labels_class, "labels", {"labels": labels})


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
        "tokens": None if tokens is None else build_message(content_pb2.TokenIds, "tokens", {"ids": tokens}),
        "messages": None if messages is None else chat_messages(messages, add_generation_prompt, chat_options),
        "add_special_tokens": add_special_tokens,
    }


def chat_messages(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None, chat_options: ChatOptions | None
) -> content_pb2.ChatMessages:
    """The field `messages`. What is JSON there may be given as Python's objects too.

    Raises InvalidArgument for an object that JSON cannot hold.
    """
    options = chat_options or {}
    unknown = options.keys() - ChatOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown chat options: {', '.join(sorted(map(str, unknown)))}")
    fields: dict[str, Any] = {
        "messages": [_chat_message(place, message) for place, message in enumerate(_listed(messages))],
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": options.get("continue_final_message"),
    }
    tools, arguments = options.get("tools"), options.get("template_arguments")
    if tools is not None:
        if not isinstance(tools, (list, tuple)):
            raise InvalidArgument.field("messages.tools", "must be a list")
        fields["tools"] = [json_text(f"messages.tools[{place}]", tool) for place, tool in enumerate(tools)]
    if arguments is not None:
        fields["template_arguments"] = json_text("messages.template_arguments", arguments)
    return build_message(content_pb2.ChatMessages, "messages", fields)


def _listed(messages: object) -> list[Any]:
    """Any iterable of messages as a list."""
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise InvalidArgument.field("messages.messages", NOT_ITS_TYPE)
    return list(messages)


def _chat_message(place: int, message: object) -> content_pb2.ChatMessage:
    """The message at this place of the conversation."""
    path = f"messages.messages[{place}]"
    if isinstance(message, dict) and isinstance(message.get("tool_calls"), (list, tuple)):
        calls = [_tool_call(place, number, call) for number, call in enumerate(message["tool_calls"])]
        message = {**message, "tool_calls": calls}
    return _message_from(content_pb2.ChatMessage, path, message)


def _tool_call(place: int, number: int, call: object) -> content_pb2.ToolCall:
    """The call of this number in the message at this place."""
    path = f"messages.messages[{place}].tool_calls[{number}]"
    if isinstance(call, dict) and call.get("arguments") is not None:
        call = {**call, "arguments": json_text(f"{path}.arguments", call["arguments"])}
    return _message_from(content_pb2.ToolCall, path, call)


def json_text(path: str, value: object) -> str:
    """A value as JSON; a text is JSON already. Raises InvalidArgument, with this path, for what JSON cannot hold."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument.field(path, "must be JSON") from error


def checked_options(options: Mapping[str, Any], options_class: type) -> Mapping[str, Any]:
    """These options. Raises TypeError for one that `options_class` (a TypedDict) does not have."""
    unknown = options.keys() - options_class.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(map(str, unknown)))}")
    return options


def output_fields(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an output as fields of a GenerateRequest or CallOutput at this path: those of sampling in `sampling`.

    A single stop string may be given without a list.
    """
    sampling: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name in SamplingOptions.__annotations__:
            sampling[name] = value
        else:
            fields[name] = value
    sampling_path = f"{path}.sampling" if path else "sampling"
    fields["sampling"] = build_message(generation_pb2.SamplingParams, sampling_path, sampling)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    if fields.get("output_format") is not None:
        fields["output_format"] = output_format_to_proto(fields["output_format"])
    return fields


def forward_outputs(outputs: Sequence[ForwardOutputOptions]) -> list[forward_pb2.ForwardOutputParams]:
    """The field `outputs` of a ForwardRequest."""
    messages = []
    for number, output in enumerate(outputs):
        path = f"outputs[{number}]"
        sample = None
        if output.sample is not None:
            sample = _message_from(generation_pb2.SamplingParams, f"{path}.sample", output.sample)
        fields = {
            "index": output.index,
            "sample": sample,
            "logprob_ids": output.logprob_ids,
            "top": output.top,
            "logits": output.logits,
            "entropy": output.entropy,
        }
        messages.append(build_message(forward_pb2.ForwardOutputParams, path, fields))
    return messages


def attention_masks(masks: Sequence[Sequence[tuple[int, int]]]) -> list[forward_pb2.AttentionMask]:
    """The masks of a ForwardRequest, one for each token. Raises InvalidArgument for a mask that is not of pairs."""
    messages = []
    for position, ranges in enumerate(masks):
        path = f"masks[{position}]"
        try:
            bounds = [bound for start, stop in ranges for bound in (start, stop)]
        except REFUSALS as error:
            raise InvalidArgument.field(path, "must be pairs of start and stop") from error
        messages.append(build_message(forward_pb2.AttentionMask, path, {"bounds": bounds}))
    return messages
