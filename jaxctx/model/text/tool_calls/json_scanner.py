"""JSON as it streams: where a value ends, and where a text stops being JSON. Each character is looked at once."""

import re

MAX_DEPTH = 64  # objects and lists inside each other; messages with calls may have no more (the server's chat_input)
SPACES = " \t\n\r"
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
BLANK = re.compile(r"[ \t\n\r]*")
NUMERIC = re.compile(r"[-+.0-9eE]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
MAX_NUMBER = 400  # characters
LITERALS = {"t": "true", "f": "false", "n": "null"}
HEX = frozenset("0123456789abcdefABCDEF")


class Malformed(ValueError):
    """A text is not what it should be, from the character at `position` on."""

    def __init__(self, position: int) -> None:
        super().__init__(f"malformed at character {position}")
        self.position = position


class JsonScanner:
    """Scans one value of JSON that comes in pieces. Space before the value is not part of it.

                ┌──────── , ────────┐
    [ ─▶ item_or_end ─▶ item ─▶ after ─▶ ]
    { ─▶ key_or_end ─▶ colon ─▶ item ─▶ after ─▶ }
          key ◀─────────── , ───────────┘
    """

    def __init__(self) -> None:
        self.done = False
        self._state = "item"
        self._open: list[str] = []  # "{" and "[" that are not closed
        self._is_key = False  # whether the string that is read is a key
        self._rest = ""  # of a literal: what is still to come; of a number: what there was
        self._digits = 0  # of a \u escape, still to come

    @property
    def is_in_string(self) -> bool:
        """Whether the text ends within a string."""
        return self._state in ("string", "escape", "unicode")

    def feed(self, text: str, start: int) -> int:
        """Take text from `start` on. Returns the position behind what belongs to the value.

        A number at the top ends where something else follows. Raises Malformed.
        """
        at, end = start, len(text)
        while at < end and not self.done:
            match self._state:
                case "string":
                    at = self._string(text, at)
                case "escape" | "unicode":
                    at = self._escape(text, at)
                case "number":
                    at = self._number(text, at)
                case "literal":
                    at = self._literal(text, at)
                case _:
                    at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        at = _end(PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = "escape"
        elif text[at] != '"':
            raise Malformed(at)
        elif self._is_key:
            self._state = "colon"
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        letter = text[at]
        if self._state == "unicode":
            if letter not in HEX:
                raise Malformed(at)
            self._digits -= 1
            self._state = "unicode" if self._digits else "string"
        elif letter == "u":
            self._state, self._digits = "unicode", 4
        elif letter in '"\\/bfnrt':
            self._state = "string"
        else:
            raise Malformed(at)
        return at + 1

    def _number(self, text: str, at: int) -> int:
        end = _end(NUMERIC, text, at)
        self._rest += text[at : min(end, at + MAX_NUMBER + 1)]
        if len(self._rest) > MAX_NUMBER:
            raise Malformed(at)
        if end < len(text):
            if NUMBER.fullmatch(self._rest) is None:
                raise Malformed(end)
            self._end_value()
        return end

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._rest[0]:
            raise Malformed(at)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        """A character between values, or the first one of a value."""
        at = _end(BLANK, text, at)
        if at == len(text):
            return at
        letter, state = text[at], self._state
        if self._closes(letter):
            self._close()
        elif letter == "," and state == "after":
            self._state = "key" if self._open[-1] == "{" else "item"
        elif letter == '"' and state in ("key_or_end", "key"):
            self._state, self._is_key = "string", True
        elif letter == ":" and state == "colon":
            self._state = "item"
        elif state in ("item", "item_or_end"):
            self._begin_value(letter, at)
        else:
            raise Malformed(at)
        return at + 1

    def _closes(self, letter: str) -> bool:
        """Whether a character ends the innermost object or list."""
        if letter == "}":
            return self._state in ("key_or_end", "after") and self._open[-1] == "{"
        return letter == "]" and self._state in ("item_or_end", "after") and self._open[-1] == "["

    def _begin_value(self, letter: str, at: int) -> None:
        if letter in "{[":
            if len(self._open) == MAX_DEPTH:
                raise Malformed(at)
            self._open.append(letter)
            self._state = "key_or_end" if letter == "{" else "item_or_end"
        elif letter == '"':
            self._state, self._is_key = "string", False
        elif letter in LITERALS:
            self._state, self._rest = "literal", LITERALS[letter][1:]
        elif letter == "-" or letter in "0123456789":
            self._state, self._rest = "number", letter
        else:
            raise Malformed(at)

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._state = "after"
        self.done = not self._open


def is_json(text: str) -> bool:
    """Whether the text is one value of JSON, with space around it or none."""
    scanner, ended = JsonScanner(), text + " "  # without which a number may go on
    try:
        end = scanner.feed(ended, 0)
    except Malformed:
        return False
    return scanner.done and not ended[end:].strip(SPACES)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the run of such characters ends; a pattern that matches nothing too."""
    found = pattern.match(text, at)
    return at if found is None else found.end()
