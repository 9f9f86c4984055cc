"""Grammars of outputs in messages with channels, as `harmony` reads them.

    start: thoughts? calls                               a call is required
    start: thoughts? (text | calls)                      a text is of a form that is asked for
    start: (thoughts | preamble)* (last | calls)         calls are free, but each is as it must be

In an answer that goes on, its text ends first, where anything else follows.
"""

import re
from collections.abc import Mapping, Sequence

from jaxctx.model.text.json_schemas import Schema
from jaxctx.model.text.tool_calls.arguments import Tool
from jaxctx.model.text.tool_calls.grammar import CallSyntax, GrammarWriter, chosen_tools
from jaxctx.model.text.tool_calls.harmony import (
    ANSWERS,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    THOUGHTS,
)
from jaxctx.model.text.tool_calls.symbols import ANY_TEXT, json_symbol, quoted, sequence

PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
SLASH = re.compile(r"\\.|/", re.DOTALL)  # or an escape, which stays


class HarmonyWriter(GrammarWriter):
    """Writes the rules of one grammar, in which a call has any of the headers that models write."""

    def _call(self, head: str, place: int, tool: Tool) -> str:
        name = quoted(self._name(tool))
        behind = sequence(self._text(head), name)
        before = sequence(quoted(f" to={FUNCTIONS}"), name, self._text(f"{CHANNEL}commentary"))
        kind = f'(" "? {self._text(CONSTRAIN)} "json" | " json")?'
        return sequence(f"({behind} | {before})", kind, self._text(MESSAGE), f"arguments_{place}")

    def next_message(self) -> str:
        """What stands between two messages."""
        return self._text(END + ANSWERS)

    def messages(self) -> list[str]:
        """Rules for `thoughts` and `preamble`, each with what stands between it and the next message."""
        if END in self._special_ids:
            closed = [f"closed: {ANY_TEXT} {self.next_message()}"]
        else:
            closed = [f"closed[lazy]: CLOSED {quoted(END + ANSWERS)}", f"CLOSED: {ANY_TEXT}"]
        return [
            f"thoughts: {self._text(THOUGHTS)} closed",
            f"preamble: {self._text(PREAMBLE)} closed",
            *closed,
        ]

    def texts(self, *, with_preamble: bool) -> list[str]:
        """The rule for `last`: any text at the end."""
        heads = [self._text(FINAL), *([self._text(PREAMBLE)] if with_preamble else [])]
        return [f"last: ({' | '.join(heads)}) {ANY_TEXT}"]

    def final(self, symbol: str) -> list[str]:
        """The rules for `final`: a text of this form."""
        return [f"final: {self._text(FINAL)} form", f"form: {symbol}"]


def harmony_grammar(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    choice: str,
    parallel: bool,
    special_ids: Mapping[str, int],
    text_schema: Schema | None = None,
    strict_only: bool = False,
    in_answer: bool = False,
) -> str:
    """See `HarmonyFormat.grammar`."""
    is_free = choice == "auto"
    writer = HarmonyWriter(syntax, special_ids, strict_only=strict_only or is_free)
    rules = [
        *writer.rules(chosen_tools(tools, choice), is_free=False, parallel=parallel),  # `answer`: calls
        *writer.messages(),
    ]
    ended = writer.next_message() if in_answer else ""
    if not is_free:
        return "\n".join([f"start: {sequence(ended, 'thoughts?', 'answer')}", *rules])
    if text_schema is not None:
        rules += writer.final(json_symbol(text_schema))
        calls = sequence(ended, "thoughts?", "answer")
        text = "form" if in_answer else "thoughts? final"
        return "\n".join([f"start: {text} | {calls}", *rules])
    rules += writer.texts(with_preamble=True)
    messages = "(thoughts | preamble)* (last | answer)"
    start = f"{ANY_TEXT} | closed {messages}" if in_answer else messages
    return "\n".join([f"start: {start}", *rules])


def text_grammar(syntax: CallSyntax, symbol: str, special_ids: Mapping[str, int]) -> str:
    """See `HarmonyFormat.text_grammar`."""
    writer = HarmonyWriter(syntax, special_ids)
    return "\n".join(["start: thoughts? final", *writer.messages(), *writer.final(symbol)])


def regex_symbol(regex: str) -> str:
    """A regular expression as a symbol."""
    return "/" + SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], regex) + "/"


def choices_symbol(texts: Sequence[str]) -> str:
    """One of these texts, as a symbol."""
    return " | ".join(map(quoted, texts))


def lark_symbol(grammar: str) -> str:
    """A text of another grammar, as a symbol."""
    return f"%lark {{\n{grammar}\n}}"
