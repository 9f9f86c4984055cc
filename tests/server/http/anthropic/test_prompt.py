"""Messages of the Anthropic API as the chat template reads them."""

from __future__ import annotations

import time
from typing import Any

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


def test_time_grows_with_the_text_and_not_with_its_square() -> None:
    blocks: list[Any] = [text_block("x" * 600) for _ in range(12_000)]
    for role in ("user", "assistant"):
        began = time.process_time()
        parse_prompt(None, [{"role": role, "content": blocks}])
        assert time.process_time() - began < 1.0
