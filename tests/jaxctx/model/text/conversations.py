"""Conversations by which templates are compared with `transformers`: what users send, in the forms that servers get."""

from __future__ import annotations

from typing import Any

Conversation = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Hello, Wörld! "}
ANSWER = {"role": "assistant", "content": 'Hi <there> & "you".\n'}
NEXT = {"role": "user", "content": "And now?"}
THOUGHT = {"role": "assistant", "content": "42", "reasoning_content": "so\nit is"}
INLINE_THOUGHT = {"role": "assistant", "content": "<think>\nso it is\n</think>\n\n42"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather — now",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "array", "items": {"type": "integer"}, "description": "Days"},
                    "unit": {"type": "string", "enum": ["C", "F"], "description": "Unit"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]
ARGUMENTS = {"city": "Köln", "days": [1, 2], "deep": {"a": None, "b": True}}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
SECOND_CALL = {"id": "bcdefghij", "type": "function", "function": {"name": "now", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLING_TWICE = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, SECOND_CALL]}
RESULT = {"role": "tool", "content": "7 °C", "tool_call_id": "abcdefghi", "name": "get_weather"}
SECOND_RESULT = {"role": "tool", "content": '{"time": 3}', "tool_call_id": "bcdefghij", "name": "now"}
DOCUMENTS = [{"doc_id": "1", "title": "T", "text": "A text."}, {"doc_id": "2", "title": "U", "text": "More."}]

# name: messages, tools, variables of the template, whether an answer is asked for
CASES: dict[str, tuple[Conversation, list[dict[str, Any]] | None, dict[str, Any], bool]] = {
    "a question": ([USER], None, {}, True),
    "no answer asked for": ([USER], None, {}, False),
    "system": ([SYSTEM, USER], None, {}, True),
    "system alone": ([SYSTEM], None, {}, True),
    "several turns": ([SYSTEM, USER, ANSWER, NEXT], None, {}, True),
    "an answer at the end": ([USER, ANSWER], None, {}, False),
    "an answer first": ([ANSWER, USER], None, {}, True),
    "two questions": ([USER, NEXT], None, {}, True),
    "a late system message": ([USER, ANSWER, SYSTEM, NEXT], None, {}, True),
    "an unknown role": ([{"role": "critic", "content": "No."}], None, {}, True),
    "empty content": ([{"role": "user", "content": ""}], None, {}, True),
    "tools": ([USER], TOOLS, {}, True),
    "tools and a system message": ([SYSTEM, USER, ANSWER, NEXT], TOOLS, {}, True),
    "a call": ([USER, CALLING], TOOLS, {}, False),
    "a result": ([SYSTEM, USER, CALLING, RESULT], TOOLS, {}, True),
    "two calls": ([USER, CALLING_TWICE, RESULT, SECOND_RESULT], TOOLS, {}, True),
    "a call and its answer": ([USER, CALLING, RESULT, ANSWER, NEXT], TOOLS, {}, True),
    "a call without tools": ([USER, CALLING, RESULT], None, {}, True),
    "thoughts": ([USER, THOUGHT, NEXT], None, {}, True),
    "thoughts at the end": ([USER, THOUGHT], None, {}, False),
    "thoughts in the text": ([USER, INLINE_THOUGHT, NEXT], None, {}, True),
    "thoughts in the last text": ([USER, INLINE_THOUGHT], None, {}, False),
    "thoughts before a call": ([USER, {**CALLING, "reasoning_content": "hm"}, RESULT], TOOLS, {}, True),
    "thinking": ([USER], None, {"enable_thinking": True, "thinking": True}, True),
    "no thinking": ([SYSTEM, USER], None, {"enable_thinking": False, "thinking": False}, True),
    "no thinking, with tools": ([SYSTEM, USER], TOOLS, {"enable_thinking": False}, True),
    "switched in the system message": ([{"role": "system", "content": "/no_think Be brief."}, USER], None, {}, True),
    "documents": ([USER], None, {"documents": DOCUMENTS}, True),
    "documents and tools": ([SYSTEM, USER], TOOLS, {"documents": DOCUMENTS, "controls": {"length": "short"}}, True),
    "variables of Llama 3.1": ([USER], TOOLS, {"tools_in_user_message": False, "date_string": "1 Jan 2025"}, True),
    "variables of SmolLM 3": ([USER], None, {"xml_tools": TOOLS, "python_tools": TOOLS}, True),
    "content in parts": ([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], None, {}, True),
}
CONTINUED: dict[str, Conversation] = {
    "an answer": [USER, {"role": "assistant", "content": "So it"}],
    "a space at the end": [USER, {"role": "assistant", "content": "So it "}],
    "an empty answer": [USER, {"role": "assistant", "content": ""}],
    "open thoughts": [USER, {"role": "assistant", "content": "<think>\nso"}],
    "closed thoughts": [USER, INLINE_THOUGHT],
    "thoughts that become others": [USER, {"role": "assistant", "content": "<think>so</think>  42"}],
    "a question": [SYSTEM, USER],
    "a later answer": [SYSTEM, USER, ANSWER, NEXT, {"role": "assistant", "content": "\nWell"}],
}
