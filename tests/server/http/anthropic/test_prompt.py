"""Messages of the Anthropic API as the chat template reads them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.chat_input import MAX_MESSAGES
from jaxctx_server.http.anthropic.prompt import parse_prompt


def text_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_text_around_results_of_tools_keeps_its_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
    content = [text_block("a"), text_block("b"), result, text_block("c"), text_block("d")]
    messages = parse_prompt(None, [{"role": "user", "content": content}]).messages
    assert [(each.role, each.content) for each in messages] == [("user", "ab"), ("tool", "4"), ("user", "cd")]


def test_blocks_of_an_answer_are_joined_by_their_kinds() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    content = [thought, text_block("a"), thought, text_block("b")]
    question = {"role": "user", "content": "?"}
    (_, answer) = parse_prompt(None, [question, {"role": "assistant", "content": content}]).messages
    assert (answer.reasoning, answer.content) == ("hmhm", "ab")


def test_how_many_messages_there_may_be() -> None:
    """Results of tools are messages, too."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
    turn: list[Any] = [{"role": "user", "content": [result, text_block("?")]}, {"role": "assistant", "content": "!"}]
    fitting = turn * (MAX_MESSAGES // 3)
    assert len(parse_prompt(None, fitting).messages) == MAX_MESSAGES // 3 * 3
    for messages in (turn * (MAX_MESSAGES // 3 + 1), [turn[1]] * (MAX_MESSAGES + 1)):
        with pytest.raises(InvalidArgument) as raised:
            parse_prompt(None, messages)
        assert [each.field for each in raised.value.violations] == ["messages"]


def test_very_many_blocks_are_joined() -> None:
    """In no more time than their text takes; block by block it was the square of that, and minutes."""
    blocks: list[Any] = [text_block("x" * 600) for _ in range(12_000)]
    for role in ("user", "assistant"):
        (message,) = parse_prompt(None, [{"role": role, "content": blocks}]).messages
        assert len(message.content) == 600 * 12_000
