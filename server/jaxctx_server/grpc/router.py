"""A core's way to its engines: every call that is no program's goes as it came to the engine that is its place.

A call about a context goes where the context is. That is remembered; where it is not (a fork, what was there before
this core), engines are asked one after the other until one knows what the call is about, as they are for snapshots and
publications: NotFound says that nothing was done. A new context is made on the least loaded engine. Nothing is known of
its prompt then, so with its first fill every engine says what it would have to do (Plan), and an empty context goes to
the one that has the longest prefix of it in its cache. Requests are checked by the engine that does them.
"""

import asyncio
import operator
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxctx.answers import PlanResult
from jaxctx.apps.engines import EngineNode, Engines, preferred
from jaxctx.codec import decode
from jaxctx.engine.interface import Caller
from jaxctx.engine.remote import RemoteEngine
from jaxctx.errors import AlreadyExists, JaxctxError, NotFound, Unavailable
from jaxctx.v1 import admin_service_pb2 as pb
from jaxctx.v1 import context_service_pb2
from jaxctx.v1.services import METHODS, SERVICES
from jaxctx_server.grpc.pipeline import Context, Handler
from jaxctx_server.grpc.service import ORDER, Service, one_more
from jaxctx_server.serving import Serving

ROUTED = ("ContextService", "SnapshotService", "ModelService", "AdminService")  # whose calls engines answer
MAKING = ("CreateContext", "Open", "Take")  # their context_id is that of a context to be
NEW_WORK = (*MAKING, "Fill", "Generate", "Forward", "Fork", "Flush")
LOOKING = ("GetContext", "Plan", "Compare")
MOST_HOMES = 1 << 17  # contexts whose place is remembered; the latest used
LOOK_S = 0.05  # how often a drain looks
WATCH_BUFFER = 64  # changes that wait for a reader
NEW_ENGINES_S = 1.0  # how often a watch looks for them


@dataclass(slots=True)
class Home:
    """Where a context is; `created` is how, as long as it is empty and nothing else was done to it."""

    node: EngineNode
    created: Message | None = None
    moving: asyncio.Task[None] | None = None


class Router(Service):
    """The services that engines answer, in a core. Lives on the event loop."""

    def __init__(self, serving: Serving, clock: Callable[[], float]) -> None:
        super().__init__(serving, clock)
        self._homes: OrderedDict[tuple[str, str], Home] = OrderedDict()  # by tenant and id
        self._making: set[tuple[str, str]] = set()  # contexts of ids that their callers chose
        self._working = 0  # calls of NEW_WORK under way
        self._draining = False

    @property
    def _engines(self) -> Engines:
        return self._serving.served().programs.dispatcher.engines

    def handlers(self) -> Iterator[grpc.GenericRpcHandler]:
        """For a server to add."""
        for service in (SERVICES[name] for name in ROUTED):
            methods = {method.name: self._handler(method) for method in service.methods}
            yield grpc.method_handlers_generic_handler(service.full_name, methods)

    def _handler(self, method: MethodDescriptor) -> "Handler":
        read, write = GetMessageClass(method.input_type).FromString, operator.methodcaller("SerializeToString")
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(partial(self._stream, method), read, write)
        return grpc.unary_unary_rpc_method_handler(partial(self._answer, method), read, write)

    async def drain(self) -> None:
        """Refuse new work, and return when no call computes and no program runs."""
        self._draining = True
        while self._working or any(node.running for node in self._engines.nodes.values()):
            await asyncio.sleep(LOOK_S)

    async def _stream(self, method: MethodDescriptor, request: Any, context: Context) -> AsyncIterator[Any]:
        caller = self.caller(context)
        make = self._watched if method.name == "WatchContexts" else self._routed
        async with self._new(method, request, caller), aclosing(cast(Any, make(method, request, caller))) as responses:
            async for response in responses:
                yield response

    async def _answer(self, method: MethodDescriptor, request: Any, context: Context) -> Any:
        caller, kind = self.caller(context), GetMessageClass(method.output_type)
        if method.name == "Drain":
            await self._serving.drain()
            return kind()
        if method.name == "GetStats":
            answers = await self._all(method, request, caller)
            engines = [(node, answer.engines[0]) for node, answer in answers.items()]
            return kind(
                engines=[pb.Engine(info=e.info, stats=e.stats, address=n.id, epoch=n.epoch) for n, e in engines]
            )
        if method.name == "ClearCache":
            answers = await self._all(method, request, caller)
            return kind(pages_dropped=sum(answer.pages_dropped for answer in answers.values()))
        if method.name in ORDER:
            return await self._listed(method, request, caller)
        if method.name == "Compare":
            return await self._compared(method, request, caller)
        if method.name == "Plan" and not request.context_id and (plans := await self._plans(request, caller)):
            return plans[preferred({node: decode(plan, PlanResult) for node, plan in plans.items()})]
        async with self._new(method, request, caller):
            return await self._one(method, request, caller)

    async def _one(self, method: MethodDescriptor, request: Any, caller: Caller) -> Any:
        async with aclosing(cast(Any, self._routed(method, request, caller))) as responses:
            return await anext(responses)

    async def _routed(self, method: MethodDescriptor, request: Any, caller: Caller) -> AsyncIterator[Any]:
        """What the first engine answers that knows what this is about."""
        home, errors, began = await self._home(method, request, caller), [], False
        for node in self._candidates(method, request, home):
            try:
                async with aclosing(cast(Any, remote(node).responses(method, request, caller))) as responses:
                    async for response in responses:
                        if not began:
                            began = True
                            self._learn(method, request, response, caller, node)
                        yield response
                return
            except (NotFound, Unavailable) as raised:
                if began or (home is not None and home.node is node and isinstance(raised, Unavailable)):
                    raise
                errors.append(raised)
        # An engine that could not be asked might have known.
        unasked = [each for each in errors if isinstance(each, Unavailable)]
        if not errors or (home is not None and home.node.id not in self._engines.nodes):
            unasked.append(
                Unavailable("its engine was lost, or there is none", reason="ENGINE_LOST", retry_after_s=1.0)
            )
        raise (unasked or errors)[-1]

    def _candidates(self, method: MethodDescriptor, request: Any, home: Home | None) -> list[EngineNode]:
        """The engines to ask, the likeliest first."""
        if method.name in MAKING:
            return self._engines.taking(getattr(request, "model_id", ""))
        nodes = self._engines.nodes.values()
        wanted = getattr(request, "model_id", "")
        here = [node for node in nodes if wanted in ("", node.engine.info.model_id)]
        return sorted(here, key=lambda node: (home is None or node is not home.node, node.draining, node.load))

    async def _home(self, method: MethodDescriptor, request: Any, caller: Caller) -> Home | None:
        """Where the context is that this is about, if that is known; the place that it has after its first fill."""
        if method.name in MAKING:
            return None
        home = self._homes.get((caller.tenant, getattr(request, "context_id", "")))
        if home is not None:
            if home.created is not None and method.name not in LOOKING:
                created, home.created = home.created, None
                if method.name == "Fill":
                    home.moving = asyncio.create_task(self._move(home, created, request, caller))
            if home.moving is not None:
                await asyncio.shield(home.moving)
        return home

    async def _move(self, home: Home, created: Any, fill: Any, caller: Caller) -> None:
        """Make an empty context anew on the engine that would have the least to compute of this fill."""
        content = {each.name: value for each, value in fill.ListFields() if each.name not in ("context_id", "defer")}
        plan = context_service_pb2.PlanRequest(model_id=created.model_id, salt=created.salt, **content)
        plans = {node: decode(each, PlanResult) for node, each in (await self._plans(plan, caller)).items()}
        if home.node in plans and (best := preferred(plans)) is not home.node:
            with suppress(JaxctxError):  # then it stays where it is
                await remote(best).ask(METHODS["CreateContext"], created, caller)
                before, home.node = home.node, best
                await remote(before).close(caller, created.context_id)

    def _learn(self, method: MethodDescriptor, request: Any, response: Any, caller: Caller, node: EngineNode) -> None:
        """Where a context is that was made, or asked about."""
        context_id = getattr(request, "context_id", "")
        if method.name in MAKING:
            context_id, node.placed = response.context.context_id, node.placed + 1
        if context_id:
            key = caller.tenant, context_id
            home = self._homes.setdefault(key, Home(node))
            home.node = node
            if method.name == "CreateContext":
                home.created = context_service_pb2.CreateContextRequest()
                home.created.CopyFrom(request)
                home.created.context_id = context_id
            self._homes.move_to_end(key)
            if method.name == "CloseContext" or len(self._homes) > MOST_HOMES:
                del self._homes[key if method.name == "CloseContext" else next(iter(self._homes))]

    @asynccontextmanager
    async def _new(self, method: MethodDescriptor, request: Any, caller: Caller) -> AsyncIterator[None]:
        """Around a call: it may begin, and no engine has or gets a context of the ids that it chooses."""
        chosen = request.child_ids if method.name == "Fork" else [request.context_id] if method.name in MAKING else ()
        ids = {(caller.tenant, each) for each in chosen if each}
        is_new_work = method.name in NEW_WORK
        if self._draining and is_new_work:
            raise Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)
        if ids & self._making:
            raise AlreadyExists("a context of this id is being made")
        self._making |= ids
        self._working += is_new_work
        try:
            for _, context_id in ids:
                with suppress(NotFound):
                    there = context_service_pb2.GetContextRequest(context_id=context_id)
                    await self._one(METHODS["GetContext"], there, caller)
                    raise AlreadyExists("there is a context of this id")
            yield
        finally:
            self._making -= ids
            self._working -= is_new_work

    async def _all(self, method: MethodDescriptor, request: Message, caller: Caller) -> dict[EngineNode, Any]:
        """What all engines answer. Raises the first error."""
        nodes = list(self._engines.nodes.values())
        answers = await asyncio.gather(*(remote(node).ask(method, request, caller) for node in nodes))
        return dict(zip(nodes, answers, strict=True))

    async def _plans(self, request: Any, caller: Caller) -> dict[EngineNode, Any]:
        """What filling a new context would take on each engine that takes work, and answers."""
        nodes = self._engines.taking(request.model_id)
        asked = (remote(node).ask(METHODS["Plan"], request, caller) for node in nodes)
        plans = zip(nodes, await asyncio.gather(*asked, return_exceptions=True), strict=True)
        return {node: plan for node, plan in plans if not isinstance(plan, BaseException)}

    async def _listed(self, method: MethodDescriptor, request: Any, caller: Caller) -> Any:
        """A page of what all engines have; what several have (snapshots in one store) comes once."""
        by, kind = ORDER[method.name], GetMessageClass(method.output_type)
        answers = (await self._all(method, request, caller)).values()
        field = kind.DESCRIPTOR.fields[0].name
        entries = {getattr(each, by): each for answer in answers for each in getattr(answer, field)}
        order = sorted(entries, reverse=by == "version")[: one_more(request) - 1]
        page: Any = kind(**{field: [entries[each] for each in order]})
        if order and (len(entries) > len(order) or any(answer.next_page_token for answer in answers)):
            page.next_page_token = str(order[-1])
        return page

    async def _compared(self, method: MethodDescriptor, request: Any, caller: Caller) -> Any:
        """Contexts on two engines share no pages, but they have tokens in common."""
        with suppress(NotFound):
            return await self._one(method, request, caller)
        ids = []
        for context_id in (request.a, request.b):
            get = context_service_pb2.GetContextRequest(context_id=context_id, include_tokens=True)
            ids.append((await self._one(METHODS["GetContext"], get, caller)).tokens.ids)
        parted = (place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
        a, b = map(len, ids)
        return context_service_pb2.CompareResponse(common_tokens=next(parted, min(a, b)), length_a=a, length_b=b)

    async def _watched(self, method: MethodDescriptor, request: Any, caller: Caller) -> AsyncIterator[Any]:
        """Changes on all engines, and on each that comes. What was on one that is lost ends without a word."""
        changes: asyncio.Queue[Any] = asyncio.Queue(WATCH_BUFFER)
        readers: dict[EngineNode, asyncio.Task[None]] = {}

        async def read(node: EngineNode) -> None:
            with suppress(JaxctxError):
                async with aclosing(cast(Any, remote(node).responses(method, request, caller))) as responses:
                    async for change in responses:
                        await changes.put(change)

        try:
            while not self._draining:
                for node in self._engines.nodes.values():
                    if node not in readers:
                        readers[node] = asyncio.create_task(read(node))
                with suppress(TimeoutError):
                    yield await asyncio.wait_for(changes.get(), NEW_ENGINES_S)
            raise Unavailable("the server is draining", reason="DRAINING", retry_after_s=5.0)
        finally:
            for reader in readers.values():
                reader.cancel()


def remote(node: EngineNode) -> RemoteEngine:
    """A core has no other engines."""
    return cast(RemoteEngine, node.engine)
