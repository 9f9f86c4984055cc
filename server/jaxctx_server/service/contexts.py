"""ContextService on the engine of this process."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from jaxctx import convert
from jaxctx.engine.interface import Caller, Engine
from jaxctx.errors import InvalidArgument, PermissionDenied
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx_server.call_record import current_record
from jaxctx_server.lifecycle import LocalModel, ServerLifecycle
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.service.paging import entries_to_find, page_by_id
from jaxctx_server.service.streams import closing
from jaxctx_server.tokenizer_pool import ContentPosition, EmptyContext

MAX_INLINE_MASKS = 256  # attention masks that are converted on the event loop, which takes up to 4 ms


class LocalContextService:
    """Implements `jaxctx_server.service.interface.ContextService`."""

    def __init__(self, lifecycle: ServerLifecycle, generations: GenerationMetrics | None = None) -> None:
        """`generations`: where outputs are counted."""
        self._lifecycle = lifecycle
        self._generations = generations or GenerationMetrics()

    def _engine(self) -> Engine:
        return self._lifecycle.model().engine

    async def create_context(self, caller: Caller, request: pb.CreateContextRequest) -> pb.CreateContextResponse:
        engine = self._lifecycle.model(request.model_id).engine
        request.adapter = adapter_of(engine, request.model_id, request.adapter)
        info = await engine.create(caller, convert.create_context_request_from_proto(request))
        return pb.CreateContextResponse(context=convert.context_info_to_proto(info))

    async def fill(self, caller: Caller, request: pb.FillRequest) -> pb.FillResponse:
        model = self._lifecycle.model()
        position = ExistingContext(model, caller, request.context_id)
        tokens = await model.texts.tokens(request, position)
        result = await model.engine.fill(caller, request.context_id, tokens, defer=request.defer)
        current_record().add_fill(result.resident, result.restored, result.computed)
        return convert.fill_result_to_proto(result)

    async def flush(self, caller: Caller, request: pb.FlushRequest) -> pb.FlushResponse:
        result = await self._engine().fill(caller, request.context_id)
        current_record().add_fill(result.resident, result.restored, result.computed)
        return convert.flush_response_to_proto(result)

    async def generate(self, caller: Caller, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        engine = self._engine()
        pieces = engine.generate(caller, convert.generate_request_from_proto(request))
        with self._generations.measure(request) as measured:
            async with closing(pieces):
                async for piece in pieces:
                    response = convert.generate_piece_to_proto(piece)
                    measured.observe(response, engine.info.model_id)
                    yield response

    async def forward(self, caller: Caller, request: pb.ForwardRequest) -> pb.ForwardResponse:
        engine = self._engine()
        if len(request.masks) <= MAX_INLINE_MASKS:
            forward_request = convert.forward_request_from_proto(request)
        else:
            forward_request = await asyncio.to_thread(convert.forward_request_from_proto, request)
        result = await engine.forward(caller, forward_request)
        return convert.forward_result_to_proto(result)

    async def fork(self, caller: Caller, request: pb.ForkRequest) -> pb.ForkResponse:
        n = request.n if request.HasField("n") else None
        children = await self._engine().fork(caller, request.context_id, list(request.child_ids), n)
        return pb.ForkResponse(contexts=[convert.context_info_to_proto(child) for child in children])

    async def truncate(self, caller: Caller, request: pb.TruncateRequest) -> pb.TruncateResponse:
        info = await self._engine().truncate(caller, request.context_id, request.tokens)
        return pb.TruncateResponse(context=convert.context_info_to_proto(info))

    async def rewind(self, caller: Caller, request: pb.RewindRequest) -> pb.RewindResponse:
        info = await self._engine().rewind(caller, request.context_id, request.to)
        return pb.RewindResponse(context=convert.context_info_to_proto(info))

    async def switch_adapter(self, caller: Caller, request: pb.SwitchAdapterRequest) -> pb.SwitchAdapterResponse:
        info = await self._engine().switch_adapter(caller, request.context_id, request.adapter)
        return pb.SwitchAdapterResponse(context=convert.context_info_to_proto(info))

    async def get_context(self, caller: Caller, request: pb.GetContextRequest) -> pb.GetContextResponse:
        result = await self._engine().inspect(
            caller,
            request.context_id,
            include_pages=request.include_pages,
            include_tokens=request.include_tokens,
            include_ancestors=request.include_ancestors,
        )
        return convert.get_context_result_to_proto(result)

    async def list_contexts(self, caller: Caller, request: pb.ListContextsRequest) -> pb.ListContextsResponse:
        found = entries_to_find(request.limit)
        if request.tenants_only:
            if not caller.of_cluster:
                raise PermissionDenied("tenants_only: only another server of the cluster may ask for tenants")
            tenants = await self._engine().tenants(request.page_token, found)
            names = page_by_id(tenants, lambda name: name, page_token=request.page_token, found=found)
            return pb.ListContextsResponse(tenants=names.entries, next_page_token=names.next_page_token)
        contexts = await self._engine().list(caller, request.page_token, found, request.include_program_contexts)
        page = page_by_id(contexts, lambda info: info.context_id, page_token=request.page_token, found=found)
        return pb.ListContextsResponse(
            contexts=[convert.context_info_to_proto(info) for info in page.entries],
            next_page_token=page.next_page_token,
        )

    async def watch_contexts(
        self, caller: Caller, request: pb.WatchContextsRequest
    ) -> AsyncGenerator[pb.WatchContextsResponse, None]:
        events = self._engine().watch(caller, request.include_program_contexts)
        async with closing(events):
            async for event in events:
                yield convert.context_event_to_proto(event)

    async def compare(self, caller: Caller, request: pb.CompareRequest) -> pb.CompareResponse:
        comparison = await self._engine().compare(caller, request.a, request.b)
        return convert.comparison_to_proto(comparison)

    async def update_context(self, caller: Caller, request: pb.UpdateContextRequest) -> pb.UpdateContextResponse:
        info = await self._engine().update(
            caller, request.context_id, convert.update_context_request_from_proto(request)
        )
        return pb.UpdateContextResponse(context=convert.context_info_to_proto(info))

    async def plan(self, caller: Caller, request: pb.PlanRequest) -> pb.PlanResponse:
        model = self._lifecycle.model(request.model_id)
        context_id = request.context_id or None
        position = ExistingContext(model, caller, context_id) if context_id else EmptyContext()
        tokens = await model.texts.tokens(request, position)
        adapter = adapter_of(model.engine, request.model_id, request.adapter)
        result = await model.engine.plan(caller, tokens, context_id=context_id, salt=request.salt, adapter=adapter)
        return convert.plan_result_to_proto(result)

    async def reserve_pages(self, caller: Caller, request: pb.ReservePagesRequest) -> pb.ReservePagesResponse:
        info = await self._engine().reserve_pages(caller, request.context_id, request.pages)
        return pb.ReservePagesResponse(context=convert.context_info_to_proto(info))

    async def commit_pages(self, caller: Caller, request: pb.CommitPagesRequest) -> pb.CommitPagesResponse:
        info = await self._engine().commit_pages(caller, request.context_id, request.pages)
        return pb.CommitPagesResponse(context=convert.context_info_to_proto(info))

    async def release_pages(self, caller: Caller, request: pb.ReleasePagesRequest) -> pb.ReleasePagesResponse:
        info = await self._engine().release_pages(caller, request.context_id, request.pages)
        return pb.ReleasePagesResponse(context=convert.context_info_to_proto(info))

    async def close_context(self, caller: Caller, request: pb.CloseContextRequest) -> pb.CloseContextResponse:
        await self._engine().close(caller, request.context_id)
        return pb.CloseContextResponse()


def adapter_of(engine: Engine, model_id: str, adapter: str) -> str:
    """The adapter that a request asks for, by its own field or as the model; empty: none.

    Raises InvalidArgument if it asks for two.
    """
    if model_id in ("", engine.info.model_id):
        return adapter
    if adapter not in ("", model_id):
        raise InvalidArgument.field("adapter", f"must be {model_id}, which model_id names, or empty")
    return model_id


class ExistingContext(ContentPosition):
    """The end of a context of the engine."""

    def __init__(self, model: LocalModel, caller: Caller, context_id: str) -> None:
        self._model = model
        self._caller = caller
        self._context_id = context_id

    async def is_empty(self) -> bool:
        info = (await self._model.engine.inspect(self._caller, self._context_id)).context
        return info.seq_len + info.buffered_tokens == 0

    async def tokens(self) -> Sequence[int]:
        result = await self._model.engine.inspect(self._caller, self._context_id, include_tokens=True)
        return () if result.tokens is None else result.tokens.ids
