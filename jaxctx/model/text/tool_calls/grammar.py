"""Grammars that hold an output to calls of tools, in the Lark dialect of llguidance.

A grammar is text; it is compiled where the masks are made. How JSON is written is said in `json_schemas`.

    start: thoughts? calls                    a call is required
    start: thoughts? (any text | text_before calls)    calls are free, but each is as it must be
    start: thoughts? (JSON | calls)         the same, where a text has a schema
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxctx.errors import InvalidArgument
from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.arguments import (
    ENCODER,
    ArgumentsSchema,
    RulesSize,
    RulesWork,
    Tool,
    arguments_schema,
    check_properties,
    is_strict_tool,
)
from jaxctx.model.text.tool_calls.element_grammar import ELEMENT_RULES, element_rules
from jaxctx.model.text.tool_calls.element_reader import END_OF_VALUE, PARAMETER
from jaxctx.model.text.tool_calls.keyword_arguments import KEY
from jaxctx.model.text.tool_calls.marks import split_markers
from jaxctx.model.text.tool_calls.optional_properties import check_optional
from jaxctx.model.text.tool_calls.reasoning import ReasoningFormat
from jaxctx.model.text.tool_calls.symbols import ANY_TEXT, alternatives, json_symbol, quoted, sequence

MAX_CALLS = 128  # of one output: as many as a message holds
NO_OBJECT = r"/([^{](.|\n)*)?/"  # a text that does not begin with an object
ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*=/"  # of an argument by its name
JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|: |, |[{}]')  # a text in an object, and what stands around it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How calls are written.

    opening  opening_list  before_name NAME before_arguments ARGUMENTS after_arguments  between  …  closing
    """

    markers: tuple[str, ...]  # texts in the fields below that are special tokens of many tokenizers
    trigger: str = ""  # the marker by which calls in a text are known; empty: an object at the start of the text
    bare_trigger: str = ""  # within `before_name`: calls may begin with it too, as models sometimes forget the marker
    opening: str = ""  # before all calls
    opening_list: str = ""  # behind that, with a space between them or none
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    between: str = ""  # two calls
    closing: str = ""  # behind all calls
    name_is_json: bool = True  # the name stands inside a JSON string
    arguments: Literal["object", "keywords", "elements"] = "object"  # as JSON; a=1, b="x"; or as in `element_reader`


def calls_text(syntax: CallSyntax, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, names and arguments, as they are written."""
    written: list[str] = []
    for name, arguments in calls:
        inside = written_arguments(syntax, arguments)
        written.append(
            syntax.before_name + written_name(syntax, name) + syntax.before_arguments + inside + syntax.after_arguments
        )
    return syntax.opening + syntax.opening_list + syntax.between.join(written) + syntax.closing


def written_arguments(syntax: CallSyntax, arguments: Mapping[str, Any]) -> str:
    """The arguments of a call as they are written."""
    if syntax.arguments == "keywords":
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    if syntax.arguments == "elements":
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        return "".join(f"{PARAMETER}{key}>\n{text}\n{END_OF_VALUE}\n" for key, text in texts.items())
    return json.dumps(arguments, ensure_ascii=False)


def written_name(syntax: CallSyntax, name: str) -> str:
    """The name of a tool as it is written."""
    return json.dumps(name, ensure_ascii=False)[1:-1] if syntax.name_is_json else name


def tool_call_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    special_ids: Mapping[str, int],
    reasoning: ReasoningFormat | None,
    text_schema: Schema | None = None,
    strict_only: bool = False,
) -> str:
    """See `ToolCallFormat.grammar`."""
    writer = GrammarWriter(syntax, special_ids, strict_only=strict_only)
    rules = writer.rules(chosen_tools(tools, choice), is_free=choice == "auto", parallel=parallel, text=text_schema)
    if reasoning is None:
        return "\n".join(["start: answer", *rules])
    before = "thoughts" if reasoning.is_open else "thoughts?"
    return "\n".join([f"start: {before} answer", *writer.thoughts(reasoning), *rules])


def chosen_tools(tools: Sequence[Tool], choice: str) -> Sequence[Tool]:
    """The tools that may be called: all for "required" and "auto", else the one of this name.

    Raises InvalidArgument naming `tools` or `tool_choice` if there is none.
    """
    if not tools:
        raise InvalidArgument.field("tools", "must not be empty if a call is required")
    if choice in ("required", "auto"):
        return tools
    found = [tool for tool in tools if tool["function"]["name"] == choice]
    if not found:
        raise InvalidArgument.field("tool_choice", "names no tool of the request")
    return found[:1]


class GrammarWriter:
    """Writes the rules of one grammar."""

    def __init__(self, syntax: CallSyntax, special_ids: Mapping[str, int], *, strict_only: bool = False) -> None:
        self._syntax = syntax
        self._special_ids = special_ids  # of markers that are special tokens
        self._strict_only = strict_only  # no other tool is bound to its schema

    def rules(self, tools: Sequence[Tool], *, is_free: bool, parallel: bool, text: Schema | None = None) -> list[str]:
        """Rules for `answer`: calls of these tools, or with `is_free` any text, before calls or without; with a schema
        for the text, JSON of it in place of calls.
        """
        syntax, trigger = self._syntax, self._syntax.trigger
        places = range(len(tools))
        write_arguments = WRITERS[syntax.arguments]
        # Each kind has its own, so that no other tool keeps a strict one from its rules; and small tools come first, so
        # that no large one keeps them.
        work = {True: RulesWork(), False: RulesWork()}
        written: dict[int, list[str]] = {}
        for place in sorted(places, key=lambda place: len(ENCODER.encode(tools[place]))):
            tool = tools[place]
            schema = arguments_schema(tool, is_free or self._strict_only, work[is_strict_tool(tool)])
            written[place] = write_arguments(f"arguments_{place}", schema)
        rules = [rule for place in places for rule in written[place]]
        write_call = self._call_as_json if text is not None and not trigger else self._call
        rules += [f"call_{place}: {write_call(syntax.before_name, place, tools[place])}" for place in places]
        rules += ["call: " + alternatives("call", places)]
        rules += ELEMENT_RULES if syntax.arguments == "elements" else []
        more = f"({sequence(self._text(syntax.between), 'call')}){{0,{MAX_CALLS - 1}}}" if parallel else ""
        calls = "calls: " + sequence(*self._opening(syntax.opening), "call", more, *self._closing())
        if not is_free:
            return [*rules, calls, "answer: calls"]
        if text is not None:
            return [*rules, calls, f"text: {json_symbol(text)}", "answer: text | calls"]
        if not trigger:
            return [*rules, calls, f"answer: {NO_OBJECT} | calls"]
        # The text before the first call ends with the trigger, which that call then lacks.
        rules += self._text_before("text_before", trigger)
        if syntax.opening:
            first = [*self._opening(syntax.opening.removeprefix(trigger)), "call"]
        else:
            head = syntax.before_name.removeprefix(trigger)
            rules += [f"opened_{place}: {self._call(head, place, tools[place])}" for place in places]
            first = ["(" + alternatives("opened", places) + ")"]
        answers = [ANY_TEXT, sequence("text_before", *first, more, *self._closing())]
        if syntax.bare_trigger:
            rules += self._text_before("text_before_bare", syntax.bare_trigger)
            head = syntax.before_name.partition(syntax.bare_trigger)[2]
            rules += [f"bare_{place}: {self._call(head, place, tools[place])}" for place in places]
            first = ["(" + alternatives("bare", places) + ")"]
            answers.append(sequence("text_before_bare", *first, more, *self._closing()))
        return [*rules, "answer: " + " | ".join(answers)]

    def thoughts(self, reasoning: ReasoningFormat) -> list[str]:
        """Rules for `thoughts`: any text up to the closing mark, and the space behind it."""
        opening = "" if reasoning.is_open else self._text(reasoning.opening, [reasoning.opening])
        space = r"/[ \n]{0,4}/"
        if reasoning.closing in self._special_ids:
            closing = self._text(reasoning.closing, [reasoning.closing])
            return ["thoughts: " + sequence(opening, ANY_TEXT, closing, space)]
        closing = quoted(reasoning.closing)
        return [
            "thoughts: " + sequence(opening, "thoughts_text", space),
            f"thoughts_text[lazy]: THOUGHT {closing}",
            f"THOUGHT: {ANY_TEXT}",
        ]

    def _call(self, head: str, place: int, tool: Tool) -> str:
        """One call of a tool, of which `head` stands before the name."""
        syntax = self._syntax
        before = sequence(self._text(head), quoted(self._name(tool)), self._text(syntax.before_arguments))
        return sequence(before, f"arguments_{place}", self._text(syntax.after_arguments))

    def _call_as_json(self, head: str, place: int, tool: Tool) -> str:
        """The same, in the parts of which %json makes objects: where another object may stand in its place. llguidance
        does not go back in a text: it would take the whole of `head` for certain once two letters of it are there.
        """
        syntax = self._syntax
        parts = JSON_PART.findall(head + self._name(tool) + syntax.before_arguments)
        return sequence(*map(quoted, parts), f"arguments_{place}", quoted(syntax.after_arguments))

    def _name(self, tool: Tool) -> str:
        """The name of a tool as it is written."""
        return written_name(self._syntax, str(tool["function"]["name"]))

    def _opening(self, opening: str) -> list[str]:
        """What stands before all calls."""
        if not self._syntax.opening_list:
            return [self._text(opening)]
        return [self._text(opening), '" "?', self._text(self._syntax.opening_list)]

    def _closing(self) -> list[str]:
        return [self._text(self._syntax.closing)]

    def _text_before(self, name: str, trigger: str) -> list[str]:
        """The rule of this name: any text up to the first trigger."""
        if trigger in self._special_ids:
            return [f"{name}: " + sequence(ANY_TEXT, self._text(trigger))]
        return [f"{name}[lazy]: {name.upper()} {quoted(trigger)}", f"{name.upper()}: {ANY_TEXT}"]

    def _text(self, text: str, markers: Sequence[str] | None = None) -> str:
        """A text that must be written as it is; markers in it are special tokens where the tokenizer has them."""
        symbols: list[str] = []
        for part in split_markers(text, self._syntax.markers if markers is None else markers):
            special_id = self._special_ids.get(part)
            symbols.append(quoted(part) if special_id is None else f"<[{special_id}]>")
        return " ".join(symbols)


def object_rules(name: str, arguments: ArgumentsSchema) -> list[str]:
    """The rule of this name, for the arguments of a tool as an object.

    A schema whose objects have too many optional properties for llguidance raises InvalidArgument naming `tools` if the
    tool is strict; any other tool is then held to no schema.
    """
    schema: Schema = arguments.schema
    try:
        check_optional(schema, arguments.references, arguments.work.look)
    except InvalidArgument:
        if arguments.is_strict:
            raise
        schema = {"type": "object"}
    return [f"{name}: {json_symbol({**schema, 'x-guidance': arguments.options})}"]


def keyword_rules(name: str, arguments: ArgumentsSchema) -> list[str]:
    """Rules, of which the first has this name, for the arguments of a tool as keywords: in the order of the schema.

    A schema may say no more of its object than which properties it has. Of a tool that is not strict, any other one
    holds the arguments to nothing; of a strict one it raises InvalidArgument naming `tools`.
    """
    try:
        return property_rules(name, arguments)
    except InvalidArgument:
        if arguments.is_strict:
            raise
        return any_keywords(name)


def property_rules(name: str, arguments: ArgumentsSchema) -> list[str]:
    """The rules of `keyword_rules`. Raises InvalidArgument naming `tools` if there can be none for each argument."""
    schema = arguments.schema
    check_properties(schema, KEY)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not properties:
        if schema.get("additionalProperties") is False:
            return [f'{name}: ""']
        return any_keywords(name)
    keys, size, required = list(properties), RulesSize(), set(required)
    rules = [f"{name}: {name}_first_0"]
    for place, key in enumerate(keys):
        rules += size.checked([f"{name}_{place}: {arguments.json_of(properties[key])} {name}_next_{place + 1}"])
        # Where all are optional, any may be next. With a rule for the name too, llguidance could not follow so many.
        for state, before in (("first", ""), ("next", ", ")):
            left_out = "" if key in required else f" | {name}_{state}_{place + 1}"
            rules.append(f"{name}_{state}_{place}: {quoted(f'{before}{key}=')} {name}_{place}{left_out}")
    return [*rules, *(f'{name}_{state}_{len(keys)}: ""' for state in ("first", "next"))]


def any_keywords(name: str) -> list[str]:
    """Rules, of which the first has this name, for any arguments as keywords."""
    return [f'{name}: ({name}_any (", " {name}_any)*)?', f"{name}_any: {ANY_KEY} {json_symbol({})}"]


WRITERS = {"object": object_rules, "keywords": keyword_rules, "elements": element_rules}
"""Of the rules for arguments, by how they are written."""
