"""Which format a model has, and ids in the form that its template takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.model.registry import FAMILIES
from jaxctx.model.text.tool_calls import (
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    ToolCallStart,
    reasoning_format,
    tool_call_format,
)
from jaxctx.model.text.tool_calls.formats import FAMILY_FORMATS
from tests.tool_call_events import parse

# The lines of published templates that write a call.
QWEN25 = "{{- '\\n<tool_call>\\n{\"name\": \"' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
QWEN3_CODER = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name + '>\\n' }}"
OTHER_XML = "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
LLAMA31 = "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- '{\"name\": \"' + tool_call.name + '\", ' }}"
MISTRAL03 = '{{- "[TOOL_CALLS] [" }}{{- out[:-1] }}'
MISTRAL11 = "{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' + arguments }}"
GRANITE30 = "{{- '<|start_of_role|>assistant<|end_of_role|>' + message['content'] + '<|end_of_text|>' }}"
GRANITE33 = "respond only with <|tool_call|> followed by a JSON list of tools used" + GRANITE30
GRANITE4 = "{{- '<|start_of_role|>assistant<|end_of_role|>' }}{{- '<tool_call>\\n{\"name\": \"' }}"
PHI4_MINI = "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
PHI4_MINI_FUNCTOOLS = 'formatted as functools[{"name": [function name], "arguments": [arguments as JSON]}]'
OLMO3 = "{{- '<function_calls>' + message['function_calls'] + '</function_calls>' -}}"
GPT_OSS = "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
SMOLLM3 = "within <tool_call></tool_call> XML tags"
DEEPSEEK_QWEN = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']}}"


@pytest.mark.parametrize(
    ("source", "family", "name"),
    [
        (QWEN25, "Qwen2ForCausalLM", "hermes"),
        (QWEN25, "LlamaForCausalLM", "hermes"),  # Hermes models of that family
        (QWEN3_CODER, "Qwen3MoeForCausalLM", "qwen3_coder"),
        (OTHER_XML, "Qwen3ForCausalLM", None),
        (DEEPSEEK_QWEN, "Qwen2ForCausalLM", None),
        (GRANITE30, "GraniteForCausalLM", "granite"),
        (GRANITE33, "GraniteForCausalLM", "granite"),
        (GRANITE4, "GraniteForCausalLM", "hermes"),
        (PHI4_MINI, "Phi3ForCausalLM", "phi4"),
        (PHI4_MINI_FUNCTOOLS, "Phi3ForCausalLM", "functools"),
        (OLMO3, "Olmo3ForCausalLM", "olmo3"),
        (SMOLLM3, "SmolLM3ForCausalLM", "hermes"),
        (GPT_OSS, "GptOssForCausalLM", "harmony"),
        (GPT_OSS, None, "harmony"),
        ("{{- '<|start|>user<|message|>' }}", "GptOssForCausalLM", None),
        ("{{ messages }}", "Phi3ForCausalLM", None),
        ("{{ messages }}", "GraniteForCausalLM", None),
        ("{{ messages }}", "Gemma3ForCausalLM", None),
        (LLAMA31, "LlamaForCausalLM", "llama3_json"),
        (MISTRAL03, "MistralForCausalLM", "mistral"),
        (MISTRAL11, "MistralForCausalLM", "mistral_named"),
        (None, "MistralForCausalLM", "mistral"),
        ("{{ messages }}", "Qwen3ForCausalLM", "hermes"),
        (None, None, None),
        ("{{ messages }}", "OtherForCausalLM", None),
    ],
)
def test_a_model_has_the_format_of_its_template_or_else_of_its_family(
    source: str | None, family: str | None, name: str | None
) -> None:
    found = tool_call_format(source, family)
    assert (found.name if found else None) == name


def test_families_with_a_format_of_their_own_are_served() -> None:
    assert FAMILY_FORMATS.keys() <= FAMILIES.keys()


@pytest.mark.parametrize(
    ("source", "opening", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", "<|im_start|>assistant", "think"),
        ("{{ content.split('</think>')[-1] }}", "<|im_start|>assistant\n<think>", "think_opened"),
        ("{{ content }}", "<|im_start|>assistant", None),
        ("between <think></think> and your response between <response></response>", "<|x|>", "think_response"),
        ("after 'Here is my thought process:' and after 'Here is my response:'", "<|x|>", "thought_process"),
        ("format: <think> {Thought section} </think> {Solution section}", "<|im_sep|>", "think"),
        (GPT_OSS, "<|start|>assistant", "harmony"),
        (None, None, None),
    ],
)
def test_the_format_of_thoughts(source: str | None, opening: str | None, name: str | None) -> None:
    found = reasoning_format(source, opening)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_as_text_are_read_as_these_calls(name: str) -> None:
    each = TOOL_CALL_FORMATS[name]
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"city": "Köln", "n": [1, None]}), ("g", {})]
    found = parse(each.parser(), [each.text(calls)])
    assert found.text == ""
    assert [(tool, json.loads(arguments)) for tool, arguments in found.calls] == calls


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_ids_of_calls(name: str) -> None:
    each = TOOL_CALL_FORMATS[name]
    new = each.new_call_id()
    assert new != each.new_call_id()
    assert each.template_call_id(new) == new
    foreign = "call_0123456789abcdef"
    made = each.template_call_id(foreign)
    if each.call_id_length is None:
        assert made == foreign
    else:
        assert len(made) == 9
        assert made.isalnum()
        assert made == each.template_call_id(foreign) != each.template_call_id(foreign + "0")


@pytest.mark.parametrize("name", ["f", "get_weather", "a.b-c:d/e", "get weather", "wetter_für", "a$b", "2x", "x" * 128])
@pytest.mark.parametrize("tool_format", TOOL_CALL_FORMATS.values(), ids=TOOL_CALL_FORMATS)
def test_a_call_is_found_by_all_names_that_a_format_says_it_can_name(tool_format: ToolCallFormat, name: str) -> None:
    parser = tool_format.parser(tool_names=[name])
    found = parser.feed(tool_format.text([(name, {"a": 1})])) + parser.finish()
    is_found = any(isinstance(event, ToolCallStart) and event.name == name for event in found)
    assert is_found == tool_format.can_name(name)
    assert tool_format.can_name("get_weather")
    assert not tool_format.can_name("x" * 129)
    assert not tool_format.can_name("")
