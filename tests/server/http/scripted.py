"""An HTTP server whose model writes what a test says, piece by piece: for calls of tools and thoughts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from jaxctx.engine.interface import Caller
from jaxctx.model.text.chat import ChatTemplate
from jaxctx.model.text.tool_calls import REASONING_FORMATS, TOOL_CALL_FORMATS
from jaxctx.types import FinishReason, GeneratePiece, GenerateRequest, Usage
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.echo import CHATML, echo_text
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.client import HttpClient, http_server

TOOLS_FIRST = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


class ScriptedEngine(FakeEngine):
    """Each output is `script`, a token for each of its pieces."""

    def __init__(self, script: Sequence[str], finish: FinishReason = FinishReason.STOP) -> None:
        super().__init__()
        self.info = replace(INFO, vocab_size=1024)
        self.script = script
        self.finish = finish
        self.requests: list[GenerateRequest] = []

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        self.requests.append(request)
        context_id = request.context_id
        prompt = len(self.contexts[caller.tenant, context_id].tokens)
        counts = {"cached_tokens": 0, "computed_tokens": prompt, "restored_tokens": 0}
        usage = Usage(prompt_tokens=prompt, completion_tokens=1, **counts)
        for number, text in enumerate(self.script):
            is_last = number == len(self.script) - 1
            yield GeneratePiece(
                index=0,
                context_id=context_id,
                text=text,
                token_ids=[number],
                finish=self.finish if is_last else None,
                usage=replace(usage, completion_tokens=number + 1) if is_last or number == 0 else None,
            )


@dataclass(frozen=True, slots=True)
class Scripted:
    """The server and its engine."""

    web: HttpClient
    engine: ScriptedEngine


@asynccontextmanager
async def scripted_server(
    *pieces: str,
    finish: FinishReason = FinishReason.STOP,
    tool_calls: str | None = "hermes",
    reasoning: str | None = None,
) -> AsyncIterator[Scripted]:
    """A server whose model writes these pieces, in formats by their names."""
    engine, lifecycle = ScriptedEngine(pieces, finish), ServerLifecycle()
    text = replace(
        echo_text(),
        chat_template=ChatTemplate(TOOLS_FIRST + CHATML),
        tool_call_format=None if tool_calls is None else TOOL_CALL_FORMATS[tool_calls],
        reasoning_format=None if reasoning is None else REASONING_FORMATS[reasoning],
    )
    backend = Backend.make(lifecycle, None, max_calls=16)
    lifecycle.set_ready(ServingState.of(engine, text, Limits.of(engine.info, queue_limit=64)))
    async with http_server(backend) as web:
        yield Scripted(web, engine)
    lifecycle.stop()
