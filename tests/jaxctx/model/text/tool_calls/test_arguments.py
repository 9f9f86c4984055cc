"""What is looked at and written for the rules of arguments is bounded, however schemas refer to each other."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from jaxctx.model.text.tool_calls.arguments import MAX_LOOKS, MAX_RULES, RulesWork, arguments_schema, bounded_json
from tests.tool_call_grammars import PLAIN, accepts


def tool(parameters: Any, *, name: str = "f", is_strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": is_strict}}


def inside_of_each_other(depth: int, **innermost: Any) -> dict[str, Any]:
    """Arguments of which one refers to lists in lists, and to each of those: all have the innermost schema."""
    items: dict[str, Any] = {"type": "integer", **innermost}
    for _ in range(depth):
        items = {"type": "array", "items": items}
    names = [{"$ref": "#/$defs/a" + "/items" * level} for level in range(depth + 1)]
    return {"properties": {"x": {"type": "array", "prefixItems": names}}, "$defs": {"a": items}}


def test_no_more_is_written_than_a_grammar_may_have() -> None:
    """A text of 1 MB that is within 50 schemas that are referred to made 50 MB."""
    length = 1 << 20
    parameters = inside_of_each_other(50, description="x" * length)
    arguments = arguments_schema(tool(parameters), is_free=False, work=RulesWork())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            arguments.json_of(parameters["properties"]["x"])
        assert tracemalloc.get_traced_memory()[1] < 4 * length
    finally:
        tracemalloc.stop()
    assert bounded_json({"description": "x" * (MAX_RULES // 2)}).endswith('xx"}')
    with pytest.raises(InvalidArgument):
        bounded_json({"description": "x" * MAX_RULES})


def test_so_much_is_looked_at() -> None:
    work = RulesWork()
    work.look(MAX_LOOKS)
    with pytest.raises(InvalidArgument) as raised:
        work.look(1)
    assert [violation.field for violation in raised.value.violations] == ["tools"]


@pytest.mark.parametrize("name", ["olmo3", "qwen3_coder"])
def test_schemas_inside_of_each_other(name: str) -> None:
    """Few are followed. Many are refused of a strict tool, while any other is held to less."""
    tool_format, few = TOOL_CALL_FORMATS[name], inside_of_each_other(5)
    grammar = tool_format.grammar([tool(few)], "required", False)
    nested = [[[[[[1]]]]], [[[[2]]]]]
    assert accepts(PLAIN[0], grammar, tool_format.text([("f", {"x": nested})]))
    assert not accepts(PLAIN[0], grammar, tool_format.text([("f", {"x": [1]})]))
    many = inside_of_each_other(50, enum=[[]] * 3000)
    with pytest.raises(InvalidArgument) as raised:
        tool_format.grammar([tool(many)], "required", False)
    assert [violation.field for violation in raised.value.violations] == ["tools"]
    # Nor does it keep a strict tool from its own schema.
    tools = [tool(many, name="g", is_strict=False), tool(few)]
    grammar = tool_format.grammar(tools, "required", False)
    assert len(grammar) < 10_000
    assert accepts(PLAIN[0], grammar, tool_format.text([("g", {"y": 1})]))
    assert accepts(PLAIN[0], grammar, tool_format.text([("f", {"x": nested})]))
    assert not accepts(PLAIN[0], grammar, tool_format.text([("f", {"x": [1]})]))
