"""Items of responses as messages of the chat template."""

from __future__ import annotations

import time

from jaxctx_server.http.openai.responses.items import chat_messages, parse_items


def test_items_of_the_assistant_that_follow_each_other_are_one_message() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "content": "a"}
    question = {"role": "user", "content": "q"}
    items = parse_items([question, thoughts, thoughts, answer, call, answer, question], "input")
    told = [(each.role, each.content, each.reasoning, len(each.tool_calls)) for each in chat_messages(items)]
    assert told == [
        ("user", "q", "", 0),
        ("assistant", "a", "hmhm", 1),
        ("assistant", "a", "", 0),
        ("user", "q", "", 0),
    ]


def test_time_grows_with_the_text_and_not_with_its_square() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 8000}]}
    items = parse_items([thoughts] * 1024, "input")
    began = time.process_time()
    (message,) = chat_messages(items)
    assert time.process_time() - began < 0.5
    assert len(message.reasoning) == 8000 * 1024
