"""One life of the server: listen, load, serve, drain, stop.

It listens before it loads: a port in use shows at once, and probes see a live server that is not ready yet.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import grpc

from jaxctx.errors import JaxctxError
from jaxctx.programs.dispatcher import Policy
from jaxctx_server.addresses import check_host, tcp_address, unix_address
from jaxctx_server.auth import Key
from jaxctx_server.cluster import ALONE, Cluster, join
from jaxctx_server.config import ServeConfig
from jaxctx_server.grpc.server import make_server
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ProgramSettings, ServerLifecycle, ServingState
from jaxctx_server.progress import Progress, shown
from jaxctx_server.startup import ADDRESS, CUT_OFF, DEFECT, INTERRUPTED, OK, StartError, banner
from jaxctx_server.validate import Limits

if TYPE_CHECKING:
    from jaxctx.engine.engine import LocalEngine
    from jaxctx.model.text import ModelText

log = logging.getLogger("jaxctx.server")
LAST_WORDS_S = 5.0  # for messages that are on their way when all work is done
T = TypeVar("T")


async def serve(
    config: ServeConfig,
    keys: KeyStore | Sequence[Key] | None,
    load: Callable[[ServeConfig, Progress], "tuple[LocalEngine, ModelText]"],
    stop: asyncio.Event,
    *,
    cluster: Cluster = ALONE,
    out: TextIO = sys.stdout,
    err: TextIO = sys.stderr,
) -> int:
    """Serve until `stop` is set and work is drained; returns the exit status. Raises StartError for what can be mended.

    If `stop` is set while loading, returns INTERRUPTED with the loading thread still at it: it is for the caller to end
    the process before the event loop, which would wait for that thread.
    """
    started = time.monotonic()
    serving, store = ServerLifecycle(), KeyStore.of(keys)
    server = make_server(serving, store, max_calls=config.max_calls, cluster=cluster, is_router=config.role == "router")
    addresses = listen(server, config, keys=store.keys is not None)
    enter = partial(join, config.router or "", cluster, int(addresses[0].rpartition(":")[2]))
    await server.start()
    watching = asyncio.create_task(store.watch())
    joining, engine = None, None
    try:
        if config.role == "router":
            limits = Limits(queue_limit=config.queue_limit)
            serving.opened(ServingState.router(limits, settings=program_settings(config)))
        else:
            with shown(err) as progress:
                loaded = await _unless(stop, asyncio.to_thread(load, config, progress))
            if loaded is None:
                return INTERRUPTED
            engine, text = loaded
            limits = Limits.of(engine.info, queue_limit=config.queue_limit)
            served = ServingState.of(engine, text, limits, settings=program_settings(config))

            async def leave() -> None:
                await enter(leaving_s=0.9 * config.drain_timeout_s)  # what runs here meanwhile has the rest, too
                await served.drain()

            serving.opened(replace(served, drain=leave) if config.router and config.store else served)
        info = None if engine is None else engine.info
        window = None if engine is None else engine.attention_window
        print(banner(info, addresses, store.keys, time.monotonic() - started, window=window), file=out, flush=True)
        if config.router is not None:
            joining = asyncio.create_task(enter())
        failure = None if engine is None else await _unless(stop, engine.failure())
        if failure is None:
            await stop.wait()
            status = OK if await _drain(serving, config.drain_timeout_s) else CUT_OFF
        else:
            log.critical("the engine failed: %s", failure)
            status = DEFECT  # a supervisor then restarts the process
        serving.stop()
        await server.stop(0 if status == CUT_OFF else LAST_WORDS_S)
        if engine is not None:
            await asyncio.to_thread(engine.stop)
        return status
    finally:
        watching.cancel()
        if joining is not None:
            joining.cancel()
        serving.stop()
        await server.stop(0)
        if config.unix_socket is not None:
            config.unix_socket.unlink(missing_ok=True)


def program_settings(config: ServeConfig) -> ProgramSettings:
    """Those of programs among the settings."""
    policy = Policy(
        task_groups=config.dispatch_task_groups,
        same_prefix=config.dispatch_same_prefix,
        cached_prefix=config.dispatch_cached_prefix,
        least_impact=config.dispatch_least_impact,
        app_order=config.dispatch_app_order,
    )
    return ProgramSettings(policy=policy, prefix_timeout_s=config.prefix_timeout_s, heartbeat_s=config.beat_s)


def listen(server: grpc.aio.Server, config: ServeConfig, *, keys: bool) -> list[str]:
    """Give the server its addresses; returns them with their real ports."""
    check_host(config.host, keys=keys)
    wanted = [tcp_address(config.host, config.grpc_port)]
    if config.unix_socket is not None:
        wanted.append(unix_address(config.unix_socket))
    bound = []
    for address in wanted:
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:  # somebody was quicker
            raise StartError(f"cannot listen on {address}", ADDRESS) from error
        bound.append(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}")
    return bound


async def _drain(serving: ServerLifecycle, timeout_s: float) -> bool:
    """Whether all running work finished in time."""
    log.info("draining: no new work; running work has %.0f s (a second signal stops at once)", timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await serving.drain()
    except TimeoutError:
        log.warning("the drain's time is up; what still runs is cut off")
        return False
    except JaxctxError as error:  # the engine has broken down
        log.error("cannot drain: %s", error)
        return False
    log.info("drained")
    return True


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work, or None if `stop` is set before it is there."""
    stopping, result = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    await asyncio.wait((stopping, result), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if result.done():
        return await result
    result.cancel()
    return None
