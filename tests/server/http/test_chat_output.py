"""Calls of tools and thoughts in outputs: what a request asks of the engine, and how texts are read."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from jaxctx.v1.context_service_pb2 import GenerateRequest
from jaxctx.v1.generation_pb2 import OutputFormat
from jaxctx_server.http.chat_output import MAX_INLINE_TOOLS, ChatFormats, ToolUse
from jaxctx_server.http.tools import Tool, stored_tools

TEXT = '{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}'
TOOL, STRICT = stored_tools([TEXT, TEXT.replace('"name"', '"strict": true, "name"')])
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def formats(reasoning: bool = False, special: dict[str, int] | None = None) -> ChatFormats:
    return ChatFormats(TOOL_CALL_FORMATS["hermes"], REASONING_FORMATS["think"] if reasoning else None, special or {})


async def prepared(use: ToolUse, known: ChatFormats | None = None, **fields: Any) -> GenerateRequest:
    generate = GenerateRequest(**fields)
    await (known or formats()).prepare(generate, use)
    return generate


def events(parser: OutputParser, text: str) -> list[Any]:
    return [*parser.feed(text), *parser.finish()]


@pytest.mark.parametrize(
    ("use", "is_held"),
    [
        (ToolUse(), False),
        (ToolUse(tools=[TOOL]), False),
        (ToolUse(tools=[TOOL], choice="none"), False),
        (ToolUse(tools=[TOOL], choice="required"), True),
        (ToolUse(tools=[TOOL], choice="named", name="look"), True),
        (ToolUse(tools=[STRICT]), True),
    ],
)
async def test_when_an_output_is_held_to_calls(use: ToolUse, is_held: bool) -> None:
    assert (await prepared(use)).HasField("output_format") == is_held


async def test_a_tool_whose_calls_would_be_lost_is_refused() -> None:
    """A format without quotes ends a name at a space; who may not be called may have any name."""
    spoken = stored_tools([TEXT.replace("look", "look up")])
    channels = ChatFormats(TOOL_CALL_FORMATS["harmony"], REASONING_FORMATS["harmony"], {})
    with pytest.raises(InvalidArgument, match="'look up'"):
        await prepared(ToolUse(tools=[TOOL, *spoken]), channels)
    await prepared(ToolUse(tools=[*spoken], choice="none"), channels)
    await prepared(ToolUse(tools=[TOOL, *spoken]))


async def test_a_named_tool_is_called_once() -> None:
    named = await prepared(ToolUse(tools=[TOOL], choice="named", name="look"))
    alone = await prepared(ToolUse(tools=[TOOL], choice="named", name="look", parallel=False))
    several = await prepared(ToolUse(tools=[TOOL], choice="required"))
    assert named.output_format.grammar == alone.output_format.grammar != several.output_format.grammar


@pytest.mark.parametrize("wanted", [OutputFormat(regex="a+"), OutputFormat(json_schema="true")])
async def test_a_format_in_whose_place_no_call_can_stand_stays(wanted: OutputFormat) -> None:
    assert (await prepared(ToolUse(tools=[STRICT]), output_format=wanted)).output_format == wanted
    assert (await prepared(ToolUse(), output_format=wanted)).output_format == wanted


@pytest.mark.parametrize("wanted", [OutputFormat(json_object=True), OutputFormat(json_schema='{"type": "object"}')])
@pytest.mark.parametrize("tool", [TOOL, STRICT])
async def test_calls_may_stand_in_place_of_json(wanted: OutputFormat, tool: Tool) -> None:
    found = (await prepared(ToolUse(tools=[tool]), output_format=wanted)).output_format
    assert "answer: text | calls" in found.grammar
    assert (await prepared(ToolUse(tools=[tool], choice="none"), output_format=wanted)).output_format == wanted


@pytest.mark.parametrize(
    "use", [ToolUse(tools=[TOOL], choice="required"), ToolUse(tools=[TOOL], choice="named", name="look")]
)
async def test_a_demanded_call_does_without_a_text(use: ToolUse) -> None:
    json_text = OutputFormat(json_schema='{"type": "object"}')
    assert await prepared(use, output_format=json_text) == await prepared(use)
    with pytest.raises(InvalidArgument) as raised:
        await prepared(use, output_format=OutputFormat(choices={"texts": ["a"]}))
    assert [each.field for each in raised.value.violations] == ["tool_choice"]


async def test_a_text_with_a_format_has_no_thoughts() -> None:
    known, wanted = formats(reasoning=True), OutputFormat(json_object=True)
    for use, has_thoughts in (
        (ToolUse(), False),
        (ToolUse(tools=[TOOL]), False),
        (ToolUse(tools=[TOOL], choice="required"), True),
    ):
        generate = GenerateRequest(output_format=wanted)
        assert ((await known.prepare(generate, use)).reasoning is not None) == has_thoughts
        assert ("thoughts" in generate.output_format.grammar) == has_thoughts
    assert await known.prepare(GenerateRequest(), ToolUse()) == known


CHANNELS = ChatFormats(TOOL_CALL_FORMATS["harmony"], REASONING_FORMATS["harmony"], {"<|channel|>": 5})


@pytest.mark.parametrize(
    ("wanted", "form"),
    [
        (OutputFormat(json_object=True), '%json {"x-guidance"'),
        (OutputFormat(json_schema='{"type": "string"}'), '"type": "string"'),
        (OutputFormat(regex="a/b"), r"/a\/b/"),
        (OutputFormat(choices={"texts": ["a", "b"]}), '"a" | "b"'),
        (OutputFormat(grammar='start: "a"'), '%lark {\nstart: "a"\n}'),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_format_is_that_of_the_final_channel(wanted: OutputFormat, form: str, choice: Any) -> None:
    for use in (ToolUse(), ToolUse(tools=[TOOL], choice=choice)):
        generate = GenerateRequest(output_format=wanted)
        assert await CHANNELS.prepare(generate, use) == CHANNELS
        assert generate.include_special_tokens
        assert f"form: {form}" in generate.output_format.grammar or form in generate.output_format.grammar
        assert "thoughts? final" in generate.output_format.grammar
        assert "<[5]>" in generate.output_format.grammar


@pytest.mark.parametrize(
    "wanted", [OutputFormat(json_schema="true"), OutputFormat(grammar='start: "<|channel|>final<|message|>" "a"')]
)
async def test_a_format_that_is_no_other_with_channels(wanted: OutputFormat) -> None:
    """It is refused where it is compiled, or writes the channels by itself."""
    assert (await prepared(ToolUse(), CHANNELS, output_format=wanted)).output_format == wanted


async def test_a_format_of_an_answer_that_goes_on_stays() -> None:
    """The final channel is in the prompt; a call has to end it."""
    wanted = OutputFormat(json_object=True)
    generate = GenerateRequest(output_format=wanted)
    await CHANNELS.prepare(generate, ToolUse(), is_continuation=True)
    assert generate.output_format == wanted
    for choice, start in (("required", 'start: "<|end|>" "<|start|>" '), ("auto", "start: form | ")):
        generate = GenerateRequest(output_format=wanted)
        use = ToolUse(tools=[TOOL], choice=choice)  # type: ignore[arg-type]
        await CHANNELS.prepare(generate, use, is_continuation=True)
        assert generate.output_format.grammar.startswith(start), generate.output_format.grammar


def test_channels_are_read_in_every_output() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert events(CHANNELS.parser(ToolUse()), text) == [ReasoningDelta("hm"), TextDelta("Yes.")]
    assert events(CHANNELS.parser(ToolUse(), is_continuation=True), "Yes.<|return|>") == [TextDelta("Yes.")]
    call = "<|channel|>commentary to=functions.look<|message|>{}"
    assert ToolCallStart(0, "look") in events(CHANNELS.parser(ToolUse(tools=[TOOL])), call)
    for use in (ToolUse(), ToolUse(tools=[TOOL], choice="none")):
        assert "".join(each.text for each in events(CHANNELS.parser(use), call)) == call
        assert CHANNELS.reads(use, is_continuation=True)


async def test_a_looser_format_holds_to_strict_tools_alone() -> None:
    """For an engine that cannot follow the schemas of the others."""

    async def looser(use: ToolUse, wanted: GenerateRequest) -> OutputFormat | None:
        return (await formats().prepare(wanted, use)).looser_format

    [bound] = stored_tools([TEXT.replace('"properties": {}', '"properties": {"a": {}}')])
    [strict] = stored_tools([bound.text.replace('"name"', '"strict": true, "name"')])
    wanted = GenerateRequest()
    found = await looser(ToolUse(tools=[bound], choice="required"), wanted)
    assert found is not None
    assert ('"a"' in wanted.output_format.grammar, '"a"' in found.grammar) == (True, False)
    assert await looser(ToolUse(tools=[strict], choice="required"), GenerateRequest()) is None
    assert await looser(ToolUse(tools=[bound]), GenerateRequest()) is None  # which has no grammar
    assert await looser(ToolUse(tools=[bound, strict]), GenerateRequest()) is None  # it holds to no other schema


async def test_special_tokens_are_shown_where_they_are_marks() -> None:
    marked = formats(special={"<tool_call>": 5})
    assert (await prepared(ToolUse(tools=[TOOL]), marked)).include_special_tokens
    assert not (await prepared(ToolUse(), marked)).include_special_tokens
    assert not (await prepared(ToolUse(tools=[TOOL]))).include_special_tokens


@pytest.mark.parametrize("special", [{}, {"<tool_call>": 5}])
async def test_special_tokens_that_a_request_asks_for_are_shown(special: dict[str, int]) -> None:
    known = formats(reasoning=True, special=special)
    for use in (ToolUse(), ToolUse(tools=[TOOL])):
        assert (await prepared(use, known, include_special_tokens=True)).include_special_tokens


async def test_a_model_whose_calls_nobody_knows() -> None:
    unknown = ChatFormats(None, None, {})
    with pytest.raises(InvalidArgument) as raised:
        await prepared(ToolUse(tools=[TOOL]), unknown)
    assert [each.field for each in raised.value.violations] == ["tools"]
    assert await prepared(ToolUse(), unknown) == GenerateRequest()
    with pytest.raises(ValueError, match="no calls"):
        unknown.new_call_id()


def test_calls_are_found_only_where_they_are_allowed() -> None:
    assert ToolCallStart(0, "look") in events(formats().parser(ToolUse(tools=[TOOL])), CALL)
    assert events(formats().parser(ToolUse(tools=[TOOL], choice="none")), CALL) == [TextDelta(CALL)]
    other = CALL.replace("look", "other")
    assert not any(isinstance(each, ToolCallStart) for each in events(formats().parser(ToolUse(tools=[TOOL])), other))


def test_thoughts_are_none_in_an_answer_that_had_begun() -> None:
    text = "<think>hm</think>Yes."
    found = events(formats(reasoning=True).parser(ToolUse()), text)
    assert "".join(each.text for each in found if isinstance(each, ReasoningDelta)).strip() == "hm"
    assert events(formats(reasoning=True).parser(ToolUse(), is_continuation=True), text) == [TextDelta(text)]


async def test_the_grammar_of_large_tools_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is that of tools whose schemas refer to others."""
    threads: list[str] = []
    write = ChatFormats._grammars

    def note(known: ChatFormats, *asked: Any) -> tuple[str, str]:
        threads.append(threading.current_thread().name)
        return write(known, *asked)

    monkeypatch.setattr(ChatFormats, "_grammars", note)
    [large] = stored_tools([TEXT.replace('"parameters"', f'"description": "{"x" * MAX_INLINE_TOOLS}", "parameters"')])
    [referring] = stored_tools([TEXT.replace('"properties": {}', '"properties": {"a": {"$ref": "#"}}')])
    for tool in (TOOL, large, referring):
        assert (await prepared(ToolUse(tools=[tool], choice="required"))).output_format.grammar
    assert [name == threading.main_thread().name for name in threads] == [True, False, False]


def test_a_tool_is_not_read_again_for_each_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has up to 1 MiB of tools and 128 outputs."""
    use = ToolUse(tools=[TOOL] * 128)
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", lambda text: pytest.fail("JSON is parsed"))
        parser = formats().parser(use)
    assert ToolCallStart(0, "look") in parser.feed(CALL)
