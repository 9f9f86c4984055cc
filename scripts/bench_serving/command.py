"""Our server against a peer, in turn, in one run: a server with an OpenAI-compatible API, or another build of ours.

    scripts/bench --model DIR --peer-command "… --port {port}" --json results.json
    scripts/bench --model DIR --peer-api grpc --peer-command "/other/.venv/bin/jaxctx-serve DIR --grpc-port {port}"

Every round runs every scenario on both servers, one after the other, with the same token ids; which goes first
alternates. A server is either started here, for the time of the run, or named by its address. Without a peer only ours
is measured. Numbers of two runs are not comparable on a shared machine: compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench_serving.load import SCENARIOS, Load, Measure, Scenario, Target, warm_up
from bench_serving.report import OURS, PEER, as_json, plot, table
from bench_serving.servers import Server, StartError, free_port, our_command, peer_command, running
from bench_serving.targets import REQUEST_TIMEOUT_S, JaxctxServer, OpenAIServer, ServerError

OPENAI, GRPC = "openai", "grpc"
CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    listed = "\n".join(f"  {name:14}{scenario.about}" for name, scenario in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=f"scenarios:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours = parser.add_argument_group("our server")
    ours.add_argument("--server", metavar="HOST:PORT", help="one that runs already")
    ours.add_argument("--model", metavar="DIR", help="start one with this model (default: the bundled one)")
    ours.add_argument("--serve-options", default="", metavar="OPTIONS", help="more of jaxctx-serve's options for it")
    peer = parser.add_argument_group("the peer")
    peer.add_argument("--peer-url", metavar="URL", help="one that runs already (with --peer-api grpc: HOST:PORT)")
    peer.add_argument("--peer-command", metavar="COMMAND", help="start one; {port} stands for its port")
    peer.add_argument(
        "--peer-api", choices=(OPENAI, GRPC), default=OPENAI, help="what it speaks; grpc: it is a jaxctx-serve too"
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--scenarios", default=",".join(SCENARIOS), metavar="A,B,…", help="which ones (default: all)")
    run.add_argument("--rounds", type=int, default=3, help="how often each runs (default: 3)")
    run.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    run.add_argument("--start-timeout", type=float, default=900, metavar="SECONDS", help="until a server is ready")
    run.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    run.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios into this file (needs matplotlib)")
    settings = parser.parse_args(arguments)
    unknown = [name for name in settings.scenarios.split(",") if name not in SCENARIOS]
    if unknown:
        parser.error(f"no such scenario: {', '.join(unknown)}")
    if settings.rounds < 1:
        parser.error("--rounds: at least 1")
    if settings.server and settings.model:
        parser.error("--server and --model: a server that runs already has its model")
    if settings.peer_url and settings.peer_command:
        parser.error("--peer-url and --peer-command: one of them")
    if settings.peer_api == GRPC and not (settings.peer_url or settings.peer_command):
        parser.error("--peer-api says what a peer speaks: it needs a peer")
    if settings.plot and not (settings.peer_url or settings.peer_command):
        parser.error("--plot draws ratios: it needs a peer")
    return settings


def grpc_ready(address: str) -> bool:
    """Whether our server says that it serves."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="jaxctx.v1.ContextService")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def http_ready(url: str) -> bool:
    """Whether the peer lists its models."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def peer_address(api: str, port: int) -> tuple[str, Callable[[], bool]]:
    """The address of a peer that is started on this port, and what tells whether it is ready."""
    if api == GRPC:
        address = f"127.0.0.1:{port}"
        return address, partial(grpc_ready, address)
    url = f"http://127.0.0.1:{port}"
    return url, partial(http_ready, url)


async def measure(
    settings: argparse.Namespace, server: str, peer_url: str | None, started: Mapping[str, Server]
) -> Mapping[str, Mapping[str, Sequence[Measure]]]:
    """All rounds of all scenarios: scenario → server → one measure a round. Of `started` ones one runs at a time."""
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS))
        ours = JaxctxServer(channel)
        model = await ours.model()
        targets: dict[str, Target] = {OURS: ours}
        print(f"{OURS}: {model.model_id} ({model.parameters / 1e6:.0f}M parameters, {model.dtype}) at {server}")
        if peer_url and settings.peer_api == GRPC:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(peer_url, options=CHANNEL_OPTIONS))
            other_build = JaxctxServer(channel)
            print(f"{PEER}: {(await other_build.model()).model_id} at {peer_url}")
            targets[PEER] = other_build
        elif peer_url:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            # A new connection for each request: a server that was paused closes its idle ones when it goes on.
            connections = aiohttp.TCPConnector(force_close=True, limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connections))
            peer = OpenAIServer(session, peer_url)
            print(f"{PEER}: {await peer.model()} at {peer_url}")
            targets[PEER] = peer
        chosen = {name: SCENARIOS[name] for name in settings.scenarios.split(",")}
        for name in [name for name, scenario in chosen.items() if scenario.longest > model.max_context_tokens]:
            print(f"{name}: left out, the model takes only {model.max_context_tokens} tokens")
            del chosen[name]
        for target in targets.values():
            await warm_up(Load(target, model.vocab_size, "warm up"))
        return await all_rounds(chosen, targets, model.vocab_size, settings.rounds, settings.seed, started)


async def all_rounds(
    chosen: Mapping[str, Scenario],
    targets: Mapping[str, Target],
    vocab_size: int,
    rounds: int,
    seed: int,
    started: Mapping[str, Server],
) -> dict[str, dict[str, list[Measure]]]:
    """Every scenario on every server, `rounds` times; the order of servers alternates, the others are paused."""
    measured: dict[str, dict[str, list[Measure]]] = {}
    for number in range(rounds):
        for name, scenario in chosen.items():
            order = list(targets.items())
            for server, target in order if number % 2 == 0 else reversed(order):
                for name_of_other, other in started.items():
                    if name_of_other != server:
                        other.pause()
                if server in started:
                    started[server].resume()
                before = await target.drafts()
                results = await scenario.run(Load(target, vocab_size, f"{seed} {number} {name}"))
                after = await target.drafts()
                for result, value in results.items():
                    if before and after:
                        value = replace(value, drafted=after[0] - before[0], accepted=after[1] - before[1])
                    measured.setdefault(result, {each: [] for each in targets})[server].append(value)
                    print(
                        f"round {number + 1}/{rounds} {result:14} {server:7} {value.tokens_per_s:8.1f} tokens/s "
                        f"{value.ttft_ms:9.1f} ms to first token {value.tpot_ms:8.2f} ms per token",
                        flush=True,
                    )
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when everything was measured."""
    settings = parse(arguments)
    server, peer_url = settings.server, settings.peer_url
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        try:
            if not server:
                port = free_port()
                server = f"127.0.0.1:{port}"
                command = our_command(settings.model, port, settings.serve_options)
                address = server
                ready = running(OURS, command, lambda: grpc_ready(address), settings.start_timeout)
                started[OURS] = stack.enter_context(ready)
            if settings.peer_command:
                port = free_port()
                peer_url, is_ready = peer_address(settings.peer_api, port)
                command = peer_command(settings.peer_command, port)
                ready = running(PEER, command, is_ready, settings.start_timeout)
                started[PEER] = stack.enter_context(ready)
            measured = asyncio.run(measure(settings, server, peer_url, started))
        except (StartError, ServerError, ValueError, grpc.RpcError) as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    print(f"\n{settings.rounds} rounds; median (smallest-largest)\n{table(measured)}")
    if settings.json:
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()}
        settings.json.write_text(json.dumps(as_json(measured, shown), indent=1) + "\n")
    if settings.plot:
        plot(measured, settings.plot)
    return 0
