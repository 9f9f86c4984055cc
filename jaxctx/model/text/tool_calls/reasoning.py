"""Formats of a model's thoughts, and how the one of a model is found out."""

from dataclasses import dataclass

from jaxctx.model.text.tool_calls.harmony import ANSWERS, END, FINAL, RETURN, THOUGHTS, writes_channels
from jaxctx.model.text.tool_calls.parser import ReasoningParser


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts between two marks at the start of an answer."""

    name: str
    opening: str
    closing: str
    is_open: bool = False  # the opening mark is written by the chat template, not by the model
    answer_marks: tuple[str, str] | None = None  # around the answer behind thoughts, which are no part of it

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return self.opening, self.closing, *(self.answer_marks or ())

    def parser(self) -> ReasoningParser:
        """A parser for one output."""
        return ReasoningParser(self.opening, self.closing, is_open=self.is_open, answer_marks=self.answer_marks)


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("think_opened", "<think>", "</think>", is_open=True),
        ReasoningFormat("think_response", "<think>", "</think>", answer_marks=("<response>", "</response>")),
        ReasoningFormat("thought_process", "Here is my thought process:", "Here is my response:"),
        # The parser of the calls finds these thoughts too, as they may stand between texts and calls.
        ReasoningFormat("harmony", THOUGHTS, END, answer_marks=(ANSWERS + FINAL, RETURN)),
    )
}


def reasoning_format(chat_template_source: str | None, answer_opening: str | None) -> ReasoningFormat | None:
    """The format of a model with this chat template, which writes `answer_opening` before an answer.

    None if the template knows no thoughts.
    """
    if answer_opening is not None and answer_opening.rstrip().endswith("<think>"):
        return REASONING_FORMATS["think_opened"]
    source = chat_template_source or ""
    if writes_channels(source):  # gpt-oss
        return REASONING_FORMATS["harmony"]
    if "Here is my thought process:" in source:  # Granite 3.2
        return REASONING_FORMATS["thought_process"]
    if "</think>" in source:
        return REASONING_FORMATS["think_response" if "<response>" in source else "think"]  # Granite 3.3, and others
    return None
