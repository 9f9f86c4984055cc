"""Bodies of /v1/decisions: what they ask for, and which field is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx_server.http.decisions.request import (
    DecisionRequest,
    Option,
    different_formats,
    parse_decision_request,
)
from tests.server.http.decisions.harness import COLOUR, DEPTH, WHY, WIDE, body


def parse(*questions: Any, **fields: Any) -> DecisionRequest:
    return parse_decision_request(json.dumps(body(*questions, **fields)).encode())


def test_questions() -> None:
    request = parse(WIDE, COLOUR, DEPTH, {**WHY, "name": None, "stop": "x", "regex": "a+"}, cache_salt="s", priority=3)
    wide, colour, depth, why = request.questions
    assert [option.text for option in wide.options] == ["yes", "no"]
    assert colour.options[1] == Option("blue-green", "between the two")
    assert (colour.options[3].value, colour.options[3].text) == (True, "true")
    assert [option.value for option in depth.options] == ["not", "not very", "very"]
    assert (why.name, why.options, why.format_name) == (None, (), "regex")
    assert why.generate is not None
    assert (why.generate.max_tokens, list(why.generate.stop)) == (6, ["x"])
    assert why.generate.output_format.regex == "a+"
    assert (request.create.model_id, request.create.salt, request.create.priority) == ("echo", "s", -3)
    assert not request.stream


def test_texts_are_greedy_unless_they_say_otherwise() -> None:
    first, second = parse(WHY, {**WHY, "temperature": 0.5}).questions
    assert first.generate is not None
    assert second.generate is not None
    assert (first.generate.sampling.temperature, second.generate.sampling.temperature) == (0, 0.5)
    assert first.generate.sampling.HasField("temperature")


def test_a_model_that_thinks_is_told_not_to() -> None:
    assert json.loads(parse(WIDE).template_arguments) == {"reasoning_effort": "none", "enable_thinking": False}
    given = parse(WIDE, chat_template_kwargs={"enable_thinking": True, "a": 1}).template_arguments
    assert json.loads(given) == {"reasoning_effort": "none", "enable_thinking": True, "a": 1}


def test_json_is_text() -> None:
    parts = [{"type": "input_text", "text": "See "}, {"type": "input_json", "data": [{"a": None}]}]
    request = parse({**WIDE, "instructions": parts}, input=[{"role": "user", "content": parts}])
    assert request.questions[0].instructions == 'See [{"a":null}]'
    assert request.messages[0].content == 'See [{"a":null}]'


def test_calls_and_results_of_tools_are_taken() -> None:
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ]
    assert [each.role for each in parse(WIDE, input=items).messages] == ["user", "assistant", "tool"]


def test_unknown_fields_are_named_and_those_of_the_api_are_not() -> None:
    request = parse(
        {**WIDE, "choices": []},
        {**WHY, "levels": 1},
        hm=1,
        prompt_cache_key="k",
        prompt_cache_options={},
        safety_identifier="u",
    )
    assert request.unknown_fields == ("hm", "questions.choices", "questions.levels")


def test_different_formats_are_found_once() -> None:
    questions = parse(WIDE, {**WHY, "regex": "a"}, {**WHY, "guided_regex": "a"}, {**WHY, "regex": "b"}, WHY).questions
    assert list(different_formats(questions).values()) == [1, 3]


OPTIONS = [{"value": "a"}, {"value": "b"}]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]}, "input[0].content[0].data"),
        ({"questions": None}, "questions"),
        ({"questions": {}}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": [WIDE] * 401}, "questions"),
        ({"questions": [{**COLOUR, "choices": [{"value": str(i)} for i in range(250)]}] * 17}, "questions"),
        ({"questions": [{**WHY, "regex": f"a{i}"} for i in range(65)]}, "questions"),
        ({"questions": [WIDE, 5]}, "questions[1]"),
        ({"questions": [WIDE, {**WIDE, "type": "guess"}]}, "questions[1].type"),
        ({"questions": [{**WIDE, "type": ["predicate"]}]}, "questions[0].type"),
        ({"questions": [{**WIDE, "name": 5}]}, "questions[0].name"),
        ({"questions": [{**WIDE, "name": "n" * 257}]}, "questions[0].name"),
        ({"questions": [{**WIDE, "instructions": None}]}, "questions[0].instructions"),
        ({"questions": [{**WIDE, "instructions": " "}]}, "questions[0].instructions"),
        ({"questions": [{**WIDE, "instructions": [{"type": "input_image"}]}]}, "questions[0].instructions[0].type"),
        ({"questions": [{**COLOUR, "choices": OPTIONS[:1]}]}, "questions[0].choices"),
        ({"questions": [{**COLOUR, "choices": [{"value": str(i)} for i in range(256)]}]}, "questions[0].choices"),
        ({"questions": [{**COLOUR, "choices": [*OPTIONS, "c"]}]}, "questions[0].choices[2]"),
        ({"questions": [{**COLOUR, "choices": [*OPTIONS, {"value": " "}]}]}, "questions[0].choices[2].value"),
        ({"questions": [{**COLOUR, "choices": [*OPTIONS, {"value": 5}]}]}, "questions[0].choices[2].value"),
        ({"questions": [{**COLOUR, "choices": [*OPTIONS, {"value": "a"}]}]}, "questions[0].choices[2].value"),
        (
            {"questions": [{**COLOUR, "choices": [{"value": "true"}, {"value": True}]}]},
            "questions[0].choices[1].value",
        ),
        (
            {"questions": [{**COLOUR, "choices": [*OPTIONS, {"value": "c", "description": 5}]}]},
            "questions[0].choices[2].description",
        ),
        ({"questions": [{**DEPTH, "levels": [{"label": str(i)} for i in range(11)]}]}, "questions[0].levels"),
        ({"questions": [{**DEPTH, "levels": [{"label": "a"}, {"label": True}]}]}, "questions[0].levels[1].label"),
        ({"questions": [{**WHY, "max_tokens": 5}, {**WHY, "max_tokens": True}]}, "questions[1].max_tokens"),
        ({"questions": [{**WHY, "max_tokens": "5"}]}, "questions[0].max_tokens"),
        ({"questions": [{**WHY, "stop": 5}]}, "questions[0].stop"),
        ({"questions": [{**WHY, "regex": 5}]}, "questions[0].regex"),
        ({"questions": [{**WHY, "regex": "a", "guided_regex": "b"}]}, "questions[0].regex"),
        ({"questions": [{**WHY, "response_format": {"type": "odd"}}]}, "questions[0].response_format.type"),
        ({"stream": 1}, "stream"),
        ({"model": 5}, "model"),
        ({"priority": 101}, "priority"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_the_field_that_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_decision_request(json.dumps({**body(WIDE), **fields}).encode())
    assert [each.field for each in refused.value.violations] == [field]
    assert refused.value.message.startswith(f"{field}: ")
