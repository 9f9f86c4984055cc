"""Templates: which tasks a prompt with placeholders becomes, and which templates are refused."""

from typing import Any

import pytest

from jaxctx.errors import (
    InvalidArgument,
)
from jaxctx.programs.template import TaskSpec, constant_prefix, parse_template
from jaxctx.programs.variables import Variable
from tests.jaxctx.programs.builders import make_output
from tests.jaxctx.programs.conftest import ProgramsHarness, ask, call, output
from tests.jaxctx.programs.scripted import ScriptedEngine


@pytest.mark.parametrize(
    ("template", "parameters", "field"),
    [
        ("{{o}} first", {"o": output("o")}, "template"),
        ("no places", {}, "parameters"),
        ("{{x}}", {"x": "X"}, "parameters"),
        ("a {{x}}{{o}}", {"o": output("o")}, "template"),
        ("a {{o}}", {"o": output("o"), "x": "X"}, "parameters[1].name"),
        ("a {{o}}{{o}}", {"o": output("o")}, "template"),
        ("a {{o}}", {"o": output("o", max_tokens=20_000)}, "parameters[0].output.max_tokens"),
    ],
)
async def test_a_call_with_a_wrong_template_is_refused_and_leaves_nothing(
    template: str, parameters: dict, field: str
) -> None:
    session = ProgramsHarness(ScriptedEngine()).session()
    with pytest.raises(InvalidArgument) as error:
        call(session, template, **parameters)
    assert [each.field for each in error.value.violations] == [field]
    assert session.variables == {}
    assert session.calls == {}


async def test_braces_that_are_no_placeholder_are_text() -> None:
    harness = ProgramsHarness(engine := ScriptedEngine())
    session = harness.session()
    await ask(session, call(session, '{"a": {"b": {{ 1 }}}} {{o}}', o=output("o"))["o"])
    assert engine.did("generate") == ['{"a": {"b": {{ 1 }}}} ']


# --- Parsing alone


def refused_field(template: str, parameters: dict[str, Any]) -> str:
    """The field that is named when these are refused."""
    with pytest.raises(InvalidArgument) as raised:
        parse_template(template, parameters)
    (violation,) = raised.value.violations
    return violation.field


def test_each_output_is_a_task_with_the_prompt_since_the_one_before() -> None:
    x, a, b = Variable("x"), make_output("a"), make_output("b")
    specs = parse_template("Q: {{x}} {{a}} and {{t}}{{b}}", {"x": x, "a": a, "t": "text", "b": b})
    assert specs == [TaskSpec(("Q: ", x, " "), a), TaskSpec((" and ", "text"), b)]
    assert [spec.function for spec in specs] == ["", ""]


def test_outputs_may_follow_each_other_and_text_after_the_last_is_left_out() -> None:
    a, b = make_output("a"), make_output("b")
    specs = parse_template("Q{{a}}{{b}} and so on", {"a": a, "b": b})
    assert [list(spec.prompt) for spec in specs] == [["Q"], []]


def test_an_input_may_stand_at_several_places_and_come_first() -> None:
    x, o = Variable("x"), make_output()
    (spec,) = parse_template("{{x}}, {{ x }}!{{o}}", {"x": x, "o": o})
    assert list(spec.prompt) == [x, ", ", x, "!"]


def test_empty_texts_are_no_part_of_a_prompt() -> None:
    (spec,) = parse_template("Q{{t}}{{o}}", {"t": "", "o": make_output()})
    assert list(spec.prompt) == ["Q"]


@pytest.mark.parametrize("inside", ["1", "a b", "a-b", "", "a.b", "é", "x" * 65])
def test_what_is_no_name_is_text(inside: str) -> None:
    (spec,) = parse_template(f"{{{{{inside}}}}}{{{{o}}}}", {"o": make_output()})
    assert list(spec.prompt) == [f"{{{{{inside}}}}}"]


@pytest.mark.parametrize("name", ["a", "_", "A_9", "x" * 64])
def test_a_name_may_have_space_around_it(name: str) -> None:
    (spec,) = parse_template(f"{{{{ \n{name}\t}}}}{{{{o}}}}", {name: "text", "o": make_output()})
    assert list(spec.prompt) == ["text"]


def test_a_text_that_looks_like_a_placeholder_is_text() -> None:
    (spec,) = parse_template("{{t}}{{o}}", {"t": "{{x}}", "o": make_output()})
    assert list(spec.prompt) == ["{{x}}"]


def test_refusals_name_the_field() -> None:
    o = make_output()
    assert refused_field("a {{x}}{{o}}", {"o": o}) == "template"
    assert refused_field("a {{o}}{{o}}", {"o": o}) == "template"
    assert refused_field("{{o}} a", {"o": o}) == "template"
    assert refused_field("{{t}}{{o}}", {"t": "", "o": o}) == "template"
    assert refused_field("a {{o}}", {"o": o, "x": "X", "y": "Y"}) == "parameters[1].name"
    assert refused_field("a {{x}}", {"x": "X"}) == "parameters"
    assert refused_field("", {}) == "parameters"


@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("Be brief. {{x}} {{o}}", "Be brief. "),
        ("{{x}} {{o}}", ""),
        ("no places", "no places"),
        ("{{ 1 }}{{o}}", "{{ 1 }}"),
    ],
)
def test_the_constant_prefix_ends_at_the_first_placeholder(template: str, prefix: str) -> None:
    assert constant_prefix(template) == prefix
