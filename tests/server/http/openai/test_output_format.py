"""What an output may look like: the fields of this API and of other servers, and outputs that follow them."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import LENIENT, STYLE
from jaxctx.v1.generation_pb2 import Choices, OutputFormat
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.openai.output_format import parse_output_format

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xy", "zw"]}},
    "required": ["a"],
    "additionalProperties": False,
}
BY_SCHEMA = OutputFormat(json_schema=json_text({**SCHEMA, "x-guidance": STYLE}))
AS_FAR_AS_IT_CAN_BE = OutputFormat(json_schema=json_text({**SCHEMA, "x-guidance": {**STYLE, **LENIENT}}))
STRICT = {"name": "x", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat(json_object=True)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_FAR_AS_IT_CAN_BE),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            OutputFormat(json_schema=json_text({"type": "object", "x-guidance": {**STYLE, **LENIENT}})),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, BY_SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": STRICT | {"strict": None}}}, AS_FAR_AS_IT_CAN_BE),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, OutputFormat(json_object=True)),
        ({"response_format": {"type": "grammar", "grammar": "start: /a/"}}, OutputFormat(grammar="start: /a/")),
        ({"guided_json": SCHEMA}, BY_SCHEMA),
        ({"guided_json": '{"type": "null"}'}, OutputFormat(json_schema='{"type": "null"}')),
        ({"guided_json": {}}, None),
        ({"guided_json_object": True}, OutputFormat(json_object=True)),
        ({"guided_json_object": False, "guided_regex": "a"}, OutputFormat(regex="a")),
        ({"guided_choice": ["a", "b"]}, OutputFormat(choices=Choices(texts=["a", "b"]))),
        ({"guided_choice": []}, None),
        ({"guided_grammar": "start: /a/"}, OutputFormat(grammar="start: /a/")),
        ({"regex": "a"}, OutputFormat(regex="a")),
        ({"json_schema": '{"type": "null"}'}, OutputFormat(json_schema='{"type": "null"}')),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, BY_SCHEMA),
        ({"structured_outputs": {"choice": ["a"]}}, OutputFormat(choices=Choices(texts=["a"]))),
        ({"structured_outputs": {"json_object": True}}, OutputFormat(json_object=True)),
        ({"structured_outputs": {}}, None),
    ],
)
def test_a_format(fields: dict[str, Any], expected: OutputFormat | None) -> None:
    assert parse_output_format(fields)[0] == expected


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"schema": {}}}, "response_format.type"),
        ({"response_format": {"type": []}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"guided_json": deep(100_000)}, "guided_json"),
        ({"guided_json": 0}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "\ud800"}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_json_object": 1}, "guided_json_object"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"regex": "a", "guided_regex": "a"}, "regex"),
    ],
)
def test_a_format_that_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_output_format(fields)
    assert refused.value.violations[0].field == field


@pytest.mark.parametrize("streams", [False, True])
async def test_outputs_follow_it(api: openai.AsyncOpenAI, streams: bool) -> None:
    """The model writes nothing like that by itself."""
    messages: Any = [{"role": "user", "content": "x"}]

    async def text_of(**fields: Any) -> str:
        asked: Any = {"model": "echo", "messages": messages, "max_tokens": 60, "seed": 1, **fields}
        if not streams:
            (choice,) = (await api.chat.completions.create(**asked)).choices
            assert choice.finish_reason == "stop"
            return choice.message.content or ""
        stream = await api.chat.completions.create(stream=True, **asked)
        return "".join([each.choices[0].delta.content or "" async for each in stream])

    schema = {"name": "x", "strict": True, "schema": SCHEMA}
    found = json.loads(await text_of(response_format={"type": "json_schema", "json_schema": schema}))
    assert found["a"] in ("xy", "zw")
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", await text_of(extra_body={"guided_regex": "[a-c]{3}-[0-9]{2}"}))
    assert await text_of(extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
    assert await text_of(extra_body={"structured_outputs": {"grammar": 'start: "ab" /[x-z]/'}}) in ("abx", "aby", "abz")


@pytest.mark.parametrize("strict", [None, False, True])
async def test_what_is_not_strict_is_followed_as_far_as_it_can_be(api: openai.AsyncOpenAI, strict: bool | None) -> None:
    once = {"type": "array", "items": {"enum": ["xy"]}, "minItems": 1, "maxItems": 1, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": once}, "required": ["a"], "additionalProperties": False}
    described = {"name": "x", "schema": schema, "strict": strict}
    messages: Any = [{"role": "user", "content": "x"}]
    wanted: Any = {"type": "json_schema", "json_schema": described}
    asking = api.chat.completions.create(model="echo", messages=messages, max_tokens=60, seed=1, response_format=wanted)
    if strict:
        with pytest.raises(openai.BadRequestError) as refused:
            await asking
        assert refused.value.param == "response_format"
    else:
        assert json.loads((await asking).choices[0].message.content or "") == {"a": ["xy"]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "(", "prompt": "x"}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
    ],
)
async def test_what_cannot_be_followed(api: openai.AsyncOpenAI, fields: dict[str, Any], field: str) -> None:
    for streams in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model="echo", prompt="x", stream=streams, extra_body=fields)
        assert refused.value.param == field
