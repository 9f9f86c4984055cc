"""A response that is being made, and how the API tells it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxctx.errors import JaxctxError
from jaxctx.model.text.tool_calls import (
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from jaxctx.v1.context_service_pb2 import GenerateResponse
from jaxctx.v1.generation_pb2 import FinishReason
from jaxctx_server.http.chat_output import ChatFormats, ToolUse
from jaxctx_server.http.contextcache.use import ContextUse
from jaxctx_server.http.errors import http_status
from jaxctx_server.http.generation import Generation
from jaxctx_server.http.openai.chat_output import ThoughtCounter
from jaxctx_server.http.openai.logprobs import chat_logprobs
from jaxctx_server.http.openai.responses.namespaces import called_function, response_tools
from jaxctx_server.http.openai.responses.output import OutputBuilder
from jaxctx_server.http.openai.responses.record import Conversation, StoredConversation
from jaxctx_server.http.openai.responses.request import ResponsesRequest
from jaxctx_server.http.token_pieces import TokenPieces

Json = dict[str, Any]
ECHOED_FIELDS = ("max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")


@dataclass(slots=True, kw_only=True)
class ResponseRun:
    """A response that is being made."""

    request: ResponsesRequest
    base: StoredConversation | None  # what it continues
    conversation: Conversation  # up to the end of the input
    generation: Generation
    formats: ChatFormats
    use: ToolUse
    parser: OutputParser
    pieces: TokenPieces
    response_id: str
    created_at: int  # seconds since 1970
    kept_context: ContextUse | None = None  # that it continues or makes
    diagnostics: Json | None = None
    output: OutputBuilder
    thoughts: ThoughtCounter = field(default_factory=ThoughtCounter)
    untold_logprobs: list[Json] = field(default_factory=list)  # of tokens whose text has not come yet
    finish: int = 0  # a FinishReason
    completed_at: int | None = None  # seconds since 1970
    error: JaxctxError | None = None  # why it failed
    begun_version: int | None = None  # of its stored state, from when it began in the background; None: it did not
    deltas: Json | None = None  # what is stored of them, of a response in the background

    @property
    def status(self) -> str:
        """What has become of it."""
        if self.error is not None:
            return "failed"
        if not self.finish:
            return "in_progress"
        return "incomplete" if self.finish == FinishReason.FINISH_REASON_LENGTH else "completed"

    def read_part(self, part: GenerateResponse) -> list[Json]:
        """The events that a part of the output brings. Its tokens are known to `pieces`, if they are told."""
        found = self.parser.feed(part.text)
        if part.finish:
            found += self.parser.finish()
        found = self.use.allowed(found)
        self.thoughts.count(found, len(part.token_ids))
        if self.request.tells_logprobs:
            self.untold_logprobs += chat_logprobs(self.pieces, part.logprobs, as_ids=False)
        events = self._events(found)
        if part.finish:
            self.finish = part.finish
            events += self._text("") if self.untold_logprobs else []
        return events

    def _events(self, found: Sequence[OutputEvent]) -> list[Json]:
        """The events of the API for what an output says."""
        events: list[Json] = []
        for each in found:
            match each:
                case TextDelta(text):
                    events += self._text(text)
                    continue
                case ReasoningDelta(text):
                    events += self.output.reasoning(text)
                case ToolCallStart(_, name):
                    namespace, own_name = called_function(self.use.tools, name)
                    events += self.output.start_call(self.formats.new_call_id(), own_name, namespace)
                case ToolCallArguments(_, fragment):
                    events += self.output.call_arguments(fragment)
                case ToolCallEnd(_, is_complete):
                    events += self.output.close("completed" if is_complete else "incomplete")
            self.untold_logprobs = []  # the API has none for thoughts and calls
        return events

    def _text(self, text: str) -> list[Json]:
        logprobs, self.untold_logprobs = self.untold_logprobs, []
        return self.output.text(text, logprobs)

    def object(self) -> Json:
        """The response as the API returns it, as far as it has come."""
        request, fields = self.request, self.request.fields
        is_complete = bool(self.finish)
        text = fields.get("text", {})
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at if self.status == "completed" else None,
            "status": self.status,
            "error": None if self.error is None else error_json(self.error),
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "background": request.background,
            "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
            "instructions": self.conversation.instructions,
            "metadata": fields.get("metadata", {}),
            "model": self.generation.model_id,
            "output": list(self.output.items) if is_complete else [],
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "previous_response_id": request.previous_response_id,
            "prompt_cache_diagnostics": self.diagnostics,
            "reasoning": {"effort": request.effort, "summary": None},
            "service_tier": "default",
            "store": request.store,
            "temperature": fields.get("temperature", 1.0),
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": response_tools(self.conversation.tools),
            "top_logprobs": request.generate.top_logprobs,
            "top_p": fields.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": self._usage() if is_complete else None,
            **{name: fields.get(name) for name in ECHOED_FIELDS},
            **({} if self.kept_context is None else self.kept_context.fields(self.generation)),
        }

    def _usage(self) -> Json:
        """What the response cost, in tokens."""
        usage = self.generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.written_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.thoughts.tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def error_json(error: JaxctxError) -> Json:
    """Why a response failed, by the codes of the API."""
    status = http_status(error)
    if status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if status in (400, 404, 409) else "server_error"
    return {"code": code, "message": error.message}
