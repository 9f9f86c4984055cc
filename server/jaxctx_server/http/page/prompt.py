"""POST /page/prompt: append a text to a context, a fork of one or a new one, continue it, and stream what comes.

    {"context_id": …} ─────────────────────────────┐
    {"fork_of": …}      Fork, its own TTL and label ├─▶ Fill ─▶ Generate (one or several branches)
    neither             CreateContext ──────────────┘

The events: `begin` names the context, `part` has new text of one branch, `end` says why it ended and what it cost.
Several branches are forks of the context, which then stays as it is; those of an existing context begin with a fork, so
that it stays too. What is made here ends when it was not used for ten minutes, and has the label `jaxctx` = `page`.

If the client leaves, the generation ends within a step, and the context keeps what was generated.
"""

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration
from starlette.responses import Response

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import ChatMessage, ChatMessages
from jaxctx.v1.context_service_pb2 import (
    CreateContextRequest,
    FillRequest,
    ForkRequest,
    GenerateRequest,
    GenerateResponse,
    UpdateContextRequest,
)
from jaxctx.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.endpoint import EventStream
from jaxctx_server.http.events import typed_event
from jaxctx_server.http.generation import close_contexts
from jaxctx_server.http.page.as_json import Json
from jaxctx_server.http.request_body import PARSE_ERRORS, parse_json

PAGE_TTL = Ttl(duration=Duration(seconds=600), sliding=True)
PAGE_LABELS = {"jaxctx": "page"}
MAX_BRANCHES = 8
MAX_PARTS = 100  # values, names and texts in a body
MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
PROMPT_FIELDS = frozenset(
    ("context_id", "fork_of", "text", "as_message", "branches", "max_tokens", "temperature", "seed")
)
FINISH_REASONS: Mapping[int, str] = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePrompt:
    """What the page asks for. Where the text goes: `context_id`, `fork_of`, or with neither a new context."""

    context_id: str | None
    fork_of: str | None
    text: str  # may be empty, but not in a new context
    as_message: bool  # the text is a message of a user, written by the model's chat template
    branches: int
    max_tokens: int | None  # None: the model's default
    temperature: float | None  # None: 1
    seed: int | None

    @property
    def source(self) -> str | None:
        """The context to fork; None: none."""
        if self.fork_of is not None:
            return self.fork_of
        return self.context_id if self.branches > 1 else None


async def stream_prompt(call: HttpCall) -> Response:
    """POST /page/prompt. Raises InvalidArgument, naming the field, and the errors of the services."""
    return EventStream(prompt_events(call, await call.parse_body(parse_prompt)))


async def prompt_events(call: HttpCall, prompt: PagePrompt) -> AsyncGenerator[str, None]:
    """The events of one prompt. To be closed as soon as they are no longer read."""
    is_new = prompt.source is not None or prompt.context_id is None
    context_id = secrets.token_hex(8) if is_new or prompt.context_id is None else prompt.context_id
    is_filled = False
    try:
        if is_new:
            await begin(call, prompt.source, context_id)
        cost = await fill(call, prompt, context_id)
        is_filled = True
        yield typed_event("begin", {"context_id": context_id, "forked_from": prompt.source, **cost})
        request = generate_request(prompt, context_id)
        async with aclosing(call.stream(call.services.contexts.generate, request)) as parts:
            async for part in parts:
                if part.text:
                    yield part_event(part)
                if part.finish:
                    yield end_event(part)
    finally:
        if is_new and not is_filled:  # the user will not see it
            call.frontend.run_in_background(close_contexts(call, [context_id]))


async def begin(call: HttpCall, source: str | None, context_id: str) -> None:
    """Make the context that the text goes to: a fork of `source`, or a new one."""
    contexts = call.services.contexts
    if source is None:
        create = CreateContextRequest(context_id=context_id, ttl=PAGE_TTL, labels=PAGE_LABELS)
        await call.unary(contexts.create_context, create, draws_ids=True)
        return
    await call.unary(contexts.fork, ForkRequest(context_id=source, child_ids=[context_id]), draws_ids=True)
    # A child has the time to live and the labels of its parent, which may live for ever.
    labels = UpdateContextRequest.Labels(labels=PAGE_LABELS)
    await call.unary(contexts.update_context, UpdateContextRequest(context_id=context_id, ttl=PAGE_TTL, labels=labels))


async def fill(call: HttpCall, prompt: PagePrompt, context_id: str) -> Json:
    """Append the text. With one branch it is computed in the first step of that. With several it is computed before
    they fork, and what that cost is returned.
    """
    if not prompt.text:
        return {}
    request = FillRequest(context_id=context_id, defer=prompt.branches == 1)
    if prompt.as_message:
        request.messages.CopyFrom(ChatMessages(messages=[ChatMessage(role="user", content=prompt.text)]))
    else:
        request.text = prompt.text
    filled = await call.unary(call.services.contexts.fill, request)
    if prompt.branches == 1:
        return {}
    return {"cached_tokens": filled.resident + filled.restored, "computed_tokens": filled.computed}


def generate_request(prompt: PagePrompt, context_id: str) -> GenerateRequest:
    """The request to continue the context."""
    sampling = SamplingParams(temperature=prompt.temperature, seed=prompt.seed)
    return GenerateRequest(context_id=context_id, n=prompt.branches, max_tokens=prompt.max_tokens, sampling=sampling)


def part_event(part: GenerateResponse) -> str:
    """New text of one branch."""
    return typed_event("part", {"index": part.index, "context_id": part.context_id, "text": part.text})


def end_event(part: GenerateResponse) -> str:
    """The end of one branch."""
    usage = part.usage
    body = {
        "index": part.index,
        "context_id": part.context_id,
        "finish": FINISH_REASONS.get(part.finish, ""),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    return typed_event("end", body)


def parse_prompt(data: bytes) -> PagePrompt:
    """The prompt in a body. Raises InvalidArgument for what is none. The calls check the ids."""
    try:
        fields = parse_json(data, max_values=MAX_PARTS, max_parts=MAX_PARTS)
    except PARSE_ERRORS as error:
        raise InvalidArgument.field("request", "is no JSON object") from error
    if not isinstance(fields, dict):
        raise InvalidArgument.field("request", "is no JSON object")
    prompt = PagePrompt(
        context_id=text_field(fields, "context_id"),
        fork_of=text_field(fields, "fork_of"),
        text=text_field(fields, "text") or "",
        as_message=flag_field(fields, "as_message"),
        branches=1 if fields.get("branches") is None else number_field(fields, "branches", 1, MAX_BRANCHES),
        max_tokens=None if fields.get("max_tokens") is None else number_field(fields, "max_tokens", 1, MAX_INT32),
        temperature=temperature_field(fields),
        seed=None if fields.get("seed") is None else number_field(fields, "seed", 0, MAX_INT64),
    )
    unknown = sorted(set(fields) - PROMPT_FIELDS)
    if unknown:
        raise InvalidArgument.field(unknown[0][:64], "is not known here")
    if prompt.context_id is not None and prompt.fork_of is not None:
        raise InvalidArgument.field("fork_of", "excludes context_id")
    if not prompt.text and prompt.context_id is None and prompt.fork_of is None:
        raise InvalidArgument.field("text", "must not be empty in a new context")
    return prompt


def text_field(fields: Mapping[str, Any], name: str) -> str | None:
    """A text; None: there is none. Raises InvalidArgument for a value of another type, or that is not Unicode."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument.field(name, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field(name, "has a lone surrogate") from error
    return value


def number_field(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """A whole number. Raises InvalidArgument for another type, or one out of bounds."""
    value = fields[name]
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise InvalidArgument.field(name, f"must be a whole number from {least} to {most}")


def temperature_field(fields: Mapping[str, Any]) -> float | None:
    """The temperature; None: there is none. Raises InvalidArgument for another type."""
    value = fields.get("temperature")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise InvalidArgument.field("temperature", "must be a number from 0 to 100")
    return float(value)


def flag_field(fields: Mapping[str, Any], name: str) -> bool:
    """A truth value, false if there is none. Raises InvalidArgument for another type."""
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidArgument.field(name, "must be true or false")
    return value
