"""A router and its engines, each a server of its own, over gRPC in one process."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

import jaxctx
from jaxctx import convert, errors
from jaxctx import types as requests
from jaxctx.engine.engine import LocalEngine
from jaxctx.engine.interface import Caller as Asker
from jaxctx.engine.remote import INCARNATION_HEADER, TENANT_HEADER, RemoteEngine, authorization_metadata
from jaxctx.rpc import from_rpc_error
from jaxctx.v1 import context_service_pb2
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.engine_service_pb2 import RegisterRequest
from jaxctx.v1.engine_service_pb2_grpc import EngineServiceStub
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub
from jaxctx_server.auth import Key, Role
from jaxctx_server.cluster import ALONE, Cluster, register_with_router
from jaxctx_server.grpc.server import make_server
from jaxctx_server.lifecycle import ServerLifecycle, ServingState
from jaxctx_server.validate import Limits
from tests.e2e.conftest import CONFIG, served
from tests.e2e.program_callers import SYSTEM, Caller, forked_while_it_lives, out
from tests.engines import Clock, context_info

KEY = "the cluster's key, of which nobody knows" * 2
USERS = [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]


@dataclass
class RouterCluster:
    """A router, and servers of engines that may join it."""

    clock: Clock
    keys: list[Key] | None
    cluster: Cluster
    router: str = ""
    programs: Any = None
    lifecycle: Any = None
    server: Any = None
    engines: dict[str, LocalEngine] = field(default_factory=dict)  # by address
    registrations: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    own: dict[str, Cluster] = field(default_factory=dict)  # as each engine knows it

    @property
    def handles(self) -> dict[str, Any]:
        return dict(self.programs.dispatcher.engines.handles)

    async def register(self, address: str, cluster: Cluster | None = None) -> None:
        """An engine joins, as this process, or again as the one it was."""
        port, own = int(address.rpartition(":")[2]), self.own.setdefault(address, cluster or self.cluster)
        self.registrations[address] = asyncio.create_task(register_with_router(self.router, own, port))
        await until(lambda: address in self.handles)

    def leave(self, address: str) -> None:
        self.registrations.pop(address).cancel()


async def until(holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
def cluster() -> Cluster:
    return ALONE


@asynccontextmanager
async def router_of(router_cluster: RouterCluster, port: int = 0) -> AsyncIterator[None]:
    lifecycle = ServerLifecycle()
    server = make_server(
        lifecycle,
        router_cluster.keys,
        max_calls=1024,
        clock=router_cluster.clock,
        cluster=router_cluster.cluster,
        is_router=True,
    )
    router_cluster.router = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    router = ServingState.router(Limits(queue_limit=64), router_cluster.clock)
    lifecycle.set_ready(router)
    router_cluster.programs, router_cluster.lifecycle, router_cluster.server = router.programs, lifecycle, server
    yield
    lifecycle.stop()
    await server.stop(None)


@pytest.fixture
async def router_cluster(
    make_engine: Any, echo_served: Any, clock: Clock, keys: Any, cluster: Cluster
) -> AsyncIterator[RouterCluster]:
    """A router that two engines have joined."""
    accepted = None if keys is None else [*keys, cluster.accepted]
    found = RouterCluster(clock, accepted, cluster)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(found))
        for name in ("a", "b"):  # revisions of their own, or they would share a test's device
            engine, own = make_engine(CONFIG, replace(echo_served, revision=name), whole=False), Cluster(cluster.key)
            address = await stack.enter_async_context(served(engine, CONFIG, clock, accepted, own))
            found.engines[address] = engine
            await found.register(address, own)
        yield found
        for task in found.registrations.values():
            task.cancel()


@asynccontextmanager
async def caller_of(router_cluster: RouterCluster, key: str | None = None) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        yield await Caller(SessionServiceStub(channel), key).begin()


@pytest.fixture
async def caller(router_cluster: RouterCluster) -> AsyncIterator[Caller]:
    async with caller_of(router_cluster) as caller:
        yield caller


async def alone(address: str, prompt: str, tokens: int) -> str:
    async with (
        jaxctx.aio.Client(address, timeout_s=60) as client,
        await client.create(prompt, salt="alone") as context,
    ):
        return str(await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True))


async def test_a_program_says_what_each_prompt_says_alone(router_cluster: RouterCluster, caller: Caller) -> None:
    topic = (await caller("CreateVariable", name="topic")).variable.variable_id
    drafts = await caller.call(SYSTEM + "Draft {{topic}}: {{draft}}", topic={"variable_id": topic}, draft=out())
    review = await caller.call(
        "Of {{text}}: {{a}} and {{b}}", text={"variable_id": drafts["draft"]}, a=out(5), b=out(4)
    )
    await caller("SetVariable", variable_id=topic, text="pages")
    text = await caller.get(review["b"])
    address = next(iter(router_cluster.engines))
    draft = await alone(address, SYSTEM + "Draft pages: ", 8)
    assert await caller.get(drafts["draft"]) == draft
    first = await caller.get(review["a"])
    assert first == await alone(address, f"Of {draft}: ", 5)
    assert text
    assert "".join([part.text async for part in caller.read(review["b"])]) == text
    tasks = (await caller("GetGraph")).tasks
    assert {each.engine_id for each in tasks} <= router_cluster.engines.keys()
    await caller("DeleteSession")
    held = [await engine.list(Asker(), include_program_contexts=True) for engine in router_cluster.engines.values()]
    assert all(len(contexts) <= 1 for contexts in held)  # constant prefixes


async def test_eight_latency_calls_sit_four_and_four(router_cluster: RouterCluster, caller: Caller) -> None:
    ids = [(await caller.call("Say {{o}}" + " " * n, o=out(300)))["o"] for n in range(8)]
    reads = [asyncio.create_task(caller.get(each)) for each in ids]
    await until(lambda: sum(len(node.running) for node in router_cluster.handles.values()) == 8)
    assert [len(node.running) for node in router_cluster.handles.values()] == [4, 4]
    assert all(await asyncio.gather(*reads))


async def test_the_router_tells_of_its_engines(router_cluster: RouterCluster) -> None:
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=10) as client:
        await until(lambda: all(node.stats for node in router_cluster.handles.values()))
        told = await client.engines()
        assert [(each.address, each.epoch) for each in told] == [
            (a, n) for n, a in enumerate(router_cluster.engines, 1)
        ]
        assert told[0].info == next(iter(router_cluster.engines.values())).info


async def test_an_engine_that_leaves_in_the_middle_of_an_output(router_cluster: RouterCluster, caller: Caller) -> None:
    """Its part is kept, and the rest comes from the other; what was there is not said twice."""
    ids = await caller.call("Tell: {{story}}", story=out(400))
    parts: list[str] = []

    async def read() -> None:
        async for part in caller.read(ids["story"]):
            parts.append(part.text)

    reading = asyncio.create_task(read())
    await until(lambda: len(parts) > 3)
    (busy,) = [address for address, node in router_cluster.handles.items() if node.running]
    router_cluster.leave(busy)
    await until(lambda: busy not in router_cluster.handles)
    before = "".join(parts)
    await reading
    text = await caller.get(ids["story"])
    assert "".join(parts) == text
    assert text.startswith(before)
    (task,) = (await caller("GetGraph")).tasks
    assert task.engine_id in router_cluster.engines.keys() - {busy}


async def test_a_new_router_finds_its_engines_again(router_cluster: RouterCluster, clock: Clock) -> None:
    port = int(router_cluster.router.rpartition(":")[2])
    router_cluster.lifecycle.stop()
    await router_cluster.server.stop(None)
    again = RouterCluster(clock, None, ALONE)
    async with router_of(again, port):
        await until(lambda: again.handles.keys() == router_cluster.engines.keys())
        async with caller_of(again) as caller:
            assert await caller.get((await caller.call("Say {{o}}", o=out()))["o"])


async def test_what_a_router_leaves_behind_ends_by_itself(
    router_cluster: RouterCluster, caller: Caller, clock: Clock
) -> None:
    """A router that is killed closes nothing; its calls' contexts live as long as a call may take, and a while."""
    late = (await caller("CreateVariable", name="late")).variable.variable_id
    ids = await caller.call("First {{a}} then {{late}} and {{b}}", a=out(6), late={"variable_id": late}, b=out(6))
    waiting = asyncio.create_task(caller.get(ids["b"]))
    await caller.get(ids["a"])
    (held,) = [
        one
        for engine in router_cluster.engines.values()
        for one in await engine.list(Asker(), include_program_contexts=True)
    ]
    assert held.labels == {"jaxctx": "program"}
    assert held.expiry is not None
    assert held.expiry.seconds > 600
    assert held.expiry.sliding
    waiting.cancel()


async def test_a_task_names_its_context_which_can_be_forked(router_cluster: RouterCluster, caller: Caller) -> None:
    async with jaxctx.aio.Client(router_cluster.router, timeout_s=60) as client:
        await forked_while_it_lives(caller, client)
        (fork, early) = [each async for each in client.contexts()]
        assert fork.engine_id == early.engine_id
        assert fork.engine_id in router_cluster.engines


async def test_native_steps_run_in_the_router(router_cluster: RouterCluster, caller: Caller) -> None:
    said = await caller.call("Tell: {{o}}", o=out(8))
    parameters = [{"name": "a", "variable_id": said["o"]}, {"name": "b", "text": "!"}, {"name": "o", "output": {}}]
    step = await caller("SubmitCall", function="join", parameters=parameters)
    assert await caller.get(step.outputs[0].variable_id) == await caller.get(said["o"]) + "!"
    assert [bool(task.engine_id) for task in (await caller("GetGraph")).tasks] == [True, False]


async def test_a_router_drains(router_cluster: RouterCluster, caller: Caller) -> None:
    reading = asyncio.create_task(caller.get((await caller.call("Tell: {{story}}", story=out(300)))["story"]))
    await until(lambda: any(node.running for node in router_cluster.handles.values()))
    chain = await caller.call("Of {{x}}: {{o}}", x={"text": "a"}, o=out(30))
    following = asyncio.create_task(caller.get(chain["o"]))
    await until(lambda: sum(len(node.running) for node in router_cluster.handles.values()) == 2)
    draining = asyncio.create_task(router_cluster.lifecycle.drain())
    await asyncio.sleep(0)
    with pytest.raises(errors.Unavailable) as error:
        await caller.call("Say {{o}}", o=out())
    assert error.value.reason == "DRAINING"
    await asyncio.wait_for(draining, 120)
    assert (await asyncio.wait_for(reading, 1), await asyncio.wait_for(following, 1)) != ("", "")


async def nothing_held(router_cluster: RouterCluster) -> None:
    """Every page of every engine is given back, save for constant prefixes."""
    async with asyncio.timeout(120):
        while any(
            [
                len(await engine.list(Asker(), include_program_contexts=True))
                for engine in router_cluster.engines.values()
            ]
        ):
            await asyncio.sleep(0.01)
    assert [(await engine.stats()).running for engine in router_cluster.engines.values()] == [0, 0]


async def test_a_call_that_is_cancelled_ends_on_its_engine(router_cluster: RouterCluster, caller: Caller) -> None:
    for engine in router_cluster.engines.values():  # or it may be done too soon
        engine.loop.post_if_running(lambda: time.sleep(0.8))
    output = {"name": "o", **out(1400)}
    call = await caller("SubmitCall", template="Tell: {{o}}", parameters=[output])
    reading = asyncio.create_task(caller.get(call.outputs[0].variable_id))
    await until(lambda: any(node.running for node in router_cluster.handles.values()))
    await caller("CancelCall", call_id=call.call_id)
    with pytest.raises(errors.Cancelled):
        await reading
    await nothing_held(router_cluster)


async def test_a_task_whose_time_is_over_ends_on_its_engine(router_cluster: RouterCluster, caller: Caller) -> None:
    for engine in router_cluster.engines.values():  # or it would be done too soon
        engine.loop.post_if_running(lambda: time.sleep(0.8))
    call = await caller(
        "SubmitCall", template="Tell: {{o}}", parameters=[{"name": "o", **out(1400)}], timeout={"nanos": 500_000_000}
    )
    with pytest.raises(errors.DeadlineExceeded):
        await caller.get(call.outputs[0].variable_id)
    await nothing_held(router_cluster)


async def test_a_program_waits_for_pages(router_cluster: RouterCluster, caller: Caller) -> None:
    """Where other tenants have pinned all of them, on every engine."""
    for engine in router_cluster.engines.values():
        for tenant in ("a", "b"):  # each may pin half
            await engine.create(Asker(tenant), requests.CreateContextRequest(context_id="full"))
            await engine.reserve_pages(Asker(tenant), "full", CONFIG.pages // 2)
            await engine.update(Asker(tenant), "full", requests.UpdateContextRequest(pinned=True))
    asking = asyncio.create_task(caller.get((await caller.call("Tell: {{o}}", o=out()))["o"]))
    await asyncio.sleep(1.5)
    assert not asking.done()
    for engine in router_cluster.engines.values():
        for tenant in ("a", "b"):
            await engine.close(Asker(tenant), "full")
    assert await asking == await alone(next(iter(router_cluster.engines)), "Tell: ", 8)


class Forwarder:
    """Forwards connections to a port, until it is cut: then it is silent, as a network that was cut off."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.open = asyncio.Event()
        self.open.set()

    async def begin(self) -> int:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _connected(self, reader: Any, writer: Any) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward(source: Any, sink: Any) -> None:
            while data := await source.read(1 << 16):
                await self.open.wait()
                sink.write(data)
                await sink.drain()

        tasks = [asyncio.create_task(forward(*each)) for each in ((reader, far_writer), (far_reader, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in (writer, far_writer):
            each.close()


async def test_an_engine_that_is_cut_off_and_comes_back(router_cluster: RouterCluster, caller: Caller) -> None:
    cut_off, other = router_cluster.engines
    forwarder = Forwarder(int(cut_off.rpartition(":")[2]))
    port = await forwarder.begin()
    incarnation = router_cluster.programs.dispatcher.engines.handles[cut_off].engine._headers[-1][1]
    router_cluster.leave(cut_off)
    router_cluster.leave(other)
    await until(lambda: not router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        registered = EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation))
        epoch = (await registered.read()).epoch
        ids = await caller.call("Tell: {{story}}", story=out(1000))
        reading = asyncio.create_task(caller.get(ids["story"]))
        await until(lambda: any(node.running for node in router_cluster.handles.values()))
        forwarder.open.clear()
        await until(lambda: not router_cluster.handles)
        assert not reading.done()
        forwarder.open.set()
        await until(lambda: bool(router_cluster.handles))
        (node,) = router_cluster.handles.values()
        assert node.epoch > epoch
        assert await asyncio.wait_for(reading, 120)
        registered.cancel()


# --- who may --------------------------------------------------------------------------------------------------------


async def test_a_task_that_waits_to_try_again_is_waited_for(router_cluster: RouterCluster, caller: Caller) -> None:
    """Of an engine that had no place for it: it is neither running nor waiting for an engine then."""
    programs, refusals = router_cluster.programs, [1, 2]
    run = programs.dispatcher._run

    async def refusing(task: Any, node: Any) -> None:
        if refusals:
            refusals.pop()
            raise errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.3)
        await run(task, node)

    programs.dispatcher._run = refusing
    reading = asyncio.create_task(caller.get((await caller.call("Say {{o}}", o=out()))["o"]))
    await until(lambda: len(refusals) == 1)
    await asyncio.wait_for(router_cluster.lifecycle.drain(), 120)
    assert refusals == []
    assert await asyncio.wait_for(reading, 5)


async def test_before_any_engine_has_come(clock: Clock) -> None:
    router_cluster = RouterCluster(clock, None, ALONE)
    async with router_of(router_cluster), caller_of(router_cluster) as caller:
        with pytest.raises(errors.Unavailable) as error:
            await caller.call("Say {{o}}", o=out())
        assert error.value.reason == "ENGINE_LOST"


async def test_registering_again_ends_the_call_before(router_cluster: RouterCluster) -> None:
    """As after a connection whose end was not noticed; and a router that stops ends all."""
    address = next(iter(router_cluster.engines))
    port, node = int(address.rpartition(":")[2]), router_cluster.handles[address]
    incarnation = node.engine._headers[-1][1]
    router_cluster.leave(address)
    await until(lambda: address not in router_cluster.handles)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        calls = []
        for _ in range(2):
            calls.append(EngineServiceStub(channel).Register(RegisterRequest(port=port, incarnation=incarnation)))
            assert (await calls[-1].read()).epoch == router_cluster.handles[address].epoch
        assert await asyncio.wait_for(calls[0].read(), 5) is grpc.aio.EOF
        assert address in router_cluster.handles
        router_cluster.lifecycle.stop()
        assert await asyncio.wait_for(calls[1].read(), 5) is grpc.aio.EOF
        assert address not in router_cluster.handles


async def test_whoever_fills_an_engine_does_not_make_it_look_lost(
    make_engine: Any, echo_served: Any, clock: Clock
) -> None:
    own, router_cluster = Cluster(KEY), RouterCluster(clock, [*USERS, Cluster(KEY).accepted], Cluster(KEY))
    engine = make_engine(CONFIG, replace(echo_served, revision="a"), whole=False)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(router_of(router_cluster))
        address = await stack.enter_async_context(served(engine, CONFIG, clock, router_cluster.keys, own, max_calls=2))
        await router_cluster.register(address, own)
        separate = [("grpc.use_local_subchannel_pool", 1)]  # a connection has no more streams than the server calls
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=separate)) for _ in range(2)
        ]
        everything, alice = context_service_pb2.WatchContextsRequest(), authorization_metadata("alice")
        watches = [ContextServiceStub(channels[0]).WatchContexts(everything, metadata=alice) for _ in range(2)]
        await asyncio.sleep(0.1)
        listing = context_service_pb2.ListContextsRequest()
        refusal = ContextServiceStub(channels[1]).ListContexts(listing, metadata=alice, timeout=20)
        assert (await refused(refusal)).reason == "QUEUE_FULL"
        epoch = router_cluster.handles[address].epoch
        before = router_cluster.handles[address].stats
        await until(lambda: router_cluster.handles[address].stats is not before)
        assert router_cluster.handles[address].epoch == epoch
        for each in watches:
            each.cancel()
        router_cluster.leave(address)


async def test_an_engine_that_does_not_answer_cannot_register(router_cluster: RouterCluster) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        error = await refused(register(channel, port=silent.sockets[0].getsockname()[1]))
        assert error.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
    silent.close()


async def refused(call: Any) -> errors.JaxctxError:
    with pytest.raises(grpc.RpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return from_rpc_error(raised.value)


def register(channel: Any, key: str = "", **fields: Any) -> Any:
    request = RegisterRequest(**{"port": 1, "incarnation": "l", **fields})
    return EngineServiceStub(channel).Register(request, metadata=authorization_metadata(key), timeout=20)


async def test_who_may_register(router_cluster: RouterCluster) -> None:
    async with grpc.aio.insecure_channel(router_cluster.router) as channel:
        error = await refused(register(channel, port=1))
        assert error.code == "UNAVAILABLE"
        for fields, name in (({"port": 0}, "port"), ({"port": 70000}, "port"), ({"incarnation": ""}, "incarnation")):
            error = await refused(register(channel, **fields))
            assert [each.field for each in error.violations] == [name]
    async with grpc.aio.insecure_channel(next(iter(router_cluster.engines))) as channel:
        assert (await refused(register(channel))).reason == "WRONG_ROLE"


class TestWithKeys:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return USERS

    @pytest.fixture
    def cluster(self) -> Cluster:
        return Cluster(KEY)

    async def test_registering_needs_the_clusters_key(self, router_cluster: RouterCluster) -> None:
        async with grpc.aio.insecure_channel(router_cluster.router) as channel:
            assert isinstance(await refused(register(channel)), errors.Unauthenticated)
            assert isinstance(await refused(register(channel, "alice")), errors.PermissionDenied)

    async def test_a_program_is_its_tenants_on_the_engine(self, router_cluster: RouterCluster) -> None:
        async with caller_of(router_cluster, "alice") as caller:
            assert await caller.get((await caller.call(SYSTEM + "{{o}}", o=out()))["o"])
        async with asyncio.timeout(120):
            while (
                len(
                    left := [
                        one
                        for each in router_cluster.engines.values()
                        for one in await each.list(Asker("alice"), include_program_contexts=True)
                    ]
                )
                > 1
            ):
                await asyncio.sleep(0.01)  # the call's own is given back in the background
        assert [each.labels for each in left] == [{"jaxctx": "program"}]
        for engine in router_cluster.engines.values():
            assert not await engine.list(Asker("bob"), include_program_contexts=True)
            assert not await engine.list(Asker(""), include_program_contexts=True)

    async def test_the_headers_of_a_router_are_a_cores_alone(self, router_cluster: RouterCluster) -> None:
        address, engine = next(iter(router_cluster.engines.items()))
        await engine.create(Asker("bob"), requests.CreateContextRequest(context_id="bobs"))
        wanted = context_service_pb2.GetContextRequest(context_id="bobs")
        async with grpc.aio.insecure_channel(address) as channel:
            get = ContextServiceStub(channel).GetContext
            assert isinstance(
                await refused(get(wanted, metadata=(*authorization_metadata("alice"), (TENANT_HEADER, "bob")))),
                errors.NotFound,
            )
            assert (
                await get(wanted, metadata=(*authorization_metadata(KEY), (TENANT_HEADER, "bob")))
            ).context.context_id == "bobs"
            error = await refused(
                get(
                    wanted,
                    metadata=(*authorization_metadata(KEY), (TENANT_HEADER, "bob"), (INCARNATION_HEADER, "another")),
                )
            )
            assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_LOST")
        await engine.close(Asker("bob"), "bobs")


# --- an engine elsewhere --------------------------------------------------------------------------------------------

SAMPLING = requests.SamplingParams(temperature=0.5, top_k=7, seed=3, logit_bias={5: 1.5})


@pytest.mark.parametrize(
    ("request_", "to_proto", "from_proto"),
    [
        (
            requests.CreateContextRequest(
                context_id="c",
                salt="s",
                priority=3,
                pinned=True,
                pin_s=2.5,
                ttl=requests.Ttl(600.5, sliding=True),
                labels={"a": "b"},
                manual_commit=True,
            ),
            convert.create_context_request_to_proto,
            convert.create_context_request_from_proto,
        ),
        (
            requests.CreateContextRequest(),
            convert.create_context_request_to_proto,
            convert.create_context_request_from_proto,
        ),
        (
            requests.UpdateContextRequest(ttl=requests.Ttl(600, sliding=True)),
            convert.update_context_request_to_proto,
            convert.update_context_request_from_proto,
        ),
        (
            requests.UpdateContextRequest(labels={}, priority=0, pinned=False),
            convert.update_context_request_to_proto,
            convert.update_context_request_from_proto,
        ),
        (
            requests.GenerateRequest(context_id="c", sampling=SAMPLING, stop=["x", "y"]),
            convert.generate_request_to_proto,
            convert.generate_request_from_proto,
        ),
        (
            requests.GenerateRequest(
                context_id="c", max_tokens=5, min_tokens=2, stop_token_ids=[4], ignore_eos=True, n=2
            ),
            convert.generate_request_to_proto,
            convert.generate_request_from_proto,
        ),
    ],
)
def test_requests_arrive_as_they_were(
    request_: Any, to_proto: Callable[..., Message], from_proto: Callable[..., Any]
) -> None:
    message = to_proto(request_)
    sent = type(message).FromString(message.SerializeToString())
    assert plain(from_proto(sent)) == plain(request_)


def plain(value: Any) -> Any:
    """With lists for tuples."""
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return dict(value) if isinstance(value, dict) else value


async def test_a_remote_engine_does_what_the_engine_does(engine: LocalEngine, address: str, clock: Clock) -> None:
    remote, me = RemoteEngine(address, "", "", clock), Asker(deadline=clock() + 30)
    remote._headers = ()  # of no incarnation
    assert await remote.stats() == await engine.stats()
    assert remote.info == engine.info
    tokens = await remote.encode("Hello there, you", True)
    created = await remote.create(me, requests.CreateContextRequest(labels={"a": "b"}))
    assert created == await context_info(engine, me, created.context_id)
    filled = await remote.fill(me, created.context_id, tokens[:5])
    assert (filled.computed, filled.context.seq_len) == (5, 5)
    assert (await remote.fill(me, created.context_id, tokens[5:], defer=True)).context.buffered_tokens == len(
        tokens
    ) - 5
    assert (await remote.fill(me, created.context_id)).context.seq_len == len(tokens)
    wanted = requests.GenerateRequest(
        context_id=created.context_id, max_tokens=5, sampling=requests.SamplingParams(temperature=0)
    )
    pieces = [piece async for piece in remote.generate(me, wanted)]
    assert sum(len(piece.token_ids) for piece in pieces) == 5
    assert pieces[-1].finish is not None
    assert (await remote.update(me, created.context_id, requests.UpdateContextRequest(priority=7))).priority == 7
    await remote.close(me, created.context_id)
    with pytest.raises(errors.NotFound):
        await remote.close(me, created.context_id)
    await remote.aclose()
    with pytest.raises(errors.Unavailable) as error:
        await remote.close(me, created.context_id)
    assert error.value.reason == "ENGINE_LOST"


async def test_an_engine_that_computes_a_long_step_is_not_silent(
    engine: LocalEngine, address: str, clock: Clock
) -> None:
    remote = RemoteEngine(address, "", "", clock)
    remote._headers = ()
    before = await remote.stats()
    step = asyncio.create_task(engine.loop.call(time.sleep, 4.0))
    assert await asyncio.wait_for(remote.stats(), 3) == before
    assert not step.done()
    await step
    await remote.aclose()


async def test_calls_end_when_the_engine_falls_silent(engine: LocalEngine, address: str, clock: Clock) -> None:
    forwarder = Forwarder(int(address.rpartition(":")[2]))
    remote = RemoteEngine(f"127.0.0.1:{await forwarder.begin()}", "", "", clock)
    remote._headers = ()
    await remote.stats()
    forwarder.open.clear()
    creating = asyncio.create_task(remote.create(Asker(), requests.CreateContextRequest()))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(remote.stats(), 0.1)
    with pytest.raises(errors.Unavailable) as error:
        await asyncio.wait_for(creating, 1)
    assert error.value.reason == "ENGINE_LOST"
    await remote.aclose()
    forwarder.open.set()


async def test_a_cancelled_caller_is_cancelled_though_its_engine_falls_silent_at_that_moment(
    engine: LocalEngine, address: str, clock: Clock
) -> None:
    forwarder = Forwarder(int(address.rpartition(":")[2]))
    remote = RemoteEngine(f"127.0.0.1:{await forwarder.begin()}", "", "", clock)
    remote._headers = ()
    await remote.stats()
    forwarder.open.clear()
    creating = asyncio.create_task(remote.create(Asker(), requests.CreateContextRequest()))
    await asyncio.sleep(0.05)
    remote._cut()
    creating.cancel()
    await asyncio.wait([creating], timeout=1)
    assert creating.cancelled()
    await remote.aclose()
    forwarder.open.set()
