"""Messages of a chat request as those of the contract."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.openai.chat_messages import parse_message, parse_messages

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
PARSED_CALL = {"id": "1", "name": "f", "arguments": '{"a":1}'}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "x", "name": "me"}, {"role": "user", "content": "x", "name": "me"}),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "function", "name": "f", "content": "x"}, {"role": "tool", "content": "x", "name": "f"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        (
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]},
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "assistant", "content": "x", "tool_calls": [{**PARSED_CALL, "id": ""}]},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}},
            {"role": "assistant", "content": "", "tool_calls": [{**PARSED_CALL, "id": "call_0"}]},
        ),
        ({"role": "assistant", "content": "x", "function_call": {}}, {"role": "assistant", "content": "x"}),
        (
            {"role": "tool", "content": "x", "tool_call_id": "1"},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
            {"role": "assistant", "content": "x", "reasoning": "y"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": None, "reasoning": "y"},
            {"role": "assistant", "content": "x", "reasoning": "y"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "z", "reasoning": "y"},
            {"role": "assistant", "content": "x", "reasoning": "z"},
        ),
    ],
)
def test_a_message(message: Any, expected: dict[str, Any]) -> None:
    assert parse_message(0, message) == expected


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": 5, "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, None),
        ({"role": "assistant", "content": "x", "tool_calls": {"a": 1}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [CALL] * 129}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [5]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "reasoning": 5}, "reasoning"),
        ({"role": "user", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [CALL]}, "function_call"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call.name"),
        ({"role": "assistant", "function_call": "f"}, "function_call"),
        ({"role": "user", "content": [{"type": "text"}]}, "content"),
        ({"role": "user", "content": ["x"]}, "content"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, "content"),
    ],
)
def test_a_message_that_is_refused(message: Any, field: str | None) -> None:
    if field is None:
        assert "tool_calls" not in parse_message(3, message)
        return
    with pytest.raises(InvalidArgument) as refused:
        parse_message(3, message)
    assert refused.value.violations[0].field == f"messages[3].{field}"


def test_results_of_functions_belong_to_the_calls_before_them() -> None:
    call: Any = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result: Any = {"role": "function", "name": "f", "content": "x"}
    parsed = parse_messages([result, call, result, call, result, {"role": "tool", "content": "x"}])
    ids = [message.get("tool_call_id") for message in parsed]
    assert ids == [None, None, "call_1", None, "call_3", None]
    assert [message["tool_calls"][0]["id"] for message in parsed if "tool_calls" in message] == ["call_1", "call_3"]
