# ruff: noqa: N802 - gRPC names the methods
"""A router's way to its engines, which come and go: every call that is no program's goes as it came to the engine that is
its place.

What a call is about, a context or a snapshot, is on one engine, which is asked first if it is remembered; then others
are, the least loaded first, until one knows it: NotFound says that nothing was done. While an engine that may come back
cannot be asked, that is Unavailable (ENGINE_LOST) instead. A new context is made on the least loaded engine. Nothing is
known of its prompt then: with its first fill, if that comes next, all engines say what they would have to do (Plan),
and it is made anew where most of the prompt is cached. Contexts of an engine that leaves go on at others.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, cast
from urllib.parse import unquote
from weakref import WeakValueDictionary

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxctx.engine.interface import Caller, is_of_program
from jaxctx.engine.remote import RemoteEngine, engine_lost
from jaxctx.errors import AlreadyExists, FailedPrecondition, JaxctxError, NotFound, Unavailable
from jaxctx.programs.engine_registry import EngineHandle
from jaxctx.services import METHODS, SERVICES
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_pb2 import CONTEXT_STATE_BUSY as BUSY
from jaxctx.v1.engine_service_pb2 import RegisterRequest, RegisterResponse
from jaxctx.v1.rules_pb2 import found_by, work
from jaxctx_server.grpc.interceptor import Context
from jaxctx_server.grpc.service import Service, page_of
from jaxctx_server.lifecycle import ServerLifecycle

ROUTED = ("ContextService", "SnapshotService", "ModelService")  # what a router has engines answer
MOST_HOMES = 1 << 17  # contexts whose engine is remembered; the latest used
MOST_LISTED = 1000  # entries that an engine may be asked for at once
WATCH_BUFFER = 64  # changes that wait for a reader
LOOK_S, PAUSE_S = 1.0, 0.1  # how often a watch looks for engines that came or went, and before it begins anew
PLAN_TIMEOUT_S, MOVE_TIMEOUT_S = 0.25, 10.0  # for others to say what a first fill would take, and for making it anew
CARRY_TIMEOUT_S, CARRIED_AT_ONCE = 60.0, 8  # for a context of an engine that leaves to be at another; and how many
draining = partial(Unavailable, "the server is draining", reason="DRAINING", retry_after_s=5.0)


@dataclass(slots=True)
class Home:
    """Where a context is, or was. `created` is how, until something else is asked of it."""

    node: EngineHandle
    created: pb.CreateContextRequest | None = None
    moving: asyncio.Task[Any] | None = None


class Router(Service):
    """EngineService, and the services that engines answer, in a router. Lives on the event loop."""

    def __init__(self, serving: ServerLifecycle, clock: Callable[[], float], cluster_key: str) -> None:
        super().__init__(serving, clock)
        self._cluster_key = cluster_key
        self._homes: OrderedDict[tuple[str, str], Home] = OrderedDict()  # by tenant and id
        # What is being made: by tenant, the method that finds it, and id.
        self._making: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()
        # Contexts that calls are at work on, by tenant and id.
        self._at_work: WeakValueDictionary[tuple[str, str], nullcontext[None]] = WeakValueDictionary()

    async def Register(self, request: RegisterRequest, context: Context) -> AsyncIterator[RegisterResponse]:
        served, _ = self.valid(context, request)
        if served.model is not None:
            raise FailedPrecondition("this server is no router", reason="WRONG_ROLE")
        programs, engines = served.programs, served.programs.dispatcher.engines
        peer = unquote(context.peer()).partition(":")[2].rpartition(":")[0]  # of ipv4:10.0.0.7:41234, or a Unix socket
        address = f"{peer or '127.0.0.1'}:{request.port}"
        if request.leaving:
            if (node := engines.handles.get(address)) is not None:
                await self._vacate(node)
            return
        reached = RemoteEngine(address, request.incarnation, self._cluster_key, self._clock, engines.silence_s)
        async with aclosing(reached) as engine:
            await engine.stats()  # Unavailable if it cannot be reached there
            attending = asyncio.create_task(engines.watch(address, engine, engine.encode))
            before, programs.watching[address] = programs.watching.get(address), attending
            try:
                if before is not None:
                    before.cancel()  # its call may have ended unnoticed
                await asyncio.sleep(0)  # it begins by registering
                yield RegisterResponse(epoch=engines.handles[address].epoch)
                await asyncio.wait([attending])
            finally:
                attending.cancel()
                await asyncio.wait([attending])

    async def answer(self, rpc: str, caller: Caller, request: Any) -> Any:
        """The only response of `responses`."""
        async with aclosing(self.responses(rpc, caller, request)) as responses:
            return await anext(responses)

    async def responses(self, rpc: str, caller: Caller, request: Any) -> AsyncGenerator[Any, None]:
        """What the first engine answers that knows what this is about, and does not drain."""
        programs, errors = self._serving.served().programs, list[JaxctxError]()
        if (is_work := METHODS[rpc].GetOptions().Extensions[work]) and programs.draining:
            raise draining()
        async with self._accepted(caller, request, programs.working if is_work else set()):
            home = await self._home(rpc, caller, request)
            for node in self._places(rpc, request, home):
                node.forwarded += is_work
                try:
                    async with remote(node).begun(rpc, caller, request) as call:
                        async for response in call if METHODS[rpc].server_streaming else only(call):
                            self._learn(node, rpc, caller, request, response)
                            yield response
                    return
                except (NotFound, Unavailable, FailedPrecondition) as error:
                    if not isinstance(error, NotFound) and error.reason not in ("DRAINING", "MODEL_MISMATCH"):
                        raise
                    errors.append(error)
                finally:
                    node.forwarded -= is_work
        there = programs.dispatcher.engines.handles
        may_come_back = any(address not in there and not task.done() for address, task in programs.watching.items())
        was_lost = home is not None and home.node not in there.values()
        nobody = engine_lost() if there else programs.dispatcher.engines.no_engine_error()  # was asked
        told = min(errors, key=lambda error: isinstance(error, NotFound), default=nobody)
        raise engine_lost() if isinstance(told, NotFound) and (may_come_back or was_lost) else told

    async def listed(self, rpc: str, caller: Caller, request: Any) -> Any:
        """A page of what all engines have; what several have (a model, snapshots in one store) once."""
        request.limit, field = min(request.limit, MOST_LISTED), METHODS[rpc].output_type.fields[0].name
        told = await self._each(rpc, caller, request, NotFound)
        pages = told.values() or [await self.answer(rpc, caller, request)]  # which says why there is none
        return page_of(rpc, request, [each for page in pages for each in getattr(page, field)])

    async def plan(self, rpc: str, caller: Caller, request: pb.PlanRequest) -> Any:
        """Of a new context: what it would take on the engine that would get it."""
        plans = {} if request.context_id else await self._plans(caller, request)
        return next(iter(plans.values())) if plans else await self.answer(rpc, caller, request)

    async def compare(self, rpc: str, caller: Caller, request: pb.CompareRequest) -> Any:
        """Contexts on two engines share no pages, but may have tokens in common."""
        with suppress(NotFound):
            return await self.answer(rpc, caller, request)
        gets = [pb.GetContextRequest(context_id=each, include_tokens=True) for each in (request.a, request.b)]
        a, b = [(await self.answer("GetContext", caller, get)).tokens.ids for get in gets]
        parted = (place for place, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
        return pb.CompareResponse(common_tokens=next(parted, min(len(a), len(b))), length_a=len(a), length_b=len(b))

    async def watch(self, rpc: str, caller: Caller, request: pb.WatchContextsRequest) -> AsyncIterator[Any]:
        """The changes on all engines; when one comes, is lost, or has lost changes, all is told anew."""
        programs, reset = self._serving.served().programs, pb.WatchContextsResponse(change=pb.CONTEXT_CHANGE_RESET)
        there, caller = programs.dispatcher.engines.handles, replace(caller, deadline=None)

        async def read(node: EngineHandle, changes: asyncio.Queue[Any]) -> None:
            with suppress(JaxctxError):  # it is lost, which shows, or drains
                async with remote(node).begun(rpc, caller, request) as call:
                    async for change in call:
                        name_engine(change, node)
                        home = self._homes.get((caller.tenant, change.context_id))
                        if home is None or home.node is node or home.node not in there.values():  # else it moves
                            await changes.put(change)

        while True:
            nodes, changes = set(there.values()), asyncio.Queue[Any](WATCH_BUFFER)
            readers = {node: asyncio.create_task(read(node, changes)) for node in nodes}
            try:
                while nodes == set(there.values()) and not any(r.done() and not n.draining for n, r in readers.items()):
                    if programs.draining:
                        raise draining()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            change = await changes.get()
                        if change.change == reset.change:
                            break
                        yield change
            finally:
                for reader in readers.values():
                    reader.cancel()
            await asyncio.sleep(PAUSE_S)
            reset.at.GetCurrentTime()
            yield reset

    async def _home(self, rpc: str, caller: Caller, request: Any) -> Home | None:
        """Where the context is that this is about, if that is remembered; where it will be, if it is first filled."""
        key = caller.tenant, getattr(request, "context_id", "")
        if (home := self._homes.get(key)) is not None:
            self._homes.move_to_end(key)
            created, home.created = home.created, None
            if created and rpc == "Fill" and home.moving is None and len(self._places(rpc, created)) > 1:
                home.moving = asyncio.create_task(self._move(home, created, request, caller))
            if home.moving is not None:
                await asyncio.wait([home.moving])  # whatever becomes of that: the context is at one place then
        return home

    async def _move(self, home: Home, created: pb.CreateContextRequest, fill: pb.FillRequest, caller: Caller) -> None:
        """Make an empty context anew on the engine that has the least to do for its first fill."""
        caller = replace(caller, deadline=self._clock() + MOVE_TIMEOUT_S)  # whatever becomes of the fill
        content = {each.name: value for each, value in fill.ListFields() if each.name not in ("context_id", "defer")}
        plan = pb.PlanRequest(model_id=created.model_id, salt=created.salt, **content)
        with suppress(JaxctxError):  # then it stays where it is
            soon = replace(caller, deadline=self._clock() + PLAN_TIMEOUT_S)  # a busy engine is none to move to
            best = next(iter(await self._plans(soon, plan)), home.node)
            if best is not home.node:
                await remote(best).ask("CreateContext", caller, created)
                before, home.node = home.node, best
                await remote(before).close(caller, created.context_id)

    async def _vacate(self, node: EngineHandle) -> None:
        """Begin nothing more on an engine; its contexts go on elsewhere, each once no call is at work on it."""
        node.draining, tried = True, {key for key, home in self._homes.items() if home.node is node}  # if still there
        for tenant in {"", *(tenant for tenant, _ in self._homes)}:  # this router may not have heard of all of them
            page = pb.ListContextsRequest(limit=MOST_LISTED)
            while listed := (await remote(node).ask("ListContexts", Caller(tenant), page)).contexts:
                for each in listed:
                    self._homes.setdefault((tenant, each.context_id), Home(node))
                    tried.discard((tenant, each.context_id))
                page.page_token = listed[-1].context_id
        while (here := {key for key, home in self._homes.items() if home.node is node} - tried) or node.forwarded:
            idle = [key for key in here if key not in self._at_work][:CARRIED_AT_ONCE]
            moves = [asyncio.create_task(self._carry(self._homes[key], *key)) for key in idle]
            for key, move in zip(idle, moves, strict=True):
                self._homes[key].moving = move
            await asyncio.wait([*moves, asyncio.create_task(asyncio.sleep(PAUSE_S))])  # they go on if this is cancelled
            tried.update(key for key, move in zip(idle, moves, strict=True) if not move.result())

    async def _carry(self, home: Home, tenant: str, context_id: str) -> bool:
        """Have an idle context go on at the least loaded engine, by way of a store that both have. Only when it is
        there is the old one closed. If anything fails that stays, and what was made elsewhere ends. True: it was busy.
        """
        caller, name = Caller(tenant, self._clock() + CARRY_TIMEOUT_S), f"moving-{secrets.token_hex(16)}"
        kept, old = {"name": name, "ttl": {"duration": timedelta(seconds=CARRY_TIMEOUT_S)}}, remote(home.node)
        with suppress(JaxctxError):
            told = (await old.ask("GetContext", caller, context_id=context_id)).context
            node = next(iter(self._places("CreateContext", told)), home.node)
            is_programs = is_of_program(dict(told.labels))  # and made anew when that goes on elsewhere
            if node.draining or is_programs or told.state == BUSY:
                return told.state == BUSY and not is_programs
            new, end, node.forwarded = remote(node), told.expiry, node.forwarded + 1  # if that leaves, too, it waits
            try:
                now = (await old.ask("Save", caller, context_id=context_id, durable=True, **kept)).snapshot.created_at
                pin_for = told.pinned_until - now if told.HasField("pinned_until") else None
                settings = {"priority": told.priority, "pinned": told.pinned, "pin_for": pin_for}
                await new.ask("Take", caller, context_id=context_id, **settings, **kept)
                try:
                    ttl = {"duration": end.duration if end.sliding else end.at - now, "sliding": end.sliding}
                    settings = {"labels": {"labels": told.labels}, "ttl": ttl if told.HasField("expiry") else {}}
                    await new.ask("UpdateContext", caller, context_id=context_id, **settings)
                    home.node = node
                finally:  # nobody is to find the other one, which goes no further
                    await (old if home.node is node else new).close(Caller(tenant), context_id)
            finally:
                node.forwarded -= 1
                await old.ask("DeleteSnapshot", caller, name=name)  # or know that it was taken
        return False

    async def _plans(self, caller: Caller, plan: pb.PlanRequest) -> dict[EngineHandle, Any]:
        """What engines would do; first the one with most of it cached that has room, else the least loaded."""

        def order(planned: tuple[EngineHandle, Any]) -> tuple[bool, bool, int, float]:
            node, told = planned
            return node.draining, told.pages_needed > told.pages_available, -told.resident - told.restored, node.load

        return dict(sorted((await self._each("Plan", caller, plan, JaxctxError)).items(), key=order))

    async def _each(self, rpc: str, caller: Caller, request: Any, quiet: type[JaxctxError]) -> dict[EngineHandle, Any]:
        """What each engine answers, save for those that raise such an error."""

        async def ask(node: EngineHandle) -> Any:
            with suppress(quiet):
                return name_engine(await remote(node).ask(rpc, caller, request), node)

        nodes = self._places(rpc, request)
        told = zip(nodes, await asyncio.gather(*map(ask, nodes)), strict=True)
        return {node: answer for node, answer in told if answer is not None}

    def _places(self, rpc: str, request: Any, home: Home | None = None) -> list[EngineHandle]:
        """The engines to ask, the likeliest first; where the request says which model, those of that."""
        engines = self._serving.served().programs.dispatcher.engines
        nodes = list(engines.handles.values())
        if hasattr(request, "model_id") and not (rpc == "Plan" and request.context_id):
            nodes = engines.serving(engines.find_model(request.model_id)[0])
        return sorted(nodes, key=lambda node: (home is None or node is not home.node, node.draining, node.load))

    @asynccontextmanager
    async def _accepted(self, caller: Caller, request: Any, working: set[object]) -> AsyncIterator[None]:
        """Around a call, which is among those that work. If it makes something, nothing has, or is given meanwhile, an
        id that the request chooses for that.
        """
        async with AsyncExitStack() as stack:
            working.add(stack)
            stack.callback(working.discard, stack)
            about = caller.tenant, getattr(request, "context_id", "")
            stack.enter_context(self._at_work.setdefault(about, nullcontext()))
            for find, chosen in choices(request):
                making = self._making.setdefault((caller.tenant, find, chosen), asyncio.Lock())
                await stack.enter_async_context(making)
                if find == "GetContext":
                    await self._home(find, caller, pb.GetContextRequest(context_id=chosen))  # if that moves: until then
                    self._homes.pop((caller.tenant, chosen), None)  # what was on a lost engine can be made again
                kind = GetMessageClass(METHODS[find].input_type)
                with suppress(NotFound):
                    await self.answer(find, caller, kind(**{kind.DESCRIPTOR.fields[0].name: chosen}))
                    raise AlreadyExists(f"there is {chosen!r} already")
            yield

    def _learn(self, node: EngineHandle, rpc: str, caller: Caller, request: Any, response: Any) -> None:
        """Remember, and have the response tell, where the contexts are that it is about."""
        for context in contexts_of(name_engine(response, node)):
            home = self._homes[caller.tenant, context.context_id] = Home(node)
            if rpc == "CreateContext":
                home.created = request
                request.context_id = context.context_id
        if rpc == "CloseContext":
            self._homes.pop((caller.tenant, request.context_id), None)
        while len(self._homes) > MOST_HOMES:
            self._homes.popitem(last=False)


def remote(node: EngineHandle) -> RemoteEngine:
    """A router has no other engines."""
    return cast(RemoteEngine, node.engine)


async def only(call: Any) -> AsyncIterator[Any]:
    """The response of a call that has one, as a stream."""
    yield await call


def contexts_of(response: Any) -> list[Any]:
    """The contexts that a response tells the counters of."""
    if hasattr(response, "contexts"):
        told = list(response.contexts)
    else:
        told = [response.context] if hasattr(response, "context") else []
    return [context for context in told if context.context_id]


def name_engine(response: Any, node: EngineHandle) -> Any:
    """The response of an engine, which knows itself only as the one of its process, with the engine's name here."""
    for context in contexts_of(response):
        context.engine_id = node.id
    return response


def choices(request: Any) -> Iterator[tuple[str, str]]:
    """Ids and names that a request chooses for what it makes, each with the method that finds it."""
    for field, value in request.ListFields():
        if (find := field.GetOptions().Extensions[found_by]) and not getattr(request, "overwrite_version", None):
            yield from ((find, each) for each in sorted(value if field.is_repeated else [value]))


def forwarded(method: MethodDescriptor) -> Callable[[Router, Any, Context], Any]:
    """A method of the contract, as engines answer it."""
    special = {"Plan": Router.plan, "Compare": Router.compare, "WatchContexts": Router.watch}
    is_list = "page_token" in method.input_type.fields_by_name
    answer: Any = Router.listed if is_list else Router.responses if method.server_streaming else Router.answer
    answer = special.get(method.name, answer)
    return lambda self, request, context: answer(self, method.name, self.valid(context, request)[1], request)


for each in (method for name in ROUTED for method in SERVICES[name].methods):
    setattr(Router, each.name, forwarded(each))
