"""Chat templates: messages to one prompt string, by the model's own Jinja template in a sandbox.

What a template may use is what the templates of the Hugging Face hub do use: `raise_exception`, `strftime_now`,
`tojson`, `break` and `continue`, `generation` blocks, the special tokens by name. It cannot reach attributes that
Python hides, change its arguments, or loop over a `range` beyond 100,000; its output, what it makes on the way and the
time that it takes are limited (`sandbox`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from jaxctx.errors import InvalidArgument
from jaxctx.model.config_reader import CheckpointError
from jaxctx.model.text.sandbox import Sandbox, TooMuchWork, input_size, rendering, sandbox
from jaxctx.model.text.special import NAMES
from jaxctx.model.text.template_inputs import (
    template_reads,
    with_calls_as_text,
    with_descriptions,
    with_single_calls,
    with_tools,
)
from jaxctx.model.text.tool_calls import ToolCallFormat
from jaxctx.model.text.tool_calls.harmony import CALL, FUNCTIONS, writes_channels

MAX_CHARACTERS = 8_000_000  # of a rendered prompt
MAX_SOURCE = 1 << 16  # characters of a template; published ones have up to 20,000
TURN = 100  # characters that a message counts as beside its own
MAX_PATTERN = 200  # characters of a format of time
Message = Mapping[str, Any]  # JSON values: at least `role` and `content`
# Made-up turns. Their words are such as no template writes by itself.
QUESTION, ANSWER, CUT = "made-up-question", "made-up-answer", "made-up-end-of-message"
CALL_ID = "madeup000"  # of a made-up call, where the result names none; some templates want 9 letters and digits
ASKED: Message = {"role": "user", "content": QUESTION}
ASKED_NEXT: Message = {"role": "user", "content": "made-up-next-question"}  # some compare a message with the last one
ANSWERED: Message = {"role": "assistant", "content": ANSWER}
# Variables that a template has from the server, beside the global names of its environment.
SET_BY_SERVER = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """What a template reads beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None  # tools that the model may call, in the form of OpenAI's API
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further variables, such as `enable_thinking`
    continue_final_message: bool = False  # write nothing behind the text of the last message


NO_OPTIONS = TemplateOptions()


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """What a template writes around an answer of the assistant, without the spaces and lines around `opening`."""

    opening: str  # ends a prompt that asks for an answer; never empty
    is_header: bool  # it is written for the answer alone ("<|im_start|>assistant"); else it ends a question ("[/INST]")
    end: str  # behind an answer ("<|im_end|>\n"), may be empty
    other_ends: tuple[str, ...] = ()  # with which the model ends an answer, and that the template writes at most once


class ChatTemplate:
    """A model's template. Threads may share it."""

    def __init__(
        self,
        source: str,
        *,
        tools_source: str | None = None,
        tool_calls: ToolCallFormat | None = None,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tools_source`: another template for conversations with tools; None: the same one. `tool_calls`: how calls
        are written if the template reads tools but writes no calls. `special_tokens`: variables such as `bos_token`.

        Raises CheckpointError if a template does not compile.
        """
        environment = sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = partial(_strftime, clock)
        environment.globals.update(special_tokens or {})
        self.source = source
        self.reserved_names = SET_BY_SERVER | set(NAMES) | set(environment.globals)
        self._template = _compiled(environment, source)
        self._template_with_tools = self._template if tools_source is None else _compiled(environment, tools_source)
        self._reads = template_reads(environment.parse(source if tools_source is None else tools_source))
        self.writes_channels = writes_channels(source if tools_source is None else tools_source)
        self._calls_as_text = tool_calls if self._reads.any_tools and not self._reads.tool_calls else None

    @property
    def reads_tools(self) -> bool:
        """Whether a prompt has the tools that it is given."""
        return self._reads.any_tools

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: TemplateOptions = NO_OPTIONS,
    ) -> str:
        """The prompt of a conversation. The arguments in `options` have none of `reserved_names`.

        The template writes special tokens as text. So does whoever writes the messages: as everywhere in this field,
        "<|im_end|>" in a message ends it.
        Raises InvalidArgument naming `messages` if the template refuses or fails on them; TooMuchWork, which is one, if
        it takes too long or makes too much. With `continue_final_message` nothing is written behind the text of the
        last message, which must be there; `add_generation_prompt` is then without effect.
        """
        if options.continue_final_message:
            return self._render_open(messages, options)
        return self._render(messages, add_generation_prompt, options)

    def _render_open(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        """The prompt of a conversation whose last message is to be continued.

        What ends a message is found by a mark behind its text, and a space. If the template writes that space, it also
        writes those at the end of the text; else it would drop them, and so they are dropped.
        """
        content = str(messages[-1]["content"])
        last = {**messages[-1], "content": f"{content}{CUT} "}
        before, found, behind = self._render([*messages[:-1], last], False, options).rpartition(CUT)
        if not found or CUT in before or content.strip() not in before:
            raise InvalidArgument.field("messages", "the chat template does not write the last message, to continue it")
        return before if behind.startswith(" ") else before.rstrip()

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, options: TemplateOptions) -> str:
        pieces, size = [], 0
        template = self._template if options.tools is None else self._template_with_tools
        try:
            with rendering() as work:
                work.allow(input_size([*messages, options.tools, options.arguments]) + TURN * len(messages))
                arguments = {
                    "documents": None,
                    **options.arguments,
                    "messages": self._readable(messages, options),
                    "tools": self._readable_tools(options),  # templates ask whether it is None, not if it is there
                    "add_generation_prompt": add_generation_prompt,
                }
                for piece in template.generate(arguments):
                    work.tick()
                    size += len(piece)
                    if size > MAX_CHARACTERS:
                        message = f"the prompt is longer than {MAX_CHARACTERS} characters"
                        raise InvalidArgument.field("messages", message)
                    pieces.append(piece)
        except InvalidArgument:
            raise
        except Exception as error:  # whatever a template meets in messages it did not expect; its text may quote them
            raise InvalidArgument.field("messages", "the chat template fails on these messages") from error
        return "".join(pieces)

    def _readable(self, messages: Sequence[Message], options: TemplateOptions) -> list[Message]:
        """The messages in the form that the template reads."""
        if self.writes_channels:
            messages = with_single_calls(messages)
        if self._calls_as_text is not None:
            messages = with_calls_as_text(messages, self._calls_as_text)
        if options.tools is not None and not self._reads.tools and self._reads.tools_of_messages:
            messages = with_tools(messages, options.tools)
        return [_with_thinking(message) for message in messages]

    def _readable_tools(self, options: TemplateOptions) -> Sequence[Mapping[str, Any]] | None:
        """The tools in the form that the template reads."""
        if options.tools is None or not self.writes_channels:
            return options.tools
        return with_descriptions(options.tools)

    def render_next(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: TemplateOptions = NO_OPTIONS,
    ) -> str | None:
        """What the messages add to a conversation that has begun: none of what a template writes once, at its start
        (a beginning-of-sequence token, a system prompt of its own), nor the end of the turn before.

        Found by rendering them after a made-up turn: a question, and an answer unless they begin with one; before
        results of tools, the answer is a call. None if that is refused, or if the template does not write the turns
        before as it writes them without these.
        """
        earlier, last = _made_up_turn(messages[0], with_name=self.writes_channels)
        closed = replace(options, continue_final_message=False)
        try:
            everything = self.render(
                [*earlier, *messages], add_generation_prompt=add_generation_prompt, options=options
            )
            begun = self.render(earlier, add_generation_prompt=False, options=closed)
            before, found, end = begun.partition(last)
            before_all, found_all, rest = everything.partition(last)
            if self.writes_channels and last == ANSWER and self.frame is not None:
                end = self.frame.end  # the last answer of a conversation ends otherwise than earlier ones
            if not (found and found_all and rest.startswith(end)):
                return None
            if before_all != before:
                # Some write the last answer of a conversation otherwise than earlier ones (Qwen3: with its thoughts).
                followed = self.render([*earlier, ASKED_NEXT], add_generation_prompt=False, options=closed)
                if before_all != followed.partition(last)[0]:
                    return None
        except TooMuchWork:
            raise
        except InvalidArgument:
            return None
        return rest[len(end) :] or None

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether arguments of a call may be a text instead of an object: such a text is in the prompt then.

        Found by a made-up call. Some templates write such a text as it is, some as a JSON text, and some look for names
        in it and fail.
        """
        call = {"id": CALL_ID, "type": "function", "function": {"name": ANSWER, "arguments": CUT}}
        messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            self.render(messages, add_generation_prompt=False)
            written = self.render(messages, add_generation_prompt=False, options=TemplateOptions(tools=[]))
        except TooMuchWork:
            raise
        except InvalidArgument:
            return False
        return CUT in written

    @cached_property
    def frame(self) -> AnswerFrame | None:
        """What stands around an answer. None if the template does not show it: refuses a question and an answer, or
        writes them otherwise than they are said.
        """
        try:
            open_question = self.render([ASKED])
            closed_question = self.render([ASKED], add_generation_prompt=False)
            answered = self.render([ASKED, ANSWERED], add_generation_prompt=False)
        except TooMuchWork:
            raise
        except InvalidArgument:
            return None
        is_header = open_question.startswith(closed_question) and len(open_question) > len(closed_question)
        opening = open_question[len(closed_question) :] if is_header else open_question.partition(QUESTION)[2]
        _, found, end = answered.partition(ANSWER)
        if not found or not opening.strip():
            return None
        if self.writes_channels:
            return AnswerFrame(opening.strip(), is_header, closed_question.partition(QUESTION)[2], (end, CALL))
        return AnswerFrame(opening.strip(), is_header, end)


def _compiled(environment: Sandbox, source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"chat template: longer than {MAX_SOURCE} characters")
    try:
        return environment.compiled(source)
    except Exception as error:  # Jinja's of its syntax, Python's of nesting and numbers
        raise CheckpointError(f"chat template: {str(error)[:300]}") from error


def _with_thinking(message: Message) -> Message:
    """The message, with its thoughts under the name too by which some templates know them."""
    thoughts = message.get("reasoning_content")
    return message if thoughts is None else {"thinking": thoughts, **message}


def _made_up_turn(first: Message, *, with_name: bool) -> tuple[list[Message], str]:
    """Messages that may stand before this one, and a text of the last of them by which it is found in a prompt.

    `with_name`: a result that knows the name of its tool is one of a call of that: the template writes it for both.
    """
    if first["role"] == "assistant":
        return [ASKED], QUESTION
    if first["role"] != "tool":
        return [ASKED, ANSWERED], ANSWER
    name = first.get("name", ANSWER) if with_name else ANSWER
    call = {
        "id": first.get("tool_call_id", CALL_ID),
        "type": "function",
        "function": {"name": name, "arguments": {}},
    }
    return [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], FUNCTIONS + name if with_name else name


def _strftime(clock: Callable[[], datetime], pattern: str) -> str:
    """The time now, for patterns such as templates have: widths and repetitions could ask for gigabytes."""
    if len(pattern) > MAX_PATTERN or re.search(r"\d{3}", pattern):
        raise InvalidArgument.field("messages", "the chat template asks for too long a time")
    return clock().strftime(pattern)


def _raise_exception(message: object) -> NoReturn:
    raise InvalidArgument.field("messages", f"refused by the chat template: {str(message)[:300]}")


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; for serving, only its content counts. What is set
    in it is not set behind it, as in `transformers`.
    """

    tags = {"generation"}  # noqa: RUF012 - an instance variable in jinja2's annotations

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=lineno)]
