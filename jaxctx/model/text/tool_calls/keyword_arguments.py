"""Arguments of a call that is written as in Python, as the JSON object that they mean: city="Bonn", days=[1, 2].

Values are those of JSON, or what Python writes for them: texts in either quotes, True, False and None. Anything else,
also an argument without a name, is no call.
"""

import ast
import json
import math
import re
import warnings
from typing import Any, NoReturn

from jaxctx.model.text.tool_calls.json_scanner import BLANK, MAX_DEPTH, MAX_NUMBER, Malformed

KEY = re.compile(r"[^\s=()\[\]{},:'\"]{1,256}")
NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
TEXT = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)
WORD = re.compile(r"[A-Za-z]{1,8}")
CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def keyword_arguments(text: str) -> str:
    """The arguments that stand between the parentheses of a call, as a JSON object. Raises Malformed."""
    reader = _Reader(text)
    values = reader.keywords()
    try:
        return json.dumps(values, ensure_ascii=False)
    except ValueError as error:  # a number beyond what Python writes
        raise Malformed(len(text)) from error


def python_value(text: str) -> Any:
    """The one value that stands in the text, as JSON or as Python writes it. Raises Malformed for anything else."""
    reader = _Reader(text)
    return reader.only_value()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._go(0)

    def keywords(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._at < len(self._text):
            key = self._take(KEY)
            if key in found or not self._skip("="):
                self._fail()
            found[key] = self._value(0)
            if self._at < len(self._text) and not self._skip(","):
                self._fail()
        return found

    def only_value(self) -> Any:
        found = self._value(0)
        if self._at < len(self._text):
            self._fail()
        return found

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._fail()
        letter = self._text[self._at : self._at + 1]
        if letter in ('"', "'") and letter:
            return self._string(self._take(TEXT))
        if self._skip("["):
            return self._list(depth)
        if self._skip("{"):
            return self._object(depth)
        if NUMBER.match(self._text, self._at):
            return self._number(self._take(NUMBER))
        word = self._take(WORD)
        if word not in CONSTANTS:
            self._fail()
        return CONSTANTS[word]

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._skip("]"):
            found.append(self._value(depth + 1))
            if not self._skip(",") and not self._is_next("]"):
                self._fail()
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._skip("}"):
            key = self._string(self._take(TEXT))
            if not self._skip(":"):
                self._fail()
            found[key] = self._value(depth + 1)
            if not self._skip(",") and not self._is_next("}"):
                self._fail()
        return found

    def _string(self, written: str) -> str:
        """A text with JSON's escapes or, if it has others, Python's."""
        if written.startswith('"'):
            try:
                return self._whole(str(json.loads(written, strict=False)))
            except ValueError:
                pass
        one_line = written.replace("\r", "\\r").replace("\n", "\\n")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes that Python does not know, which stay as they are
                text = str(ast.literal_eval(one_line))
        except (ValueError, SyntaxError, MemoryError) as error:
            raise Malformed(self._at) from error
        # JSON writes a character beyond 16 bits as two, which Python does not put together.
        return self._whole(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass"))

    def _whole(self, text: str) -> str:
        """The text, if UTF-8 can hold it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Malformed(self._at) from error
        return text

    def _number(self, written: str) -> int | float:
        if len(written) > MAX_NUMBER:
            self._fail()
        if written.lstrip("+-").isdigit():
            return int(written)
        value = float(written)
        if not math.isfinite(value):
            self._fail()
        return value

    def _take(self, pattern: re.Pattern[str]) -> str:
        """What the pattern matches, without the space behind it."""
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail()
        self._go(found.end())
        return found.group()

    def _skip(self, mark: str) -> bool:
        """Whether the mark comes next; it is read, and the space behind it."""
        if not self._is_next(mark):
            return False
        self._go(self._at + len(mark))
        return True

    def _is_next(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _go(self, at: int) -> None:
        """Go on at this position, behind the space there."""
        found = BLANK.match(self._text, at)
        self._at = at if found is None else found.end()

    def _fail(self) -> NoReturn:
        raise Malformed(self._at)
