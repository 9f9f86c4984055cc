"""One request's use of a kept context: it begins as the context stands, and its end becomes the context's next version.

    find_use ─▶ prepare (what is opened, and what is filled) ─▶ run ─▶ save ─▶ the last part of the answer

While it lasts, the context is claimed: another request for it is refused at once. If it ends before `save`, the context
stays as it was.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxctx.errors import FailedPrecondition, InvalidArgument, NotFound
from jaxctx.v1.context_service_pb2 import FillRequest, GenerateResponse
from jaxctx.v1.lifetime_pb2 import Ttl
from jaxctx.v1.model_service_pb2 import ApplyChatTemplateRequest, Model, TokenizeRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.contextcache.errors import busy, other_model, other_revision, taken
from jaxctx_server.http.contextcache.headers import CACHE_HEADER, SessionHeaders, session_headers
from jaxctx_server.http.contextcache.report import CREATED, CacheReport, appended, compared, unusable
from jaxctx_server.http.contextcache.stored_context import (
    DEFAULT_TTL_S,
    StoredContext,
    find_context,
    key_of,
    new_labels,
    new_session_id,
    save_context,
    ttl_message,
)
from jaxctx_server.http.generation import Generation, OpenedFrom
from jaxctx_server.http.headers import ID_HEADER, names_a_session_of_the_client

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ContextUse:
    """A use that has begun. The context is claimed until `release`."""

    session_id: str
    base: StoredContext | None  # None: the context is made by this request
    appends: bool  # only new turns are sent
    ttl: Ttl  # from the end of this use on
    report: CacheReport = CREATED
    why_recomputed: str = "evicted"  # if tokens have to be computed again

    async def prepare(self, call: HttpCall, model: Model, generation: Generation) -> None:
        """Change a generation, which fills a new context, so that it uses what is kept.

        Raises InvalidArgument for a salt that the context does not have.
        """
        generation.keep = True
        if self.base is None or generation.fill is None:
            return
        snapshot = self.base.snapshot
        if snapshot.model_revision != model.model_revision:
            self.why_recomputed = "model_revision_changed"
        other_salt = generation.create.salt not in ("", snapshot.salt)
        if self.appends:
            if other_salt:
                raise InvalidArgument.field("salt", "must be that of the context, or left out")
            # Not of another revision: its tokenizer may be another one, and nobody has seen these tokens.
            generation.source = OpenedFrom(snapshot.name, snapshot.version)
            self.report = appended(snapshot.tokens)
            return
        prompt = await prompt_tokens(call, model, generation.fill)
        if other_salt:
            self.report = unusable("salt_changed", snapshot.tokens, len(prompt))
            return
        self.report = compared(self.base.tokens, prompt)
        kept = min(self.report.reused_tokens, len(prompt) - 1)  # the last one is computed: the output follows it
        if kept < 1:
            generation.create.salt = snapshot.salt
            return
        generation.source = OpenedFrom(snapshot.name, snapshot.version, recompute=True)
        generation.rewind_to = kept
        generation.fill = FillRequest()
        generation.fill.tokens.ids.extend(prompt[kept:])

    async def save(self, call: HttpCall, generation: Generation) -> None:
        """Keep the end of the generation, which is complete."""
        self.report = self.report.with_recomputed(generation.usage.reopened_tokens, self.why_recomputed)
        labels = (
            new_labels(generation.model_id, call.frontend.wall_time())
            if self.base is None
            else dict(self.base.snapshot.labels)
        )
        replaces = None if self.base is None else self.base.snapshot.version
        await save_context(call, generation.context_id, self.session_id, self.ttl, labels, replaces=replaces)

    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {ID_HEADER: self.session_id, CACHE_HEADER: self.report.header()}

    def fields(self, generation: Generation) -> Json:
        """Further fields of the body."""
        report = self.report.with_recomputed(generation.usage.reopened_tokens, self.why_recomputed)
        return {"session_id": self.session_id, "cache": report.json()}

    def release(self, call: HttpCall) -> None:
        """End the use: the context is free for others. Nothing happens twice."""
        call.frontend.kept_contexts.release(key_of(call, self.session_id))


async def find_use(call: HttpCall, model_id: str, *, creates: bool = False) -> ContextUse | None:
    """The use that the headers of a request ask for. None: none. `model_id`: the model that it names; "": any.

    `creates`: a context is made in any case, with the id of the header if there is one. Raises InvalidArgument,
    NotFound (context_not_found, context_expired), Aborted (context_busy, model_mismatch), AlreadyExists.
    """
    if not creates and names_a_session_of_the_client(call.request.headers):
        return None
    headers = session_headers(call.request.headers)
    if creates:
        return await claim_new(call, headers)
    if not headers.asks_for_a_context:
        return None
    if headers.session_id is None:
        return await claim_new(call, headers)
    key = key_of(call, headers.session_id)
    call.frontend.kept_contexts.claim(key)
    try:
        appends = headers.mode == "append"
        base = await find_context(call, headers.session_id, include_tokens=not appends)
        if model_id and model_id != base.model_id:
            raise other_model(headers.session_id, base.model_id)
    except BaseException:
        call.frontend.kept_contexts.release(key)
        raise
    ttl = base.ttl if headers.ttl_s is None else ttl_message(headers.ttl_s)
    return ContextUse(session_id=headers.session_id, base=base, appends=appends, ttl=ttl)


async def claim_new(call: HttpCall, headers: SessionHeaders) -> ContextUse:
    """The use that makes a context. Raises AlreadyExists, before anything is computed."""
    if headers.mode == "append":
        raise InvalidArgument.field("x-session-mode", "must be full: there is nothing to append to")
    session_id = headers.session_id or new_session_id()
    key = key_of(call, session_id)
    call.frontend.kept_contexts.claim(key)
    try:
        if headers.session_id is not None and await is_there(call, session_id):
            raise taken(session_id)
    except BaseException:
        call.frontend.kept_contexts.release(key)
        raise
    ttl = ttl_message(DEFAULT_TTL_S if headers.ttl_s is None else headers.ttl_s)
    return ContextUse(session_id=session_id, base=None, appends=False, ttl=ttl)


async def is_there(call: HttpCall, session_id: str) -> bool:
    """Whether the caller has a context of this id."""
    try:
        await find_context(call, session_id)
    except NotFound:
        return False
    return True


async def prompt_tokens(call: HttpCall, model: Model, fill: FillRequest) -> list[int]:
    """The tokens that a fill would put into a new context."""
    match fill.WhichOneof("content"):
        case "messages":
            rendered = ApplyChatTemplateRequest(model_id=model.model_id, messages=fill.messages)
            return list((await call.unary(call.services.models.apply_chat_template, rendered)).tokens)
        case "text":
            text = TokenizeRequest(model_id=model.model_id, text=fill.text)
            if fill.HasField("add_special_tokens"):
                text.add_special_tokens = fill.add_special_tokens
            return list((await call.unary(call.services.models.tokenize, text)).tokens)
    return list(fill.tokens.ids)


async def saved_before_end(
    call: HttpCall, use: ContextUse, generation: Generation, parts: AsyncGenerator[GenerateResponse, None]
) -> AsyncGenerator[GenerateResponse, None]:
    """The parts of the one output of a generation. The last one comes once the context is saved.

    The generation's contexts are left to the caller, as `run` leaves them.
    """
    last: GenerateResponse | None = None
    try:
        with call.frontend.will_save():
            async with aclosing(parts):
                async for part in parts:
                    if part.finish:
                        last = part
                    else:
                        yield part
            await use.save(call, generation)
        if last is not None:
            yield last
    except (NotFound, FailedPrecondition) as error:
        if error.reason == "SNAPSHOT_NOT_FOUND":  # another server saved a later version, and this one was dropped
            raise busy(use.session_id) from None
        if error.reason == "MODEL_MISMATCH":
            raise other_revision(use.session_id) from None
        raise


class UsingResponse(Response):
    """A response with the headers of a use, which ends when the response was sent, or could not be.

    The headers are those of the moment when the response begins: a stream finds out only then what the cache had.
    """

    def __init__(self, call: HttpCall, use: ContextUse, response: Response) -> None:
        super().__init__()
        self._call = call
        self._use = use
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._use.headers())
            await send(message)

        try:
            await self._response(scope, receive, send_with_headers)
        finally:
            self._use.release(self._call)
