"""Formats of a model's thoughts, and how the one of a model is found out."""

from dataclasses import dataclass

from jaxctx.model.text.tool_calls.parser import ReasoningParser


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Thoughts between two marks at the start of an answer."""

    name: str
    opening: str
    closing: str
    is_open: bool  # the opening mark is written by the chat template, not by the model

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return self.opening, self.closing

    def parser(self) -> ReasoningParser:
        """A parser for one output."""
        return ReasoningParser(self.opening, self.closing, is_open=self.is_open)


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>", is_open=False),
        ReasoningFormat("think_opened", "<think>", "</think>", is_open=True),
    )
}


def reasoning_format(chat_template_source: str | None, answer_opening: str | None) -> ReasoningFormat | None:
    """The format of a model with this chat template, which writes `answer_opening` before an answer.

    None if the template knows no thoughts.
    """
    if answer_opening is not None and answer_opening.rstrip().endswith("<think>"):
        return REASONING_FORMATS["think_opened"]
    if chat_template_source is not None and "</think>" in chat_template_source:
        return REASONING_FORMATS["think"]
    return None
