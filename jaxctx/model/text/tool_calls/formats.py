"""The formats in which the supported families write calls of tools: one table, and how a model's format is found out.

| format | families | example |
|---|---|---|
| hermes | Qwen2, Qwen2.5, Qwen3, Granite 4, SmolLM 3 | <tool_call>{"name": "f", "arguments": {}}</tool_call> |
| llama3_json | Llama 3.x | {"name": "f", "parameters": {}} |
| mistral | Mistral up to tokenizer v7 | [TOOL_CALLS][{"name": "f", "arguments": {}}] |
| mistral_named | Mistral from tokenizer v11 | [TOOL_CALLS]f[ARGS]{} |
| granite | Granite 3 | <|tool_call|>[{"name": "f", "arguments": {}}] |
| phi4 | Phi-4 mini | <|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|> |
| functools | Phi-4 mini with a template that says so | functools[{"name": "f", "arguments": {}}] |
| olmo3 | OLMo 3 | <function_calls>f(a=1)</function_calls> |
| qwen3_coder | Qwen3-Coder | <tool_call><function=f><parameter=a>1</parameter></function></tool_call> |
| harmony | gpt-oss | <|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|> |
"""

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.arguments import Tool
from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.element_reader import FUNCTION, PARAMETER, ElementReader
from jaxctx.model.text.tool_calls.grammar import CallSyntax, calls_text, tool_call_grammar
from jaxctx.model.text.tool_calls.harmony import (
    ANSWERS,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    MARKS,
    MESSAGE,
    HarmonyParser,
    writes_channels,
)
from jaxctx.model.text.tool_calls.harmony_grammar import harmony_grammar, text_grammar
from jaxctx.model.text.tool_calls.parser import ToolCallParser
from jaxctx.model.text.tool_calls.readers import (
    NAME_LETTERS,
    ArgumentsReader,
    ClosedReader,
    ListReader,
    LlamaReader,
    ObjectReader,
    PythonReader,
    Reader,
    mistral_reader,
    objects_reader,
)
from jaxctx.model.text.tool_calls.reasoning import ReasoningFormat

ALPHANUMERIC = string.ascii_letters + string.digits
LONGEST_NAME = 128  # characters of a tool's; readers stop at twice as many
NAME_CLASS = f"[{re.escape(''.join(sorted(NAME_LETTERS)))}]"  # where a name stands in no JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How a family writes calls of tools."""

    name: str
    opening: str  # the mark before calls
    make_reader: Callable[[CallSink], Reader]
    syntax: CallSyntax  # for grammars
    is_bare: bool = False  # an object at the start of an output is a call without the mark
    call_id_length: int | None = None  # of ids: so many letters and digits, or the template refuses them
    result_role: str = "tool"  # of results, where the template leaves the role to who sends it
    name_letters: str = "."  # of tools that it can name: an expression of one character
    ends: tuple[str, ...] = ()  # tokens with which an output ends beside those that a model's files declare

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format that may be special tokens of a tokenizer."""
        return tuple(dict.fromkeys([self.opening, *self.syntax.markers]))

    def can_name(self, name: str) -> bool:
        """Whether a call of a tool of this name can be read."""
        return re.fullmatch(f"(?:{self.name_letters}){{1,{LONGEST_NAME}}}", name, re.DOTALL) is not None

    def parser(
        self,
        *,
        tool_names: Collection[str] | None = None,
        whole_calls: bool = False,
        schemas: Mapping[str, Schema] | None = None,
    ) -> ToolCallParser | HarmonyParser:
        """A parser for one output.

        `tool_names`: a call of another tool is text; None: any name is taken. `whole_calls`: give a call only once all
        of it is there, and one that breaks off as text; else its arguments come as they are written. `schemas`: of
        arguments, by the names of tools; where values are written without quotes they tell texts from numbers.
        """
        return ToolCallParser(
            self.opening,
            self.make_reader,
            is_bare=self.is_bare,
            bare_opening=self.syntax.bare_trigger,
            tool_names=tool_names,
            whole_calls=whole_calls,
            schemas=schemas,
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool,
        *,
        special_ids: Mapping[str, int] | None = None,
        reasoning: ReasoningFormat | None = None,
        text_schema: Schema | None = None,
        strict_only: bool = False,
    ) -> str:
        """A grammar, in the Lark dialect of llguidance, whose texts the parser reads as calls of these tools.

        Args:
            tools: {"type": "function", "function": {"name": ..., "parameters": ..., "strict": ...}} each.
            choice: "required" for any of them; the name of one; "auto" for text in which calls are free, but of these
                names, and of strict tools with their schema.
            parallel: Several calls may follow each other.
            special_ids: The `markers` that are special tokens of the tokenizer, with their ids.
            reasoning: Thoughts may stand before.
            text_schema: With "auto", a text in place of calls is JSON of this schema, and nothing stands before calls.
            strict_only: Only strict tools have their schema, also where calls are not free.

        What cannot be followed of the schema of a tool that is not strict is left out, as far as that is known here: no
        such tool keeps the others from being called.

        Raises InvalidArgument naming `tools` if there are none, or if the calls of this family cannot be held to the
        schema of a strict one; `tool_choice` if it names none of them.
        """
        return tool_call_grammar(
            self.syntax, tools, choice, parallel, special_ids or {}, reasoning, text_schema, strict_only
        )

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, names and arguments, as the model writes them."""
        return calls_text(self.syntax, calls)

    def new_call_id(self) -> str:
        """An id for a new call, in the form that the family's template takes."""
        if self.call_id_length is None:
            return "call_" + secrets.token_hex(12)
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.call_id_length))

    def template_call_id(self, call_id: str) -> str:
        """An id that a client sent, as the template takes it: as it is if it can be, else one that is made of it.

        Equal ids give equal ones, so that results stay with their calls.
        """
        length = self.call_id_length
        if length is None or (len(call_id) == length and all(letter in ALPHANUMERIC for letter in call_id)):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:length]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFormat(ToolCallFormat):
    """How gpt-oss writes calls: in messages, between which there are its thoughts and its texts."""

    def parser(
        self,
        *,
        tool_names: Collection[str] | None = None,
        whole_calls: bool = False,
        schemas: Mapping[str, Schema] | None = None,
        in_answer: bool = False,
    ) -> HarmonyParser:
        """A parser for a whole output, which gives its thoughts too. See `ToolCallFormat.parser`.

        `in_answer`: the output goes on with a text that stands in the prompt.
        """
        return HarmonyParser(
            self.make_reader, tool_names=tool_names, whole_calls=whole_calls, schemas=schemas, in_answer=in_answer
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool,
        *,
        special_ids: Mapping[str, int] | None = None,
        reasoning: ReasoningFormat | None = None,
        text_schema: Schema | None = None,
        strict_only: bool = False,
        in_answer: bool = False,
    ) -> str:
        """A grammar of whole outputs, in which thoughts may always stand before. See `ToolCallFormat.grammar`.

        `in_answer`: as in `parser`.
        """
        return harmony_grammar(
            self.syntax, tools, choice, parallel, special_ids or {}, text_schema, strict_only, in_answer
        )

    def text_grammar(self, symbol: str, special_ids: Mapping[str, int] | None = None) -> str:
        """A grammar of outputs whose text has the form of a symbol of this Lark dialect; thoughts may stand before."""
        return text_grammar(self.syntax, symbol, special_ids or {})


HERMES = ToolCallFormat(
    name="hermes",
    opening="<tool_call>",
    make_reader=lambda sink: ClosedReader(sink, ObjectReader(sink), "</tool_call>"),
    syntax=CallSyntax(
        markers=("<tool_call>", "</tool_call>"),
        trigger="<tool_call>",
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n</tool_call>",
        between="\n",
    ),
)
LLAMA3_JSON = ToolCallFormat(
    name="llama3_json",
    opening="<|python_tag|>",
    make_reader=LlamaReader,
    is_bare=True,
    syntax=CallSyntax(
        markers=(),
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        after_arguments="}",
        between="; ",
    ),
)
MISTRAL = ToolCallFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    make_reader=mistral_reader,
    call_id_length=9,
    syntax=CallSyntax(
        markers=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS]",
        opening_list="[",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        between=", ",
        closing="]",
    ),
)
MISTRAL_NAMED = ToolCallFormat(
    name="mistral_named",
    name_letters=NAME_CLASS,
    opening="[TOOL_CALLS]",
    make_reader=mistral_reader,
    call_id_length=9,
    syntax=CallSyntax(
        markers=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        before_name="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        name_is_json=False,
    ),
)
LIST_OF_CALLS = CallSyntax(
    markers=(),
    opening_list="[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    between=", ",
    closing="]",
)
GRANITE = ToolCallFormat(
    name="granite",
    opening="<|tool_call|>",
    make_reader=objects_reader,
    result_role="tool_response",
    syntax=replace(LIST_OF_CALLS, markers=("<|tool_call|>",), trigger="<|tool_call|>", opening="<|tool_call|>"),
)
PHI4 = ToolCallFormat(
    name="phi4",
    opening="<|tool_call|>",
    make_reader=lambda sink: ClosedReader(sink, objects_reader(sink), "<|/tool_call|>"),
    result_role="tool_response",
    syntax=replace(
        LIST_OF_CALLS,
        markers=("<|tool_call|>", "<|/tool_call|>"),
        trigger="<|tool_call|>",
        opening="<|tool_call|>",
        closing="]<|/tool_call|>",
    ),
)
FUNCTOOLS = ToolCallFormat(
    name="functools",
    opening="functools",
    make_reader=ListReader,
    syntax=replace(LIST_OF_CALLS, trigger="functools", opening="functools"),
)
OLMO3 = ToolCallFormat(
    name="olmo3",
    name_letters=NAME_CLASS,
    opening="<function_calls>",
    make_reader=PythonReader,
    syntax=CallSyntax(
        markers=("<function_calls>", "</function_calls>"),
        trigger="<function_calls>",
        opening="<function_calls>",
        before_name="",
        before_arguments="(",
        after_arguments=")",
        between="\n",
        closing="</function_calls>",
        name_is_json=False,
        arguments="keywords",
    ),
)
QWEN3_CODER = ToolCallFormat(
    name="qwen3_coder",
    name_letters=r"[^<>\n]",
    opening="<tool_call>",
    make_reader=lambda sink: ClosedReader(sink, ElementReader(sink), "</tool_call>"),
    syntax=CallSyntax(
        markers=("<tool_call>", "</tool_call>"),
        trigger="<tool_call>",
        bare_trigger=FUNCTION,
        before_name=f"<tool_call>\n{FUNCTION}",
        before_arguments=">\n",
        after_arguments="</function>\n</tool_call>",
        between="\n",
        name_is_json=False,
        arguments="elements",
    ),
)
HARMONY = HarmonyFormat(
    name="harmony",
    name_letters=r"[^\s<]",
    opening=CHANNEL,
    make_reader=ArgumentsReader,
    syntax=CallSyntax(
        markers=MARKS,
        before_name=f"{CHANNEL}commentary to={FUNCTIONS}",
        before_arguments=f" {CONSTRAIN}json{MESSAGE}",
        between=END + ANSWERS,  # a turn ends with <|call|>
        name_is_json=False,
    ),
    ends=("<|call|>", "<|return|>"),  # of which config.json has one
)
TOOL_CALL_FORMATS = {
    each.name: each
    for each in (HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_NAMED, GRANITE, PHI4, FUNCTOOLS, OLMO3, QWEN3_CODER, HARMONY)
}
FAMILY_FORMATS: Mapping[str, ToolCallFormat] = {
    "LlamaForCausalLM": LLAMA3_JSON,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": HERMES,
    "Qwen2MoeForCausalLM": HERMES,
    "Qwen3ForCausalLM": HERMES,
    "Qwen3MoeForCausalLM": HERMES,
    "SmolLM3ForCausalLM": HERMES,
}
"""Of families whose template need not tell. Others were trained on no calls (Gemma, OLMo 2), or only some of their
models were, whose templates tell: Granite, Phi, OLMo 3."""
MARKED_FORMATS = {
    "functools[": FUNCTOOLS,
    "<function_calls>": OLMO3,
    "<|/tool_call|>": PHI4,
    "<|tool|>": PHI4,
    "<|tool_call|>": GRANITE,
}
"""By what a template has in its text; the first that is there counts."""
# Templates with one of these write calls as none of the formats here.
OTHER_FORMATS = ("<function=", "<｜tool▁calls▁begin｜>")


def tool_call_format(chat_template_source: str | None, family: str | None) -> ToolCallFormat | None:
    """The format of a model: by what its chat template writes, else by its family (`architectures[0]`).

    None if neither says it, or the template writes calls in a format that is not supported.
    """
    source = chat_template_source or ""
    if writes_channels(source):
        return HARMONY
    if all(mark in source for mark in ("<tool_call>", FUNCTION, PARAMETER)):
        return QWEN3_CODER
    if any(mark in source for mark in OTHER_FORMATS):
        return None
    if "[TOOL_CALLS]" in source:
        return MISTRAL_NAMED if "[ARGS]" in source else MISTRAL
    for mark, found in MARKED_FORMATS.items():
        if mark in source:
            return found
    if "<tool_call>" in source:
        return HERMES
    if "<|start_of_role|>" in source:
        return GRANITE
    if "<|python_tag|>" in source or "<|start_header_id|>" in source:
        return LLAMA3_JSON
    return FAMILY_FORMATS.get(family or "")
