"""An HTTP server whose model writes what a test says, piece by piece: for calls of tools and thoughts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from jaxctx.engine.interface import Caller
from jaxctx.errors import NotFound, ResourceExhausted
from jaxctx.model.text.chat import ChatTemplate
from jaxctx.model.text.tool_calls import REASONING_FORMATS, TOOL_CALL_FORMATS
from jaxctx.types import (
    FillResult,
    FinishReason,
    GeneratePiece,
    GenerateRequest,
    GetSnapshotResult,
    OpenRequest,
    SaveRequest,
    Snapshot,
    TokenIds,
    TokenLogprob,
    Usage,
)
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.services import Backend
from jaxctx_server.validate import Limits
from tests.echo import CHATML, echo_text
from tests.server.fake_engine import INFO, SNAPSHOT, FakeEngine
from tests.server.http.client import HttpClient, http_server

TOOLS_FIRST = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot of the scripted engine."""

    snapshot: Snapshot
    tokens: list[int]
    attachment: bytes


class ScriptedEngine(FakeEngine):
    """Each output is `script`, a token for each of its pieces; and what is saved can be opened again."""

    def __init__(self, script: Sequence[str], finish: FinishReason = FinishReason.STOP) -> None:
        super().__init__()
        self.info = replace(INFO, vocab_size=1024)
        self.script = script
        self.finish = finish
        self.requests: list[GenerateRequest] = []
        self.saved: dict[tuple[str, str], Saved] = {}
        self.is_full = False  # a tenant's quota of snapshots is

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
                logprobs=[TokenLogprob(token_id=number, logprob=-1.0 - number)] if request.logprobs else [],
                usage=replace(usage, completion_tokens=number + 1) if is_last or number == 0 else None,
            )

    async def check_snapshot_quota(self, caller: Caller, versions: int) -> None:
        if self.is_full:
            raise ResourceExhausted("max_snapshots_per_tenant is 0", reason="QUOTA")

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        snapshot = replace(SNAPSHOT, name=request.name, version=1, expiry=None, labels={})
        tokens = list(self.contexts[caller.tenant, request.context_id].tokens)
        self.saved[caller.tenant, request.name] = Saved(snapshot, tokens, request.attachment)
        return snapshot

    def _saved(self, caller: Caller, name: str) -> Saved:
        if (caller.tenant, name) not in self.saved:
            raise NotFound("no snapshot", reason="SNAPSHOT_NOT_FOUND")
        return self.saved[caller.tenant, name]

    async def inspect_snapshot(
        self,
        caller: Caller,
        name: str,
        version: int | None = None,
        include_attachment: bool = False,
        include_tokens: bool = False,
    ) -> GetSnapshotResult:
        found = self._saved(caller, name)
        return GetSnapshotResult(
            snapshot=found.snapshot,
            attachment=found.attachment if include_attachment else b"",
            tokens=TokenIds(ids=found.tokens) if include_tokens else None,
        )

    async def open(self, caller: Caller, request: OpenRequest, take: bool = False) -> FillResult:
        result = await super().open(caller, request, take)
        self.contexts[caller.tenant, result.context.context_id].tokens += self._saved(caller, request.name).tokens
        return result


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
