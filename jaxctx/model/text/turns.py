"""Turns: messages behind the tokens of a context, so that a conversation that is built turn by turn has the tokens that
the template writes over all of it.

A model ends its answer with a token ("<|im_end|>"), or its output ends before that; the template writes an end of its
own ("<|im_end|>\n"). What of it is not there yet goes first. Whether the context ends in an answer of the assistant is
read from it: what opens one ("<|im_start|>assistant") was written, and no end is behind that but at the end.

    … opening answer                   the whole end, and the next turns
    … opening answer <|im_end|>        the rest of the end, and the next turns
    … opening answer <|im_end|> \n     the next turns
    … opening answer <|im_end|> \n …   the next turns: whatever it is, it is no answer
    … opening answer <|call|>          the next turns: another end of the model's (gpt-oss)
    … opening                          the whole end, as of an empty answer; or the answer, if that comes next
    …                                  the next turns

Tokens of a context are never taken back. So what a template writes otherwise once more follows, or other tokens than a
tokenizer's for the same text, stay as they were drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.model.text.chat import NO_OPTIONS, AnswerFrame, ChatTemplate, Message, TemplateOptions
from jaxctx.model.text.tokenizer import Tokenizer
from jaxctx.model.text.tool_calls.harmony import FUNCTIONS, MAX_HEADER, NoHeader, read_header

NEAR = 1024  # tokens at the end of a context, where most answers begin


@dataclass(frozen=True, slots=True)
class Continuation:
    """What goes behind a context."""

    end: str  # of the turn before, as far as it is missing
    text: str  # of the messages
    anchor: str  # text of the context's last tokens, without which some tokenizers would cut `end` and `text` otherwise
    is_anew: bool  # `text` begins a conversation again: the template cannot write a next turn


def continuation(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Message],
    *,
    asks: bool,
    options: TemplateOptions = NO_OPTIONS,
) -> Continuation:
    """Messages behind the tokens of a context, of which there are some; `asks` opens an answer behind them.

    Raises InvalidArgument naming `messages` if the template refuses them.
    """
    frame, is_anew = template.frame, False
    answer = None if frame is None else _last_answer(frame, tokenizer, before)
    if template.writes_channels and answer is not None:
        messages = _with_name(messages, answer)
    text = template.render_next(messages, add_generation_prompt=asks, options=options)
    if text is None:
        text, is_anew = template.render(messages, add_generation_prompt=asks, options=options), True
    if frame is None or answer is None:
        return Continuation("", text, "", is_anew)
    if not answer.strip():  # nothing was said yet
        _, opening, rest = text.partition(frame.opening)
        if messages[0]["role"] == "assistant" and not is_anew and text.startswith(frame.opening):
            # The answer itself, of which the opening is there already, with as much of the space behind it.
            return Continuation("", rest[len(answer) :] if rest.startswith(answer) else rest, opening + answer, False)
        if not frame.is_header:
            return Continuation("", text, frame.opening + answer, is_anew)
        return Continuation(frame.end, text, "", is_anew)
    present = _end_present(frame, tokenizer, before)
    if present is not None:
        return Continuation(frame.end.removeprefix(present), text, present, is_anew)
    for end in frame.other_ends:
        ids = tokenizer.encode(end, add_special_tokens=False)
        if ids and list(before[-len(ids) :]) == ids:
            return Continuation("", text, end, is_anew)
    is_closed = frame.end.strip() != "" and frame.end.strip() in answer
    return Continuation("" if is_closed else frame.end, text, "", is_anew)


def _with_name(messages: Sequence[Message], answer: str) -> Sequence[Message]:
    """The messages; the first one, if it is a result, with the name of the tool that the answer before it called."""
    first, *more = messages
    if first["role"] != "tool" or "name" in first:
        return messages
    try:
        header = read_header(answer.strip()[:MAX_HEADER])
    except NoHeader:
        return messages
    recipient = None if header is None else header.recipient
    if recipient is None or not recipient.startswith(FUNCTIONS):
        return messages
    return [{**first, "name": recipient.removeprefix(FUNCTIONS)}, *more]


def encode_behind(tokenizer: Tokenizer, before: Sequence[int], anchor: str, text: str) -> list[int]:
    """Tokens of a text as they are behind `anchor`, if the context ends with the tokens of that."""
    ids = tokenizer.encode(anchor, add_special_tokens=False) if anchor else []
    if ids and list(before[-len(ids) :]) == ids:
        both = tokenizer.encode(anchor + text, add_special_tokens=False)
        if both[: len(ids)] == ids:
            return both[len(ids) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _last_answer(frame: AnswerFrame, tokenizer: Tokenizer, before: Sequence[int]) -> str | None:
    """Everything behind the last opening of an answer; None if there is none."""
    for tail in (before[-NEAR:], before):
        _, found, answer = tokenizer.decode(tail, skip_special_tokens=False).rpartition(frame.opening)
        if found:
            return answer
    return None


def _end_present(frame: AnswerFrame, tokenizer: Tokenizer, before: Sequence[int]) -> str | None:
    """With what of an answer's end the context ends, by tokens: an answer that ends with "<" has none of "<|im_end|>".

    None if with nothing of it.
    """
    end = tokenizer.encode(frame.end, add_special_tokens=False) if frame.end else []
    for count in range(min(len(end), len(before)), 0, -1):
        if list(before[-count:]) == end[:count]:
            present = frame.end if count == len(end) else tokenizer.decode(end[:count], skip_special_tokens=False)
            return present if frame.end.startswith(present) else None
    return None
