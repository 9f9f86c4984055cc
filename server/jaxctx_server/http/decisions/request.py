"""A JSON body of /v1/decisions to what it asks for.

Raised here is InvalidArgument, with the name of the field in the request. Whether the values of a text question are
within their bounds is for the contract to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxctx.errors import FieldViolation, InvalidArgument, JaxctxError
from jaxctx.v1.content_pb2 import ChatMessage
from jaxctx.v1.context_service_pb2 import CreateContextRequest, GenerateRequest
from jaxctx_server.http.errors import json_text
from jaxctx_server.http.field_names import request_name
from jaxctx_server.http.openai.chat import parse_template_arguments
from jaxctx_server.http.openai.fields import CREATE_FIELDS, FORMAT_FIELDS, IGNORED_FIELDS, SAMPLING_FIELDS
from jaxctx_server.http.openai.output_format import parse_output_format
from jaxctx_server.http.openai.request import (
    parse_object,
    parse_priority,
    parse_truth_of,
    set_field,
    set_sampling,
)
from jaxctx_server.http.openai.responses.items import chat_messages, content_text, input_text, parse_input

MAX_QUESTIONS = 400
MIN_OPTIONS, MAX_CHOICES, MAX_LEVELS = 2, 255, 10  # of a question
MAX_OPTIONS = 4096  # choices and levels of all questions: each is tokenised
MAX_FORMATS = 64  # different ones, of all texts: as many as an engine keeps compiled
MAX_NAME = 256  # characters
REQUEST_FIELDS = ("input", "questions", "stream", "priority", "chat_template_kwargs", *CREATE_FIELDS)
IGNORED = (*IGNORED_FIELDS, "prompt_cache_key", "prompt_cache_options")
COMMON_FIELDS = ("type", "name", "instructions")
TEXT_FIELDS = ("max_tokens", "stop", *SAMPLING_FIELDS, *FORMAT_FIELDS)
QUESTION_FIELDS: Mapping[str, Sequence[str]] = {
    "predicate": COMMON_FIELDS,
    "choice": (*COMMON_FIELDS, "choices"),
    "score": (*COMMON_FIELDS, "levels"),
    "text": (*COMMON_FIELDS, *TEXT_FIELDS),
}

Json: TypeAlias = Mapping[str, Any]
QuestionType: TypeAlias = Literal["predicate", "choice", "score", "text"]


@dataclass(frozen=True, slots=True)
class Option:
    """A choice of a question, or a level of a score."""

    value: str | bool
    description: str = ""

    @property
    def text(self) -> str:
        """As the model writes it."""
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        return self.value


YES_OR_NO = (Option("yes"), Option("no"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question about the input."""

    type: QuestionType
    name: str | None
    instructions: str
    options: Sequence[Option] = ()  # yes and no of a predicate, choices, levels; empty for a text
    generate: GenerateRequest | None = None  # of a text
    format_name: str = "response_format"  # the field that says what a text may look like

    @property
    def options_field(self) -> str:
        """The field that has the options."""
        return "levels" if self.type == "score" else "choices"

    @property
    def field_names(self) -> Mapping[str, str]:
        """The names of fields of the contract in this question."""
        return {"output_format": self.format_name, "tokens": "instructions", "text": "instructions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    """What is asked for."""

    create: CreateContextRequest
    messages: Sequence[ChatMessage]  # the input
    template_arguments: str  # JSON, or empty
    questions: Sequence[Question]
    stream: bool
    unknown_fields: Sequence[str] = field(default=())

    @property
    def field_names(self) -> Mapping[str, str]:
        """The names of fields of the contract in this request."""
        return {
            "model_id": "model",
            "salt": "cache_salt",
            "messages": "input",
            "tokens": "input",
            "text": "input",
            "template_arguments": "chat_template_kwargs",
        }


def parse_decision_request(data: bytes) -> DecisionRequest:
    """The request of a body. Raises InvalidArgument, naming the field."""
    fields = parse_object(data)
    create = CreateContextRequest()
    for name, contract_name in CREATE_FIELDS.items():
        if name in fields:
            set_field(create, contract_name, fields[name], name)
    if "priority" in fields:
        create.priority = parse_priority(fields["priority"])
    # A decision is what comes first, not what comes behind thoughts.
    arguments = parse_template_arguments({**fields, "reasoning_effort": "none"})
    questions = parse_questions(fields.get("questions"))
    unknown = [name for name in fields if name not in (*REQUEST_FIELDS, *IGNORED)]
    for each in fields["questions"]:
        unknown += [f"questions.{name}" for name in each if name not in QUESTION_FIELDS[each["type"]]]
    return DecisionRequest(
        create=create,
        messages=parse_messages(fields.get("input")),
        template_arguments=json_text(arguments),
        questions=questions,
        stream=parse_truth_of(fields, "stream", False),
        unknown_fields=tuple(unknown),
    )


def parse_messages(value: object) -> Sequence[ChatMessage]:
    """The input: a text, which is a message of the user, or messages, calls and results of tools."""
    if not isinstance(value, str | list) or not value:
        raise InvalidArgument.field("input", "must be a text or a list of messages, and not empty")
    if isinstance(value, str):
        return chat_messages(parse_input(value))
    items: list[object] = []
    for place, item in enumerate(value):
        if isinstance(item, dict) and isinstance(item.get("content"), list):
            item = {**item, "content": with_json_as_text(item["content"], f"input[{place}].content")}
        items.append(item)
    return chat_messages(parse_input(items))


def with_json_as_text(parts: Sequence[Any], field_name: str) -> list[Any]:
    """Parts of a content, with those of the type input_json as text."""
    return [
        input_text(data_text(part.get("data"), f"{field_name}[{place}].data"))
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for place, part in enumerate(parts)
    ]


def data_text(data: object, field_name: str) -> str:
    """An object, or a list of objects, as JSON."""
    are_objects = isinstance(data, list) and all(isinstance(each, dict) for each in data)
    if not (isinstance(data, dict) or are_objects):
        raise InvalidArgument.field(field_name, "must be an object or a list of objects")
    return json_text(data)


def parse_questions(value: object) -> Sequence[Question]:
    """All questions."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_QUESTIONS:
        raise InvalidArgument.field("questions", f"must be a list of 1 to {MAX_QUESTIONS} questions")
    questions: list[Question] = []
    for place, each in enumerate(value):
        try:
            questions.append(parse_question(each))
        except InvalidArgument as error:
            raise in_question(error, place) from None
    if sum(len(question.options) for question in questions) > MAX_OPTIONS:
        raise InvalidArgument.field("questions", f"must have up to {MAX_OPTIONS} choices and levels in all")
    if len(different_formats(questions)) > MAX_FORMATS:
        raise InvalidArgument.field("questions", f"must have up to {MAX_FORMATS} different formats of texts")
    return questions


def different_formats(questions: Sequence[Question]) -> Mapping[bytes, int]:
    """The different formats of texts, serialised, with the place of the first question that has each."""
    found: dict[bytes, int] = {}
    for place, question in enumerate(questions):
        if question.generate is not None and question.generate.HasField("output_format"):
            found.setdefault(question.generate.output_format.SerializeToString(deterministic=True), place)
    return found


def in_question(error: JaxctxError, place: int, field_names: Mapping[str, str] | None = None) -> JaxctxError:
    """The same error, with its fields as those of a question. `field_names`: its own, by the names of the contract."""
    names = field_names or {}
    if error.violations:
        error.violations = tuple(
            FieldViolation(f"questions[{place}]{question_path(each.field, names)}", each.description)
            for each in error.violations
        )
        error.message = "; ".join(f"{each.field}: {each.description}" for each in error.violations)
    return error


def question_path(path: str, field_names: Mapping[str, str]) -> str:
    """The place of a field within its question, as ".regex"; empty: the whole question."""
    if path.startswith("output_format"):
        return f".{field_names.get('output_format', path)}"
    return f".{request_name(path, field_names)}" if path else ""


def parse_question(value: object) -> Question:
    """One question. The errors name fields within it; "" stands for all of it."""
    if not isinstance(value, dict):
        raise InvalidArgument.field("", "must be an object")
    fields = {name: each for name, each in value.items() if each is not None}
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in QUESTION_FIELDS:
        raise InvalidArgument.field("type", "must be " + ", ".join(QUESTION_FIELDS))
    name = fields.get("name")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_NAME):
        raise InvalidArgument.field("name", f"must be a text of up to {MAX_NAME} characters")
    instructions = parse_instructions(fields.get("instructions"))
    match kind:
        case "predicate":
            return Question(type="predicate", name=name, instructions=instructions, options=YES_OR_NO)
        case "choice":
            options = parse_options(fields, "choices", "value", MAX_CHOICES)
            return Question(type="choice", name=name, instructions=instructions, options=options)
        case "score":
            options = parse_options(fields, "levels", "label", MAX_LEVELS)
            return Question(type="score", name=name, instructions=instructions, options=options)
    generate, format_name = parse_text(fields)
    return Question(type="text", name=name, instructions=instructions, generate=generate, format_name=format_name)


def parse_instructions(value: object) -> str:
    """What is asked: a text, or parts with text and JSON."""
    parts = with_json_as_text(value, "instructions") if isinstance(value, list) else value
    text = content_text(parts, "instructions", ("input_text",))
    if not text.strip():
        raise InvalidArgument.field("instructions", "must not be empty")
    return text


def parse_options(fields: Json, name: str, value_name: str, most: int) -> Sequence[Option]:
    """Choices or levels. A choice may be true or false, too."""
    given = fields.get(name)
    if not isinstance(given, list) or not MIN_OPTIONS <= len(given) <= most:
        raise InvalidArgument.field(name, f"must be a list of {MIN_OPTIONS} to {most}")
    options: list[Option] = []
    places: dict[str, int] = {}
    for place, each in enumerate(given):
        path = f"{name}[{place}]"
        if not isinstance(each, dict):
            raise InvalidArgument.field(path, f"must be an object with a {value_name}")
        value, description = each.get(value_name), each.get("description")
        if not (isinstance(value, str) and value.strip()) and not (name == "choices" and isinstance(value, bool)):
            raise InvalidArgument.field(f"{path}.{value_name}", "must be a text, and not empty")
        if description is not None and not isinstance(description, str):
            raise InvalidArgument.field(f"{path}.description", "must be a text")
        option = Option(value, description or "")
        other = places.setdefault(option.text, place)
        if other != place:
            raise InvalidArgument.field(f"{path}.{value_name}", f"is the text of {name}[{other}] too")
        options.append(option)
    return options


def parse_text(fields: Json) -> tuple[GenerateRequest, str]:
    """How a text is generated, greedily unless the question says otherwise; and the field with its format."""
    generate = GenerateRequest()
    generate.sampling.temperature = 0
    if "max_tokens" in fields:
        set_field(generate, "max_tokens", fields["max_tokens"], "max_tokens")
    set_sampling(fields, generate)
    output_format, format_name = parse_output_format(fields)
    if output_format is not None:
        generate.output_format.CopyFrom(output_format)
    return generate, format_name
