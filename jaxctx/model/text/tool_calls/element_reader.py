"""Calls whose arguments are elements: a name and a text for each, without quotes.

    <function=f>
    <parameter=city>
    Bonn
    </parameter>
    </function>

Whether 5 is a number or a text, the schema of the tool says.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.call_sink import CallSink
from jaxctx.model.text.tool_calls.json_scanner import Malformed
from jaxctx.model.text.tool_calls.keyword_arguments import python_value

FUNCTION, PARAMETER = "<function=", "<parameter="
END_OF_VALUE, END_OF_CALL = "</parameter>", "</function>"
MAX_NAME = 256  # characters, of the function and of an argument
MAX_REFERENCES = 16  # of schemas to each other, one behind the other or within each other
BLANKS = " \t\r\n"
JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


class ElementReader:
    """Reads one call up to </function>. It becomes events once all of it is there."""

    def __init__(self, sink: CallSink) -> None:
        self.done = False
        self._sink = sink
        self._state = "function"
        self._written = ""  # of a mark or a name
        self._name = self._key = ""
        self._arguments: dict[str, Any] = {}
        self._value: list[str] = []
        self._tail = ""  # its last characters, which may begin END_OF_VALUE

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done:
            if self._state == "value":
                at = self._read_value(text, at)
                continue
            letter = text[at]
            if self._state in ("name", "key"):
                self._read_name(letter, at)
            elif self._written or letter not in BLANKS:
                self._read_mark(letter, at)
            if not self.done:
                self._sink.structure(letter)
            at += 1
        return at

    def _read_mark(self, letter: str, at: int) -> None:
        """A character of what stands before a name, or ends the call."""
        marks = (FUNCTION,) if self._state == "function" else (PARAMETER, END_OF_CALL)
        written = self._written + letter
        if not any(mark.startswith(written) for mark in marks):
            raise Malformed(at)
        self._written = written
        if written not in marks:
            return
        self._written = ""
        if written == END_OF_CALL:
            self._end_call(at)
        elif written == FUNCTION:
            self._sink.open_call()
            self._state = "name"
        else:
            self._state = "key"

    def _read_name(self, letter: str, at: int) -> None:
        if letter != ">":
            if letter in "<\n" or len(self._written) == MAX_NAME:
                raise Malformed(at)
            self._written += letter
            return
        written, self._written = self._written, ""
        if not written or (self._state == "name" and not self._sink.accepts(written)):
            raise Malformed(at)
        if self._state == "name":
            self._name, self._state = written, "between"
        else:
            self._key, self._state = written, "value"
            self._value, self._tail = [], ""

    def _read_value(self, text: str, at: int) -> int:
        window = self._tail + text[at:]
        found = window.find(END_OF_VALUE)
        if found < 0:
            self._take(text[at:])
            self._tail = window[1 - len(END_OF_VALUE) :]
            return len(text)
        end = at + found + len(END_OF_VALUE) - len(self._tail)
        self._take(text[at:end])
        value = "".join(self._value)[: -len(END_OF_VALUE)]
        value = value.removeprefix("\n").removesuffix("\n")
        schema = self._sink.schema(self._name)
        properties = schema.get("properties")
        of_key = properties.get(self._key) if isinstance(properties, dict) else None
        self._arguments[self._key] = argument_value(value, of_key, schema)
        self._state = "between"
        return end

    def _take(self, text: str) -> None:
        self._value.append(text)
        self._sink.structure(text)

    def _end_call(self, at: int) -> None:
        try:
            arguments = json.dumps(self._arguments, ensure_ascii=False)
        except ValueError:  # a number beyond what Python writes
            raise Malformed(at) from None
        self._sink.structure(">")
        self._sink.name(self._name)
        self._sink.arguments(arguments)
        self._sink.end_call()
        self.done = True


def argument_value(written: str, schema: Any, root: Schema) -> Any:
    """What a text means as a value of this schema, which is a part of `root`; None: there is none.

    A text that is no value of another type stays one, so that who called can say what is wrong with it.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return written
    try:
        value = python_value(written)
    except Malformed:
        return written
    if types is None:
        return value
    if "string" not in types:
        return value
    return value if JSON_TYPES[type(value)] in types & {"object", "array", "null"} else written


def without_reference(schema: Any, root: Schema) -> dict[str, Any]:
    """The schema that this one refers to, within `root`, with what stands beside the reference. Empty: any value."""
    beside: dict[str, Any] = {}
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return {**schema, **beside} if isinstance(schema, dict) else {}
        beside = {key: value for key, value in schema.items() if key != "$ref"} | beside
        schema = _referred(schema["$ref"], root)
    return {}


def types_of(schema: Any, root: Schema, depth: int = 0) -> set[str] | None:
    """The types of JSON that a schema allows; None: not known, or any."""
    schema = without_reference(schema, root)
    if depth > MAX_REFERENCES:
        return None
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {each for each in types if isinstance(each, str)}
    if "const" in schema:
        return {JSON_TYPES[type(schema["const"])]}
    if isinstance(schema.get("enum"), list):
        return {JSON_TYPES[type(each)] for each in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found: set[str] = set()
            for each in schema[key]:
                one = types_of(each, root, depth + 1)
                if one is None:
                    return None
                found |= one
            return found
    return None


def _referred(reference: str, root: Schema) -> Any:
    """The schema that `#/…` names within `root`; None if it is not there."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found.get(part) if isinstance(found, dict) else None
    return found
