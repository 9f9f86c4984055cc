"""What an obedient assistant writes: it calls the tools that it is offered, with what the question says, and then tells
their results.

It stands in for a model that understands language, in tests of clients that need one. All it knows is the prompt, as
the chat template wrote it (`templates.QWEN25_TOOLS`), and what it has written so far; neither the request nor the test.

| the last turn, and more | it writes |
|---|---|
| results of tools | them, in words |
| a question, and there are tools | a call of each tool that the question names, else of the first one |
| a question for JSON, by a schema or the names of keys | that JSON |
| another question | that it has heard it |

A grammar may want something else: a call of another tool, or JSON of which nothing stands in the prompt. Then it goes
on with the answer that fits what is written, or with what ends JSON soonest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxctx.engine.factory import ServedModel
from jaxctx.model.text import ModelText
from jaxctx.model.text.tool_calls import TOOL_CALL_FORMATS
from tests.scripted_model import scripted_model
from tests.templates import IM_END, QWEN, QWEN25_TOOLS, byte_level

Json = dict[str, Any]
START = "<|im_start|>"
OPENING = START + "assistant\n"
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
TOOLS = re.compile(r"<tools>\n(.*)\n</tools>", re.DOTALL)
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
QUOTED = re.compile(r"""(?<!\w)['"`](.+?)['"`](?!\w)""")
NAME = re.compile(r"(?<=[\w,(] )[A-Z]\w*(?:,? [A-Z]\w*)*|(?<=\()[A-Z]\w*(?:,? [A-Z]\w*)*")  # but the first word
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')  # that begins or ends a text in JSON
DEPTH = 8  # of objects inside each other that it fills


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as the assistant reads it."""

    system: str
    tools: Sequence[Json]  # {"name": ..., "parameters": ...} each
    question: str
    calls: Sequence[Json]  # since the question
    results: Sequence[str]  # of those, as long as nothing was said about them
    written: str  # of the answer


def read_chat(text: str) -> Chat:
    """What stands in a prompt, and behind it."""
    prompt, _, written = text.rpartition(OPENING)
    system, question = "", ""
    calls: list[Json] = []
    results: list[str] = []
    for role, content in TURN.findall(prompt):
        found = RESULT.findall(content)
        if role == "system":
            system += content
        elif role == "assistant":
            calls += [json.loads(call) for call in CALL.findall(content)]
            results = []
        elif found:
            results += found
        else:
            question, calls, results = content, [], []
    offered = TOOLS.search(system)
    tools = [json.loads(line)["function"] for line in offered[1].split("\n")] if offered is not None else []
    return Chat(system, tools, question, calls, results, written)


def obey(text: str) -> Sequence[str]:
    """The `Writer`: what may follow this text, the wanted first."""
    chat = read_chat(text)
    following = [answer.removeprefix(chat.written) for answer in answers(chat) if answer.startswith(chat.written)]
    return [*following, *soonest_end_of_json(chat)]


def answers(chat: Chat) -> Iterator[str]:
    """Whole answers, the wanted one first; behind it others that a grammar may want."""
    if chat.results:
        yield f"The result is: {'; '.join(chat.results)}"
        yield "{"  # a grammar that wants JSON gets it, rather than the same call again
    elif chat.tools:
        named = [tool for tool in chat.tools if re.search(rf"\b{re.escape(tool['name'])}\b", chat.question)]
        yield "\n".join(call(tool, chat.question) for tool in named or chat.tools[:1])
    elif (asked_for := json_asked_for(chat)) is not None:
        yield json.dumps(asked_for, ensure_ascii=False)
    else:
        yield f"I hear you: {chat.question}"
    called = [each["name"] for each in chat.calls]
    for tool in sorted(chat.tools, key=lambda tool: called.count(tool["name"])):  # what was not called yet
        yield call(tool, chat.question)


def call(tool: Json, question: str) -> str:
    """A call of a tool with what a question says."""
    arguments = Speaker(question, {"type": "object", **tool.get("parameters", {})}).value()
    written = json.dumps({"name": tool["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def json_asked_for(chat: Chat) -> Any:
    """The value that a prompt asks for: of the schema in it, or with keys that it names. None if it asks for none."""
    schema = schema_in(chat.question) or schema_in(chat.system)
    if schema is None and "JSON" in chat.question and "keys" in chat.question:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in QUOTED.findall(chat.question)}}
    return None if schema is None else Speaker(chat.question, schema).value()


def schema_in(text: str) -> Json | None:
    """The first JSON schema of an object in a text."""
    for found in re.finditer("{", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        if isinstance(value.get("properties"), dict):
            return dict(value)
    return None


class Speaker:
    """Makes JSON of a schema out of a question: its numbers and phrases, each in its turn."""

    def __init__(self, question: str, schema: Json) -> None:
        self._question, self._schema = question, schema
        self._numbers = NUMBER.findall(question)
        self._phrases = [*QUOTED.findall(question), *NAME.findall(QUOTED.sub("", question))]

    def value(self) -> Any:
        """A value of the schema, which has all properties that are required, or all where none is."""
        return self._value(self._schema, DEPTH)

    def _value(self, schema: Any, depth: int) -> Any:
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return next((each for each in schema["enum"] if str(each) in self._question), schema["enum"][0])
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                properties = schema.get("properties", {})
                names = [name for name in properties if name in schema.get("required", properties)] if depth else []
                return {name: self._value(properties[name], depth - 1) for name in names}
            case "array":
                return [self._value(schema.get("items", {}), depth - 1)] if depth else []
            case "integer":
                return int(float(self._number(schema)))
            case "number":
                return float(self._number(schema))
            case "boolean":
                return True
            case "null":
                return None
        return self._phrase()[: schema.get("maxLength")]

    def _resolved(self, schema: Any) -> Json:
        """A schema behind references, the first of several that may hold."""
        for _ in range(DEPTH):
            if not isinstance(schema, Mapping):
                return {}
            if "$ref" in schema:
                target: Any = self._schema
                for key in schema["$ref"].removeprefix("#/").split("/"):
                    target = target[key]
                schema = target
            elif choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
                schema = choices[0]
            else:
                break
        return dict(schema)

    def _number(self, schema: Json) -> Any:
        least = schema.get("minimum", schema.get("default", 0))
        return self._numbers.pop(0) if self._numbers else least

    def _phrase(self) -> str:
        return self._phrases.pop(0) if self._phrases else self._question


def soonest_end_of_json(chat: Chat) -> Sequence[str]:
    """What may follow in JSON that a grammar asks for, what ends it soonest first."""
    json_so_far = chat.written[chat.written.find("{") :] if "{" in chat.written else chat.written
    quotes = [found.end() for found in QUOTE.finditer(json_so_far)]
    speaker = Speaker(chat.question, {"type": "string"})
    if len(quotes) % 2 == 0:
        number = Speaker(chat.question, {"type": "integer"}).value()
        return ["", "}", "]", ",", " ", ":", '"', str(number), "true", "null", *"1023456789-", "[", "{"]
    if quotes[-1] == len(json_so_far):
        return [json.dumps(speaker.value(), ensure_ascii=False)[1:], "a", "1", '"']
    return ['"', "a", "1"]


def obedient_text() -> ModelText:
    """Its tokens are bytes, and special ones."""
    text = byte_level(QWEN25_TOOLS, QWEN, eos=IM_END)
    return replace(text, tool_call_format=TOOL_CALL_FORMATS["hermes"])


def obedient_model() -> ServedModel:
    """The whole of it, as the engine takes it."""
    return scripted_model(obedient_text(), obey, "obedient")
