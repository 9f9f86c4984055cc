"""Arguments that no message can hold are refused by the client, by the names of their fields."""

from __future__ import annotations

import math
from typing import Any

import pytest

import jaxctx
from jaxctx import errors
from jaxctx.v1.content_pb2 import ChatMessage, ToolCall

REFUSED_HERE: list[tuple[str, Any, str]] = [
    ("fill", lambda context, client: context.fill(tokens=[1, 2**40]), "tokens.ids"),
    ("fill", lambda context, client: context.fill(tokens=["a"]), "tokens.ids"),
    ("fill", lambda context, client: context.fill("\ud800"), "text"),
    ("fill", lambda context, client: context.fill(7), "text"),
    ("messages", lambda context, client: context.fill(messages="hello"), "messages.messages"),
    ("messages", lambda context, client: context.fill(messages=["hello"]), "messages.messages[0]"),
    ("messages", lambda context, client: context.fill(messages=[{"role": "user", 7: "x"}]), "messages.messages[0].7"),
    (
        "messages",
        lambda context, client: context.plan(messages=[{"role": "u"}, {"content": 7}]),
        "messages.messages[1].content",
    ),
    ("messages", lambda context, client: client.apply_chat_template([{"role": "\udc00"}]), "messages.messages[0].role"),
    (
        "messages",
        lambda context, client: context.fill(
            messages=[{"role": "a", "tool_calls": [{"name": "f", "arguments": {1j}}]}]
        ),
        "messages.messages[0].tool_calls[0].arguments",
    ),
    (
        "messages",
        lambda context, client: context.fill(messages=[{"role": "a", "tool_calls": [{"name": 7}]}]),
        "messages.messages[0].tool_calls[0].name",
    ),
    (
        "messages",
        lambda context, client: context.plan(messages=[], chat_options={"template_arguments": {"a": math.nan}}),
        "messages.template_arguments",
    ),
    ("messages", lambda context, client: context.fill(messages=[], chat_options={"tools": "[]"}), "messages.tools"),
    (
        "messages",
        lambda context, client: context.fill(messages=[], chat_options={"tools": [{"a": set()}]}),
        "messages.tools[0]",
    ),
    ("generate", lambda context, client: context.complete(max_tokens=2**40), "max_tokens"),
    ("generate", lambda context, client: context.complete(temperature="hot"), "sampling.temperature"),
    ("generate", lambda context, client: context.complete(seed=2**70), "sampling.seed"),
    ("generate", lambda context, client: context.complete(logit_bias=[1]), "sampling.logit_bias"),
    ("generate", lambda context, client: context.complete(stop=["a", 5]), "stop"),
    ("fork", lambda context, client: context.fork("2"), "n"),
    ("fork", lambda context, client: context.fork(ids=[1]), "child_ids"),
    ("rewind", lambda context, client: context.rewind(-(2**31) - 1), "to"),
    ("update", lambda context, client: context.update(labels={"k": 1}), "labels.labels"),
    ("create", lambda context, client: client.create(labels={1: "v"}), "labels"),
    ("create", lambda context, client: client.create(priority=0.5), "priority"),
    ("lookup", lambda context, client: client.context("\ud800"), "context_id"),
    ("models", lambda context, client: client.tokenize("\ud800"), "text"),
    ("models", lambda context, client: client.detokenize([2**31]), "tokens"),
]


@pytest.mark.parametrize(("use", "field"), [case[1:] for case in REFUSED_HERE], ids=[case[0] for case in REFUSED_HERE])
async def test_what_no_message_can_hold_is_refused_by_name(either: Any, client: Any, use: Any, field: str) -> None:
    context = await either(client.create())
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(use(context, client))
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"text": "a", "tokens": [1]},
        {"tokens": [], "messages": []},
        {"text": [1, 2]},
        {"messages": [{"role": "user", "content": "x", "weight": 1}]},
    ],
    ids=["none", "two", "two empty", "tokens as text", "unknown key"],
)
async def test_content_that_cannot_be_meant_is_refused_here(either: Any, client: Any, fake: Any, content: Any) -> None:
    context = await either(client.create())
    for use in (context.fill, context.plan, client.plan):
        with pytest.raises(errors.InvalidArgument) as raised:
            await either(use(**content))
        assert raised.value.violations
    assert not fake.requests["Fill"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ttl_s": "soon"}, "ttl.duration"),
        ({"ttl_s": math.nan}, "ttl.duration"),
        ({"ttl_s": -math.inf}, "ttl.duration"),
        ({"ttl_s": 1e300}, "ttl.duration"),
        ({"pin_s": math.inf, "pinned": True}, "pin_for"),
        ({"sliding": True}, "ttl.sliding"),
    ],
)
async def test_times_that_no_message_can_hold(either: Any, client: Any, options: Any, field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(client.create(**options))
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"tokens": [2**40]}, "tokens"),
        ({"positions": ["a"]}, "positions"),
        ({"masks": [5]}, "masks[0]"),
        ({"masks": [[], [(1, 2, 3)]]}, "masks[1]"),
        ({"outputs": [jaxctx.ForwardOutputOptions(), jaxctx.ForwardOutputOptions(index=2**40)]}, "outputs[1].index"),
        ({"outputs": [jaxctx.ForwardOutputOptions(sample={"temperature": "hot"})]}, "outputs[0].sample.temperature"),  # type: ignore[typeddict-item]
    ],
)
async def test_passes_that_no_message_can_hold(either: Any, client: Any, arguments: Any, field: str) -> None:
    context = await either(client.create())
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(context.forward(**{"tokens": [1], **arguments}))
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_objects_of_messages_are_sent_as_json(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    calls = [{"id": "1", "name": "f", "arguments": {"é": [1, None]}}, {"name": "g", "arguments": '{"as": "it is"}'}]
    messages = [
        {"role": "assistant", "reasoning": "so", "tool_calls": calls},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}, '{"type": "function"}']
    options = {"tools": tools, "template_arguments": {"enable_thinking": False}, "continue_final_message": True}
    await either(context.fill(messages=messages, chat_options=options))
    (request,) = fake.requests["Fill"]
    first, second = request.messages.messages
    assert [call.arguments for call in first.tool_calls] == ['{"é": [1, null]}', '{"as": "it is"}']
    assert (first.reasoning, second.tool_call_id, second.name) == ("so", "1", "f")
    assert list(request.messages.tools) == ['{"type": "function", "function": {"name": "f"}}', '{"type": "function"}']
    assert request.messages.template_arguments == '{"enable_thinking": false}'
    assert request.messages.continue_final_message


async def test_a_chat_option_that_does_not_exist_is_a_type_error(either: Any, client: Any) -> None:
    context = await either(client.create())
    with pytest.raises(TypeError, match="tolls"):
        await either(context.fill(messages=[{"role": "u"}], chat_options={"tolls": []}))


@pytest.mark.parametrize(
    ("places", "field"),
    [
        ({"a": "\ud800"}, "parameters[0].text"),
        ({"a": "text", "b": 7}, "parameters[1].text"),
        ({"a": "text", "b": jaxctx.Output(max_tokens=2**40)}, "parameters[1].output.max_tokens"),
        ({"a": jaxctx.Output(temperature="hot")}, "parameters[0].output.sampling.temperature"),  # type: ignore[typeddict-item]
    ],
)
async def test_places_that_no_message_can_hold(either: Any, client: Any, places: Any, field: str) -> None:
    session = await either(client.create_session())
    with pytest.raises(errors.InvalidArgument) as raised:
        await either(session.call("{{a}} {{b}}", **places))
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_messages_are_given_as_any_iterable_of_dicts_or_of_protobufs(either: Any, client: Any, fake: Any) -> None:
    context = await either(client.create())
    call = ToolCall(name="f", arguments="{}")
    messages = [ChatMessage(role="user", content="x"), {"role": "assistant", "tool_calls": [call]}]
    await either(context.fill(messages=iter(messages)))
    (request,) = fake.requests["Fill"]
    assert list(request.messages.messages) == [messages[0], ChatMessage(role="assistant", tool_calls=[call])]
