#!/usr/bin/env python3
"""What a neighbour's stream notices of large messages: its tokens a second beside them, and with nothing beside it.

    scripts/bench_parsing.py [HOST:PORT] [--seconds S] [--rounds N] [--connections N] [--rates MIB ...]

Needs a running server with nothing else to do. One greedy stream runs all the time; in every round it is measured
alone and then beside each kind of message, which a process of its own sends over so many connections, each its next one
when the last one is answered, up to so many MiB a second together (0: as fast as it can, which takes processors, too).
Without keys each connection is a caller of its own, with a budget of its own. Prints of each kind the medians of the
neighbour's tokens a second and of their ratio, its smallest and largest, and how many messages were answered a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

import jaxctx
from jaxctx.rpc import CHANNEL_OPTIONS
from jaxctx.v1.context_service_pb2 import FillRequest, ForwardRequest
from jaxctx.v1.forward_pb2 import AttentionMask

MOST = 4_194_240  # entries of two bytes in a message of 8 MiB
SERVICE = "/jaxctx.v1."
SETTLE_S = 1.0  # before a measurement
STREAM_TOKENS = 400  # of one output; then comes the next


def attacks() -> dict[str, tuple[str, bytes]]:
    """Methods and messages. The last two are such as a valid request may be, of a context that there is not."""
    bounds = [AttentionMask(bounds=range(128)) for _ in range(1000)]
    masks = ForwardRequest(context_id="none", tokens=[1] * 1000, masks=bounds)
    text = FillRequest(context_id="none", text="é" * (1 << 20))
    return {
        "SubmitCall.parameters": ("SessionService/SubmitCall", b"\x22\x00" * MOST),
        "Forward.outputs": ("ContextService/Forward", b"\x32\x00" * MOST),
        "Forward.masks": ("ContextService/Forward", b"\x22\x00" * MOST),
        "Fork.child_ids": ("ContextService/Fork", b"\x1a\x00" * MOST),
        "unknown fields": ("ContextService/CloseContext", b"\xf8\x07\x00" * (MOST * 2 // 3)),
        "a text of 2 MiB": ("ContextService/Fill", text.SerializeToString()),
        "masks of 128,000 bounds": ("ContextService/Forward", masks.SerializeToString()),
    }


async def attack(address: str, name: str, rate: float, connections: int) -> None:
    """Send, and write a dot for each answer, until this process is ended."""
    method, data = attacks()[name]
    apart_s = len(data) * connections / (rate * (1 << 20)) if rate else 0.0

    async def send(number: int) -> None:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("number", number)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + method)
            due = time.monotonic()
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await call(data)
                sys.stdout.write(".")
                sys.stdout.flush()
                due = max(due + apart_s, time.monotonic() - apart_s)
                await asyncio.sleep(max(due - time.monotonic(), 0))

    await asyncio.gather(*map(send, range(connections)))


@asynccontextmanager
async def attacked(chosen: argparse.Namespace, name: str, rate: float) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, __file__, chosen.server, "--attack", name, "--rates", str(rate)]
    command += ["--connections", str(chosen.connections)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.read(1)  # it has begun
        yield process
    finally:
        process.kill()
        await process.wait()


class Neighbour:
    """A stream that goes on."""

    def __init__(self) -> None:
        self.tokens = 0

    async def run(self, client: jaxctx.aio.Client) -> None:
        while True:
            async with await client.create("A page is") as context:
                stream = context.generate(max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
                async for piece in stream:
                    self.tokens += len(piece.token_ids)

    async def speed(self, seconds: float) -> float:
        """Tokens a second, from some time after now."""
        await asyncio.sleep(SETTLE_S)
        before, started = self.tokens, time.monotonic()
        await asyncio.sleep(seconds)
        return (self.tokens - before) / (time.monotonic() - started)


async def measure(chosen: argparse.Namespace) -> None:
    cases = [(name, rate) for rate in chosen.rates for name in attacks()]
    speeds: dict[tuple[str, float], list[tuple[float, float, float]]] = {case: [] for case in cases}
    async with jaxctx.aio.Client(chosen.server, timeout_s=600) as client:
        neighbour = Neighbour()
        running = asyncio.create_task(neighbour.run(client))
        for _ in range(chosen.rounds):
            for name, rate in cases:
                idle = await neighbour.speed(chosen.seconds)
                async with attacked(chosen, name, rate) as process:
                    beside = await neighbour.speed(chosen.seconds)
                    assert process.stdout is not None
                    answered = len(await process.stdout.read(1 << 20)) / (chosen.seconds + SETTLE_S)
                speeds[name, rate].append((idle, beside, answered))
                if running.done():
                    running.result()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    print("| beside | MiB/s | answers/s | tokens/s alone | tokens/s | ratio |\n|---|---|---|---|---|---|")
    for (name, rate), found in speeds.items():
        alone, beside, answered = (statistics.median(each) for each in zip(*found, strict=True))
        ratios = sorted(each / idle for idle, each, _ in found)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        asked = f"{rate:g}" if rate else "all it can"
        print(f"| {name} | {asked} | {answered:.1f} | {alone:.0f} | {beside:.0f} | {spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", nargs="?", default="127.0.0.1:50051", help="HOST:PORT (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--connections", type=int, default=1, help="of an attack (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.3, 16], help="MiB a second (default: 1.3 16)")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.attack:
        asyncio.run(attack(chosen.server, chosen.attack, chosen.rates[0], chosen.connections))
    else:
        asyncio.run(measure(chosen))


if __name__ == "__main__":
    main()
