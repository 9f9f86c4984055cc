"""The description of the path of decisions."""

from jaxctx_server.http.api_description import (
    ApiDescription,
    Json,
    json_or_events_response,
    nullable,
    operation,
    schema_ref,
)
from jaxctx_server.http.decisions.request import (
    MAX_CHOICES,
    MAX_LEVELS,
    MAX_NAME,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    MIN_OPTIONS,
)
from jaxctx_server.http.openai.openapi import FORMAT_FIELDS, SHARED_FIELDS, object_of, request_of, whole
from jaxctx_server.http.openai.request import MAX_PRIORITY

TAG = "decisions"
DESCRIPTION = (
    "Decisions of the OpenAI API: many short questions about one input, which is computed once. Texts and the stream "
    "are beyond that API."
)
TEXT: Json = {"type": "string"}
FILLED_TEXT: Json = {"type": "string", "minLength": 1, "pattern": "[A-Za-z0-9]"}
COUNT: Json = {"type": "integer", "minimum": 0}
PROBABILITY: Json = {"type": "number", "minimum": 0, "maximum": 1.000001}
NAME: Json = {"type": "string", "maxLength": MAX_NAME}
TEXT_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "input_text"}, "text": FILLED_TEXT},
}
JSON_PART: Json = {
    "type": "object",
    "required": ["type", "data"],
    "properties": {
        "type": {"const": "input_json"},
        "data": {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
PARTS: Json = {"anyOf": [FILLED_TEXT, {"type": "array", "items": {"anyOf": [TEXT_PART, JSON_PART]}, "minItems": 1}]}
SAMPLING_FIELDS = (
    *("stop", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed"),
)


def question(kind: str, required: list[str], properties: Json) -> Json:
    """The schema of a question of one type."""
    fields = {"type": {"const": kind}, "name": NAME, "instructions": PARTS, **properties}
    return request_of(["type", "instructions", *required], fields)


def options(name: str, values: Json, most: int) -> Json:
    """The schema of choices or levels, whose texts must be different."""
    option = request_of([name], {name: values, "description": TEXT})
    return {"type": "array", "minItems": MIN_OPTIONS, "maxItems": most, "items": option}


def question_schema() -> Json:
    """A question of any type."""
    choices = options("value", {"anyOf": [FILLED_TEXT, {"type": "boolean"}]}, MAX_CHOICES)
    text = {
        "max_tokens": whole(1, 2**31 - 1),
        **{name: SHARED_FIELDS[name] for name in SAMPLING_FIELDS},
        **FORMAT_FIELDS,
    }
    return {
        "anyOf": [
            question("predicate", [], {}),
            question("choice", ["choices"], {"choices": choices}),
            question("score", ["levels"], {"levels": options("label", FILLED_TEXT, MAX_LEVELS)}),
            question("text", [], text),
        ]
    }


def answer_schema() -> Json:
    """An answer to a question of any type."""

    def answer(kind: str, properties: Json) -> Json:
        common = {"type": {"const": kind}, "name": nullable(NAME), "usage": schema_ref("DecisionUsage")}
        return object_of({**common, **properties})

    value: Json = {"type": ["string", "boolean"]}
    choices = {"type": "array", "items": object_of({"value": value, "probability": PROBABILITY})}
    levels = {"type": "array", "items": object_of({"value": COUNT, "label": TEXT, "probability": PROBABILITY})}
    scored = {"label_mass": {**PROBABILITY, "description": "What the options have of the model's distribution."}}
    return {
        "anyOf": [
            answer("predicate", {"probability": PROBABILITY, **scored}),
            answer("choice", {"choice": value, "confidence": PROBABILITY, "probabilities": choices, **scored}),
            answer(
                "score",
                {
                    "score": {"type": "number", "minimum": 0, "description": "The mean level, by its number from 0."},
                    "confidence": {**PROBABILITY, "description": "How much the levels agree."},
                    "probabilities": levels,
                    **scored,
                },
            ),
            answer("text", {"text": TEXT, "finish_reason": {"enum": ["stop", "length"]}}),
        ]
    }


def schemas() -> dict[str, Json]:
    """Requests and answers."""
    usage = object_of(
        {
            "input_tokens": COUNT,
            "input_tokens_details": object_of({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )
    given = {
        "anyOf": [
            FILLED_TEXT,
            {"type": "array", "items": schema_ref("InputItem"), "minItems": 1, "maxItems": 1023},
        ]
    }
    questions = {
        "type": "array",
        "items": schema_ref("DecisionQuestion"),
        "minItems": 1,
        "maxItems": MAX_QUESTIONS,
        "description": f"With up to {MAX_OPTIONS} choices and levels in all.",
    }
    return {
        "DecisionRequest": request_of(
            ["input", "questions"],
            {
                "model": {"type": "string", "maxLength": 256},
                "input": given,
                "questions": questions,
                "stream": {"type": "boolean"},
                "priority": {**whole(-MAX_PRIORITY, MAX_PRIORITY), "description": "The lowest goes first."},
                "cache_salt": {"type": "string", "maxLength": 256},
                "chat_template_kwargs": {"type": "object"},
            },
        ),
        "DecisionQuestion": question_schema(),
        "DecisionAnswer": answer_schema(),
        "DecisionUsage": usage,
        "Decision": object_of(
            {
                "model": TEXT,
                "answers": {"type": "array", "items": schema_ref("DecisionAnswer")},
                "usage": schema_ref("DecisionUsage"),
            }
        ),
        "DecisionPart": object_of(
            {"model": TEXT},
            optional={"index": COUNT, "answer": schema_ref("DecisionAnswer"), "usage": schema_ref("DecisionUsage")},
        ),
    }


EXAMPLE: Json = {
    "input": "The parcel came late, and it was open.",
    "questions": [
        {"type": "predicate", "name": "late", "instructions": "The parcel came late."},
        {
            "type": "choice",
            "name": "team",
            "instructions": "Which team answers?",
            "choices": [{"value": "delivery", "description": "late or lost"}, {"value": "returns"}],
        },
    ],
}


def decisions_description() -> ApiDescription:
    """The path of decisions."""
    create = operation(
        operation_id="CreateDecision",
        tag=TAG,
        summary="Answers to many questions about one input.",
        body=schema_ref("DecisionRequest"),
        example=EXAMPLE,
        success=json_or_events_response(
            "All answers in the order of their questions; with `stream` each as it comes, then the usage, then [DONE].",
            schema_ref("Decision"),
            schema_ref("DecisionPart"),
        ),
        errors=(404, 409, 499, 504),
    )
    return ApiDescription(
        tag=TAG, description=DESCRIPTION, paths={"/v1/decisions": {"post": create}}, schemas=schemas()
    )
