"""A fake engine: contexts of plain token lists, scripted outputs, and a record of every call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxctx.engine.attention import AttentionChoice, AttentionReason
from jaxctx.engine.interface import Caller
from jaxctx.errors import AlreadyExists, NotFound
from jaxctx.types import (
    AdapterInfo,
    AdapterSpan,
    Attention,
    Comparison,
    ContextChange,
    ContextEvent,
    ContextInfo,
    ContextPages,
    ContextState,
    CreateContextRequest,
    EngineInfo,
    EngineStats,
    Expiry,
    FillResult,
    FinishReason,
    ForwardOutputResult,
    ForwardRequest,
    ForwardResult,
    GeneratePiece,
    GenerateRequest,
    GetContextResult,
    GetSnapshotResult,
    OpenRequest,
    PlanResult,
    Publication,
    RetentionUpdate,
    SaveRequest,
    Snapshot,
    Tier,
    TokenIds,
    UpdateContextRequest,
    Usage,
    utc_datetime,
)

PAGE_SIZE = 4
INFO = EngineInfo(
    model_id="fake",
    model_revision="r1",
    architecture="fake",
    parameters=7,
    vocab_size=512,
    max_context_tokens=10_000,
    page_size=PAGE_SIZE,
    pages_total=100,
    dtype="float32",
    weights_dtype="int8",
    kv_dtype="float32",
    max_batch=4,
    platform="cpu",
    mesh={"tensor": 1},
    default_max_tokens=16,
)
STATS = EngineStats(
    pages_total=100,
    pages_free=90,
    pages_cached=4,
    pages_held=6,
    pages_reserved=2,
    contexts=1,
    running=1,
    waiting=0,
    steps=3,
    tokens_computed=30,
    tokens_cached=4,
    tokens_generated=5,
    preemptions=0,
    suspensions=0,
    compilations_after_ready=0,
    functions_compiling=0,
    draining=False,
    tokens_restored=0,
    host_pages_total=0,
    host_pages_used=0,
    disk_pages_total=0,
    disk_pages_used=0,
    snapshots=0,
    publications=0,
    expired=0,
    tokens_drafted=0,
    tokens_accepted=0,
    tokens_queried=10,
    prompt_tokens=12,
    requests_admitted=2,
    queue_seconds=0.5,
    step_seconds=0.25,
)
EXPIRY = Expiry(at=utc_datetime(1_700_000_600.5), seconds=300.25, sliding=True)
SNAPSHOT = Snapshot(
    name="n",
    version=3,
    latest=True,
    durable=True,
    tokens=7,
    seq_len=6,
    pages=2,
    size_bytes=2**40,
    model_revision="r1",
    salt="s",
    manual_commit=True,
    created_at=utc_datetime(1_700_000_000.25),
    expiry=EXPIRY,
    context_id="a",
    parent_version=2,
    labels={"k": "v"},
)
PUBLICATION = Publication(
    publication_id="p1",
    tokens=4,
    pages=1,
    salt="s",
    created_at=utc_datetime(1_700_000_000.25),
    expiry=None,
    labels={"k": "v"},
)


@dataclass
class FakeContext:
    info: ContextInfo
    tokens: list[int] = field(default_factory=list)


class FakeEngine:
    """Implements `jaxctx.engine.interface.Engine`."""

    context_reason: str = ""
    weights_in_words: str = ""
    sizes_in_words = "page 4, 4 at once, 16 rows a step (as set)"
    draft_in_words = ""
    host_tier_in_words = ""
    attention = AttentionChoice("reference", AttentionReason.PLATFORM)
    attention_status: Attention | None = attention.as_status()

    adapters_in_words = ""

    def __init__(self) -> None:
        self.info = INFO
        self.adapter_revisions: dict[str, str] = {}  # name → content
        self.contexts: dict[tuple[str, str], FakeContext] = {}
        self.calls: list[tuple[str, Caller, Any]] = []
        self.error: BaseException | None = None  # what the next call raises
        self.hang = False  # fill, and generate after its first piece, wait to be cancelled
        self.cancelled: list[str] = []
        self.pieces: Sequence[GeneratePiece] | None = None  # what generate answers
        self.pulled = 0  # pieces that were taken
        self.drained = asyncio.Event()
        self.drained.set()
        self.draining = False
        self.fails = asyncio.Event()
        self._ids = itertools.count()

    def _enter(self, name: str, caller: Caller, argument: Any = None) -> None:
        self.calls.append((name, caller, argument))
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _get(self, caller: Caller, context_id: str) -> FakeContext:
        if (caller.tenant, context_id) not in self.contexts:
            raise NotFound(f"no context {context_id!r}")
        return self.contexts[caller.tenant, context_id]

    def _info(self, context: FakeContext) -> ContextInfo:
        pages, rest = divmod(len(context.tokens), PAGE_SIZE)
        info = replace(
            context.info,
            seq_len=len(context.tokens),
            committed_pages=pages,
            working_pages=1 if rest else 0,
            working_tokens=rest,
        )
        context.info = info
        return info

    def _add(
        self, caller: Caller, context_id: str | None, parent_id: str | None, request: CreateContextRequest
    ) -> ContextInfo:
        context_id = context_id or f"ctx_{next(self._ids):04}"
        if (caller.tenant, context_id) in self.contexts:
            raise AlreadyExists("taken")
        info = ContextInfo(
            context_id=context_id,
            parent_id=parent_id,
            model_id=INFO.model_id,
            state=ContextState.IDLE,
            seq_len=0,
            committed_pages=0,
            working_pages=0,
            working_tokens=0,
            buffered_tokens=0,
            page_size=PAGE_SIZE,
            priority=request.priority,
            pinned=request.pinned,
            pinned_until=None if request.pin_s is None else utc_datetime(1_700_000_000 + request.pin_s),
            expiry=None if request.ttl.seconds is None else replace(EXPIRY, sliding=request.ttl.sliding),
            version=2**40,
            forked_at=3 if parent_id else 0,
            snapshot="n@3" if request.labels.get("opened") else "",
            salt=request.salt,
            created_at=utc_datetime(1_700_000_000.25),
            used_at=utc_datetime(1_700_000_001.5),
            labels=request.labels,
            adapter=request.adapter,
            adapter_revision=self.adapter_revisions.get(request.adapter, ""),
        )
        self.contexts[caller.tenant, context_id] = FakeContext(info)
        return info

    async def load_adapter(self, caller: Caller, name: str, directory: str) -> AdapterInfo:
        self._enter("load_adapter", caller, (name, directory))
        self.adapter_revisions[name] = f"content of {directory}"
        return self._adapter(name)

    async def unload_adapter(self, caller: Caller, name: str) -> AdapterInfo:
        self._enter("unload_adapter", caller, name)
        if name not in self.adapter_revisions:
            raise NotFound(f"no adapter {name!r} is loaded", reason="ADAPTER_NOT_FOUND")
        info = self._adapter(name)
        del self.adapter_revisions[name]
        return info

    async def adapters(self, caller: Caller) -> Sequence[AdapterInfo]:
        self._enter("adapters", caller)
        return [self._adapter(name) for name in sorted(self.adapter_revisions)]

    def _adapter(self, name: str) -> AdapterInfo:
        return AdapterInfo(name=name, revision=self.adapter_revisions[name], rank=4, parameters=99, contexts=2)

    async def create(self, caller: Caller, request: CreateContextRequest) -> ContextInfo:
        self._enter("create", caller, request)
        return self._add(caller, request.context_id, None, request)

    async def fill(
        self, caller: Caller, context_id: str, tokens: Sequence[int] = (), *, defer: bool = False
    ) -> FillResult:
        self._enter("fill", caller, (context_id, list(tokens), defer))
        context = self._get(caller, context_id)
        if self.hang:
            await self._hang("fill")
        context.tokens += tokens
        return FillResult(resident=1, restored=2, computed=len(tokens), context=self._info(context))

    async def _hang(self, name: str) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise

    async def generate(self, caller: Caller, request: GenerateRequest) -> AsyncIterator[GeneratePiece]:
        self._enter("generate", caller, request)
        context = self._get(caller, request.context_id)
        complete = False
        try:
            for piece in self.pieces or self._outputs(request, context):
                self.pulled += 1
                yield piece
                if self.hang:
                    await asyncio.sleep(3600)
            complete = True
        finally:
            if not complete:
                self.cancelled.append("generate")

    def _outputs(self, request: GenerateRequest, context: FakeContext) -> list[GeneratePiece]:
        counts = {"cached_tokens": 1, "computed_tokens": 2, "completion_tokens": 2, "restored_tokens": 0}
        usage = Usage(prompt_tokens=len(context.tokens), **counts)
        pieces = []
        for index in range(request.n):
            piece = GeneratePiece(index=index, context_id=request.context_id, text="a", token_ids=[97])
            last = replace(
                piece,
                text="b",
                token_ids=[98],
                finish=FinishReason.LENGTH,
                seed=5,
                usage=usage,
                context=self._info(context),
            )
            pieces += [piece, last]
        return pieces

    async def fork(
        self, caller: Caller, context_id: str, child_ids: Sequence[str] = (), n: int | None = None
    ) -> Sequence[ContextInfo]:
        self._enter("fork", caller, (context_id, list(child_ids), n))
        self._get(caller, context_id)
        ids = list(child_ids) or [None] * (n or 1)
        return [self._add(caller, child, context_id, CreateContextRequest()) for child in ids]

    async def truncate(self, caller: Caller, context_id: str, tokens: int) -> ContextInfo:
        self._enter("truncate", caller, (context_id, tokens))
        return self._info(self._get(caller, context_id))

    async def rewind(self, caller: Caller, context_id: str, to: int) -> ContextInfo:
        self._enter("rewind", caller, (context_id, to))
        context = self._get(caller, context_id)
        del context.tokens[to:]
        return self._info(context)

    async def switch_adapter(self, caller: Caller, context_id: str, adapter: str) -> ContextInfo:
        self._enter("switch_adapter", caller, (context_id, adapter))
        context = self._get(caller, context_id)
        if adapter and adapter not in self.adapter_revisions:
            raise NotFound(f"no adapter {adapter!r} is loaded", reason="ADAPTER_NOT_FOUND")
        revision = self.adapter_revisions[adapter] if adapter else ""
        span = AdapterSpan(start=len(context.tokens), adapter=adapter, adapter_revision=revision)
        first = AdapterSpan(start=0, adapter=context.info.adapter, adapter_revision=context.info.adapter_revision)
        spans = [*(context.info.adapter_spans or [first]), span]
        context.info = replace(context.info, adapter=adapter, adapter_revision=revision, adapter_spans=spans)
        return self._info(context)

    async def reserve_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        self._enter("reserve_pages", caller, (context_id, pages))
        return self._info(self._get(caller, context_id))

    async def commit_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        self._enter("commit_pages", caller, (context_id, pages))
        return self._info(self._get(caller, context_id))

    async def release_pages(self, caller: Caller, context_id: str, pages: int) -> ContextInfo:
        self._enter("release_pages", caller, (context_id, pages))
        return self._info(self._get(caller, context_id))

    async def update(self, caller: Caller, context_id: str, request: UpdateContextRequest) -> ContextInfo:
        self._enter("update", caller, (context_id, request))
        return self._info(self._get(caller, context_id))

    async def close(self, caller: Caller, context_id: str) -> None:
        self._enter("close", caller, context_id)
        self._get(caller, context_id)
        del self.contexts[caller.tenant, context_id]

    async def inspect(
        self,
        caller: Caller,
        context_id: str,
        include_pages: bool = False,
        include_tokens: bool = False,
        include_ancestors: bool = False,
    ) -> GetContextResult:
        self._enter("inspect", caller, (context_id, include_pages, include_tokens, include_ancestors))
        context = self._get(caller, context_id)
        return GetContextResult(
            context=self._info(context),
            pages=ContextPages(page_ids=[3, 4], refcounts=[2, 1], tiers=list(Tier)) if include_pages else None,
            tokens=TokenIds(ids=context.tokens) if include_tokens else None,
            ancestors=[("parent", 3), ("its parent", 0)] if include_ancestors else (),
        )

    async def list(
        self, caller: Caller, page_token: str = "", limit: int = 100, include_program_contexts: bool = False
    ) -> Sequence[ContextInfo]:
        self._enter("list", caller, (page_token, limit, include_program_contexts))
        found = sorted(id for tenant, id in self.contexts if tenant == caller.tenant and id > page_token)
        return [self._info(self.contexts[caller.tenant, id]) for id in found[:limit]]

    async def tenants(self, after: str, limit: int) -> Sequence[str]:
        self._enter("tenants", Caller(), (after, limit))
        return sorted({tenant for tenant, _ in self.contexts if tenant > after})[:limit]

    async def plan(
        self,
        caller: Caller,
        tokens: Sequence[int],
        *,
        context_id: str | None = None,
        salt: str = "",
        adapter: str = "",
    ) -> PlanResult:
        self._enter("plan", caller, (list(tokens), context_id, salt, *([adapter] if adapter else [])))
        return PlanResult(
            tokens=len(tokens), resident=1, restored=5, host=2, disk=3, computed=4, pages_needed=6, pages_available=7
        )

    async def forward(self, caller: Caller, request: ForwardRequest) -> ForwardResult:
        self._enter("forward", caller, request)
        context = self._get(caller, request.context_id)
        context.tokens += request.tokens
        full = ForwardOutputResult(
            index=0,
            token_id=0,
            seed=0,
            logprobs=[-0.5, -1.5],
            top=[(7, -0.25), (0, -2.0)],
            logits=b"\x00\x00\x80\x3f" * INFO.vocab_size,
            entropy=0.0,
        )
        outputs = [full if each.logits else ForwardOutputResult(index=each.index) for each in request.outputs]
        return ForwardResult(outputs=outputs, context=self._info(context))

    async def compare(self, caller: Caller, a: str, b: str) -> Comparison:
        self._enter("compare", caller, (a, b))
        return Comparison(common_tokens=5, shared_pages=1, length_a=6, length_b=7)

    async def watch(self, caller: Caller, include_program_contexts: bool = False) -> AsyncIterator[ContextEvent]:
        self._enter("watch", caller, include_program_contexts)
        try:
            for info in await self.list(caller):
                yield ContextEvent(
                    change=ContextChange.EXISTS,
                    at=utc_datetime(1_700_000_000.25),
                    context_id=info.context_id,
                    context=info,
                )
            for change in ContextChange:
                yield ContextEvent(
                    change=change,
                    at=utc_datetime(1_700_000_001.5),
                    context_id="" if change is ContextChange.RESET else "gone",
                )
            await asyncio.sleep(3600)
        finally:
            self.cancelled.append("watch")

    # Snapshots: what is asked is recorded, what is answered does not depend on it.

    async def save(self, caller: Caller, request: SaveRequest) -> Snapshot:
        self._enter("save", caller, request)
        return SNAPSHOT

    async def check_snapshot_quota(self, caller: Caller, versions: int) -> None:
        self._enter("check_snapshot_quota", caller, versions)

    async def take(self, caller: Caller, request: OpenRequest) -> FillResult:
        return await self.open(caller, request, take=True)

    async def open(self, caller: Caller, request: OpenRequest, take: bool = False) -> FillResult:
        self._enter("open", caller, (request, take))
        info = self._add(caller, request.context_id, None, CreateContextRequest(labels={"opened": "yes"}))
        return FillResult(resident=4, restored=2, computed=1, context=info)

    async def snapshot(self, caller: Caller, name: str, version: int | None = None) -> Snapshot:
        self._enter("snapshot", caller, (name, version))
        return replace(SNAPSHOT, expiry=None, labels={})

    async def inspect_snapshot(
        self,
        caller: Caller,
        name: str,
        version: int | None = None,
        include_attachment: bool = False,
        include_tokens: bool = False,
    ) -> GetSnapshotResult:
        self._enter("inspect_snapshot", caller, (name, version, include_attachment, include_tokens))
        return GetSnapshotResult(
            snapshot=replace(SNAPSHOT, expiry=None, labels={}),
            attachment=b"attached\x00\xff" if include_attachment else b"",
            tokens=TokenIds(ids=[5, 6, 7]) if include_tokens else None,
        )

    async def snapshots(self, caller: Caller, prefix: str, page_token: str, limit: int) -> Sequence[Snapshot]:
        self._enter("snapshots", caller, (prefix, page_token, limit))
        return [replace(SNAPSHOT, name=name) for name in ("n", "na", "nb", "o") if name > page_token][:limit]

    async def history(self, caller: Caller, name: str) -> Sequence[Snapshot]:
        self._enter("history", caller, name)
        return [replace(SNAPSHOT, version=version, latest=version == 12) for version in (12, 11, 3, 1)]

    async def update_snapshot(
        self, caller: Caller, name: str, version: int | None, changes: RetentionUpdate
    ) -> Snapshot:
        self._enter("update_snapshot", caller, (name, version, changes.ttl, changes.labels))
        return SNAPSHOT

    async def delete_snapshot(self, caller: Caller, name: str, version: int | None = None) -> int:
        self._enter("delete_snapshot", caller, (name, version))
        return 2

    async def publish(self, caller: Caller, context_id: str, settings: RetentionUpdate) -> Publication:
        self._enter("publish", caller, (context_id, settings.ttl, settings.labels))
        return PUBLICATION

    async def update_publication(self, caller: Caller, publication_id: str, changes: RetentionUpdate) -> Publication:
        self._enter("update_publication", caller, (publication_id, changes.ttl, changes.labels))
        return PUBLICATION

    async def unpublish(self, caller: Caller, publication_id: str) -> None:
        self._enter("unpublish", caller, publication_id)

    async def publications(self, caller: Caller) -> Sequence[Publication]:
        self._enter("publications", caller)
        return [replace(PUBLICATION, publication_id=id) for id in ("p1", "p2", "p3")]

    async def stats(self) -> EngineStats:
        return STATS  # no call of a test's: the programs ask at every heartbeat

    async def drain(self) -> None:
        self.draining = True
        await self.drained.wait()

    async def failure(self) -> str:
        await self.fails.wait()
        return "a step failed"

    async def clear_cache(self, caller: Caller) -> int:
        self._enter("clear_cache", caller)
        return 9
