"""The input and the questions as the model reads them.

    messages, the last one with "Question: …" ── chat template ──▶ input, "Question:" │ question, opening of an answer
                                                                   shared             │ of one fork

Each question stands in one conversation with the input, behind it in the last message of the user. What comes before
the question is the same for all, and is tokenised once; so is each question with what follows it, and each choice. The
conversation is therefore rendered once, with a mark in place of the question. The parts meet where tokenizers cut a
text anyway, so that their tokens are those of the whole text.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.errors import InvalidArgument, JaxctxError
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest, GetModelRequest, Model, TokenizeRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.chat_output import formats_of
from jaxctx_server.http.decisions.choice_tree import ChoiceTree, Tokens, make_choice_tree
from jaxctx_server.http.decisions.request import DecisionRequest, Option, Question, in_question
from jaxctx_server.http.field_names import renamed

MAX_CHOICE_TOKENS = 60  # so that what a token of it sees fits into the 64 ranges of an attention mask
QUESTION_LABEL = "Question:"  # and a space, with which the first token of the question begins
PREDICATE_FORM = "{instructions}\n\nIs this true? Answer with yes or no only."
CHOICE_FORM = "{instructions}\n\nChoices:\n{options}\n\nAnswer with one of the choices only."
SCORE_FORM = "{instructions}\n\nLevels, the lowest one first:\n{options}\n\nAnswer with one of the levels only."


@dataclass(frozen=True, slots=True)
class QuestionPrompt:
    """One question in tokens."""

    question: Question
    tokens: Sequence[int]  # behind the input: the question, and the opening of an answer
    choices: Sequence[Tokens]  # of each option
    tree: ChoiceTree | None  # None: a text

    @property
    def computed_tokens(self) -> int:
        """Tokens that are computed for this question alone, before the first one of an output."""
        return len(self.tokens) + (0 if self.tree is None else len(self.tree.nodes))


@dataclass(frozen=True, slots=True)
class DecisionPrompt:
    """All of a request in tokens. No prompt is longer than the model's longest sequence."""

    model: Model
    input: Sequence[int]  # what all questions have in common: one token or more
    questions: Sequence[QuestionPrompt]


async def make_prompt(call: HttpCall, request: DecisionRequest) -> DecisionPrompt:
    """The prompt of each question, before anything is computed.

    Raises InvalidArgument naming the field, NotFound (MODEL_NOT_FOUND), FailedPrecondition (NO_CHAT_TEMPLATE).
    """
    try:
        asked = GetModelRequest(model_id=request.create.model_id)
        model = (await call.unary(call.services.models.get_model, asked)).model
        before, after = await render(call, model, request)
        tokens = TextTokens(call, model)
        input_tokens = await tokens.of(before)
    except JaxctxError as error:
        raise renamed(error, request.field_names) from None
    if not 1 <= len(input_tokens) < model.max_context_tokens:
        message = f"must be less than {model.max_context_tokens} tokens, is {len(input_tokens)}"
        raise InvalidArgument.field("input", message)
    questions: list[QuestionPrompt] = []
    for place, question in enumerate(request.questions):
        try:
            questions.append(await make_question_prompt(tokens, question, after))
            check_length(questions[-1], len(input_tokens), model)
        except JaxctxError as error:
            raise in_question(error, place, question.field_names) from None
    return DecisionPrompt(model, input_tokens, questions)


async def render(call: HttpCall, model: Model, request: DecisionRequest) -> tuple[str, str]:
    """What the chat template writes before a question, and behind it."""
    mark = f"question{secrets.token_hex(16)}"
    messages = ChatMessages(
        messages=with_question(request.messages, QUESTION_LABEL + mark),
        add_generation_prompt=True,
        template_arguments=request.template_arguments,
    )
    asked = ApplyChatTemplateRequest(model_id=model.model_id, messages=messages)
    text = (await call.unary(call.services.models.apply_chat_template, asked)).text
    if text.count(mark) != 1:
        raise InvalidArgument.field("messages", "the chat template does not write the last message as it is")
    before, _, after = text.partition(mark)
    return before, after + formats_of(model).answer_header


def with_question(messages: Sequence[ChatMessage], question: str) -> list[ChatMessage]:
    """The messages with a question at the end of the last one, or behind it if it is not the user's.

    Many templates take no two messages of the user in a row.
    """
    if not messages or messages[-1].role != "user":
        return [*messages, ChatMessage(role="user", content=question)]
    content = f"{messages[-1].content}\n\n{question}" if messages[-1].content else question
    return [*messages[:-1], ChatMessage(role="user", content=content)]


async def make_question_prompt(tokens: "TextTokens", question: Question, after: str) -> QuestionPrompt:
    """One question in tokens. The errors name fields within it."""
    own = await tokens.behind(QUESTION_LABEL[-1], f" {question_text(question)}{after}")
    choices: list[Tokens] = []
    places: dict[Tokens, int] = {}
    for place, option in enumerate(question.options):
        choice = tuple(await tokens.behind("\n" if after.endswith("\n") else "", option.text))
        path = f"{question.options_field}[{place}]"
        if not 1 <= len(choice) <= MAX_CHOICE_TOKENS:
            raise InvalidArgument.field(path, f"must be 1 to {MAX_CHOICE_TOKENS} tokens, is {len(choice)}")
        other = places.setdefault(choice, place)
        if other != place:
            raise InvalidArgument.field(path, f"has the tokens of {question.options_field}[{other}]")
        choices.append(choice)
    return QuestionPrompt(question, own, choices, make_choice_tree(choices) if choices else None)


def question_text(question: Question) -> str:
    """A question with its options, as the user asks it."""
    options = "\n".join(map(option_line, question.options))
    match question.type:
        case "predicate":
            return PREDICATE_FORM.format(instructions=question.instructions)
        case "choice":
            return CHOICE_FORM.format(instructions=question.instructions, options=options)
        case "score":
            return SCORE_FORM.format(instructions=question.instructions, options=options)
    return question.instructions


def option_line(option: Option) -> str:
    """One option in the list of a question."""
    return f"- {option.text}: {option.description}" if option.description else f"- {option.text}"


def check_length(prompt: QuestionPrompt, input_tokens: int, model: Model) -> None:
    """Raise InvalidArgument if a question is too long behind the input. A text needs a token more."""
    length = input_tokens + prompt.computed_tokens + (1 if prompt.tree is None else 0)
    if length > model.max_context_tokens:
        message = f"makes {length} tokens, with the input; the longest sequence has {model.max_context_tokens}"
        raise InvalidArgument.field("instructions", message)


class TextTokens:
    """Tokens of texts within a conversation, without those that begin one. Equal texts are tokenised once."""

    def __init__(self, call: HttpCall, model: Model) -> None:
        self._call = call
        self._model = model
        self._known: dict[str, Sequence[int]] = {}

    async def of(self, text: str) -> Sequence[int]:
        """The tokens of a text. Raises the errors of Tokenize, which name `text`."""
        if text not in self._known:
            asked = TokenizeRequest(model_id=self._model.model_id, text=text, add_special_tokens=False)
            self._known[text] = (await self._call.unary(self._call.services.models.tokenize, asked)).tokens[:]
            await asyncio.sleep(0)  # short texts are tokenised on the event loop, and there may be thousands
        return self._known[text]

    async def behind(self, character: str, text: str) -> Sequence[int]:
        """The tokens of a text behind this character, which some tokenizers write otherwise than a text by itself."""
        before, both = await self.of(character), await self.of(character + text)
        return both[len(before) :] if both[: len(before)] == before else await self.of(text)
