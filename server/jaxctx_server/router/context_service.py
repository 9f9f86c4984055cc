"""ContextService of a router."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from jaxctx.engine.interface import Caller
from jaxctx.errors import NotFound, PermissionDenied, Unavailable
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import Context
from jaxctx_server.call_record import current_record
from jaxctx_server.metrics.generations import GenerationMetrics
from jaxctx_server.router.engines import set_engine_id
from jaxctx_server.router.forwarding import ForwardedCall, Forwarder
from jaxctx_server.router.listing import Lister, entries_to_ask_for
from jaxctx_server.router.migration import Migrator
from jaxctx_server.router.placement import PlacementTable
from jaxctx_server.router.planning import Planner
from jaxctx_server.router.watch import Watcher
from jaxctx_server.service.paging import page_by_id


class RouterContextService:
    """Implements `jaxctx_server.service.interface.ContextService`."""

    def __init__(
        self,
        forwarder: Forwarder,
        lister: Lister,
        planner: Planner,
        watcher: Watcher,
        placements: PlacementTable,
        migrator: Migrator,
        generations: GenerationMetrics | None = None,
    ) -> None:
        """`generations`: where outputs are counted."""
        self._forwarder = forwarder
        self._lister = lister
        self._planner = planner
        self._watcher = watcher
        self._placements = placements
        self._migrator = migrator
        self._generations = generations or GenerationMetrics()

    async def create_context(self, caller: Caller, request: pb.CreateContextRequest) -> pb.CreateContextResponse:
        call = ForwardedCall(
            caller=caller,
            request=request,
            context_id=request.context_id,
            model_id=request.adapter or request.model_id,
            is_work=True,
        )
        with adapter_errors(request.adapter):
            handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.CreateContext)
        set_engine_id([response.context], handle)
        request.context_id = response.context.context_id  # so that it can be made anew on another engine
        self._placements.remember(caller.tenant, handle, response.context, created=request)
        return response

    async def fill(self, caller: Caller, request: pb.FillRequest) -> pb.FillResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Fill)
        current_record().add_fill(response.resident, response.restored, response.computed)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def flush(self, caller: Caller, request: pb.FlushRequest) -> pb.FlushResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Flush)
        current_record().add_fill(response.resident, response.restored, response.computed)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def generate(self, caller: Caller, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        with self._generations.measure(request) as measured:
            async with aclosing(self._forwarder.stream(call, lambda engine: engine.contexts.Generate)) as responses:
                async for handle, response in responses:
                    self._placements.record_response(caller.tenant, handle, response.context)
                    measured.observe(response, handle.engine.info.model_id)
                    yield response

    async def forward(self, caller: Caller, request: pb.ForwardRequest) -> pb.ForwardResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Forward)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def fork(self, caller: Caller, request: pb.ForkRequest) -> pb.ForkResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id, is_work=True)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Fork)
        for child in response.contexts:
            self._placements.record_response(caller.tenant, handle, child)
        return response

    async def truncate(self, caller: Caller, request: pb.TruncateRequest) -> pb.TruncateResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Truncate)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def rewind(self, caller: Caller, request: pb.RewindRequest) -> pb.RewindResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Rewind)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def switch_adapter(self, caller: Caller, request: pb.SwitchAdapterRequest) -> pb.SwitchAdapterResponse:
        """An engine that has not loaded the adapter leaves the context to one that has, if that can take it."""
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        try:
            handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.SwitchAdapter)
        except NotFound as error:
            if error.reason != "ADAPTER_NOT_FOUND":
                raise
            await self.get_context(caller, pb.GetContextRequest(context_id=request.context_id))  # finds its engine
            if not await self._migrator.move_to_adapter(call.context_key, request.adapter):
                raise
            handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.SwitchAdapter)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def get_context(self, caller: Caller, request: pb.GetContextRequest) -> pb.GetContextResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.GetContext)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def list_contexts(self, caller: Caller, request: pb.ListContextsRequest) -> pb.ListContextsResponse:
        if request.tenants_only:
            raise PermissionDenied("tenants_only: only the router itself may ask for tenants")
        asked = pb.ListContextsRequest(
            limit=entries_to_ask_for(request.limit),
            page_token=request.page_token,
            include_program_contexts=request.include_program_contexts,
        )
        contexts: list[Context] = []
        for handle, response in await self._lister.pages(lambda engine: engine.contexts.ListContexts, caller, asked):
            set_engine_id(response.contexts, handle)
            contexts += response.contexts
        contexts.sort(key=lambda context: context.version)  # of a context on two engines the latest version is listed
        page = page_by_id(contexts, lambda context: context.context_id, page_token=asked.page_token, found=asked.limit)
        return pb.ListContextsResponse(contexts=page.entries, next_page_token=page.next_page_token)

    async def watch_contexts(
        self, caller: Caller, request: pb.WatchContextsRequest
    ) -> AsyncGenerator[pb.WatchContextsResponse, None]:
        async with aclosing(self._watcher.watch(caller, request)) as changes:
            async for change in changes:
                yield change

    async def compare(self, caller: Caller, request: pb.CompareRequest) -> pb.CompareResponse:
        call = ForwardedCall(caller=caller, request=request)
        try:
            _, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Compare)
            return response
        except (NotFound, Unavailable) as error:
            if isinstance(error, Unavailable) and error.reason != "ENGINE_LOST":
                raise
        # No engine has both; and whether one that is away has them is found out for each by itself.
        return compare_tokens(await self._tokens(caller, request.a), await self._tokens(caller, request.b))

    async def update_context(self, caller: Caller, request: pb.UpdateContextRequest) -> pb.UpdateContextResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.UpdateContext)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def plan(self, caller: Caller, request: pb.PlanRequest) -> pb.PlanResponse:
        """The plan of a new context, on the engine that would get it."""
        if request.context_id:
            call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        else:
            with adapter_errors(request.adapter):
                plans = await self._planner.plans(caller, request)
            if plans:
                return next(iter(plans.values()))
            call = ForwardedCall(caller=caller, request=request, model_id=request.adapter or request.model_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.contexts.Plan)
        return response

    async def reserve_pages(self, caller: Caller, request: pb.ReservePagesRequest) -> pb.ReservePagesResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.ReservePages)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def commit_pages(self, caller: Caller, request: pb.CommitPagesRequest) -> pb.CommitPagesResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.CommitPages)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def release_pages(self, caller: Caller, request: pb.ReleasePagesRequest) -> pb.ReleasePagesResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        handle, response = await self._forwarder.ask(call, lambda engine: engine.contexts.ReleasePages)
        self._placements.record_response(caller.tenant, handle, response.context)
        return response

    async def close_context(self, caller: Caller, request: pb.CloseContextRequest) -> pb.CloseContextResponse:
        call = ForwardedCall(caller=caller, request=request, context_id=request.context_id)
        _, response = await self._forwarder.ask(call, lambda engine: engine.contexts.CloseContext)
        self._placements.forget(call.context_key)
        return response

    async def _tokens(self, caller: Caller, context_id: str) -> Sequence[int]:
        """All tokens of a context."""
        request = pb.GetContextRequest(context_id=context_id, include_tokens=True)
        return (await self.get_context(caller, request)).tokens.ids


@contextmanager
def adapter_errors(adapter: str) -> Iterator[None]:
    """Raise NotFound (ADAPTER_NOT_FOUND) where no engine has the adapter that a request names."""
    try:
        yield
    except NotFound as error:
        if not adapter or error.reason != "MODEL_NOT_FOUND":
            raise
        raise NotFound(f"no adapter {adapter!r} is loaded", reason="ADAPTER_NOT_FOUND") from error


def compare_tokens(a: Sequence[int], b: Sequence[int]) -> pb.CompareResponse:
    """The comparison of two contexts on different engines, which share no page but may have tokens in common."""
    common = 0
    for token_a, token_b in zip(a, b, strict=False):
        if token_a != token_b:
            break
        common += 1
    return pb.CompareResponse(common_tokens=common, length_a=len(a), length_b=len(b))
