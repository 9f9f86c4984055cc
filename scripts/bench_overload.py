#!/usr/bin/env python3
"""Overload: how much of a server's capacity still finishes in time when more is asked of it than it can do.

    scripts/bench_overload.py [--command "COMMAND"] [--loads 1 2 5 10] [--rounds N] [--seconds S]
                              [--max-tokens N] [--deadline S] [--concurrency N] [--json FILE]

Starts a server (`jaxctx-serve` with the bundled model; `--command` starts another, to which port and keys are added)
with two tenants, and asks for outputs of `--max-tokens` greedy tokens with a deadline. Each request makes a context,
fills it without computing, generates and closes it, by gRPC.

Every round first measures capacity: `--concurrency` callers of one tenant, each with one request after the other, for
`--seconds`; outputs per second that finish within the deadline. Then one tenant asks open-loop (at fixed times,
whatever comes of those before) at each of `--loads` times this capacity; and last that tenant at ten times the capacity
with another beside it at 0.4 times. Goodput counts outputs that finish within their deadline, from the moment when the
first deadline could have passed. Prints a line for each load, and at the end medians, smallest and largest round:
goodput / capacity, refusals per second, how many of them had no RetryInfo, how long they took (median and 99th
percentile, from sending Generate), outputs that ended at their deadline, and the other tenant's share of what it asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from jaxctx.errors import JaxctxError
from jaxctx.rpc import CHANNEL_OPTIONS, from_rpc_error
from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1.context_service_pb2_grpc import ContextServiceStub
from jaxctx.v1.generation_pb2 import SamplingParams

START_TIMEOUT_S = 600.0
SERVICE = b"jaxctx.v1.ContextService"  # serves once the model is loaded
MAX_OPEN = 2000  # requests of an open loop at once; beyond that the client itself is overloaded, and says so


@dataclass
class Outcome:
    """What became of a load's requests."""

    finished: list[float] = field(default_factory=list)  # when, in seconds from the start of the load, in time
    asked: list[float] = field(default_factory=list)  # when they were to be sent
    refusals: list[float] = field(default_factory=list)  # seconds that each took
    without_retry: int = 0
    late: int = 0  # ended at their deadline
    others: dict[str, int] = field(default_factory=dict)  # other errors, by reason
    skipped: int = 0  # not sent, as too many were open

    def rate(self, start: float, end: float) -> float:
        """Outputs per second that finished between the two."""
        return sum(start <= at < end for at in self.finished) / (end - start)

    def row(self, start: float, end: float, capacity: float) -> dict[str, float]:
        took = sorted(self.refusals)
        asked = sum(start <= at < end for at in self.asked) / (end - start)
        return {
            "asked / capacity": asked / capacity,
            "goodput / capacity": self.rate(start, end) / capacity,
            "refused per second": len(took) / end,
            "refused without RetryInfo": self.without_retry,
            "refusal, median ms": 1e3 * statistics.median(took) if took else 0.0,
            "refusal, 99 % ms": 1e3 * took[int(0.99 * (len(took) - 1))] if took else 0.0,
            "late": self.late,
            "other errors": sum(self.others.values()),
            "not sent": self.skipped,
        }


class Caller:
    """One tenant's requests."""

    def __init__(self, target: str, key: str, max_tokens: int, deadline_s: float) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self._stub: Any = ContextServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._max_tokens, self._deadline_s = max_tokens, deadline_s

    async def aclose(self) -> None:
        await self._channel.close()

    async def request(self, outcome: Outcome, started: float) -> None:
        """One of them, from the moment on at which it was to be sent."""
        begun = time.perf_counter()
        until = begun + self._deadline_s
        options = {"metadata": self._metadata, "timeout": self._deadline_s}
        context_id, sent = "", begun
        try:
            made = await self._stub.CreateContext(pb.CreateContextRequest(), **options)
            context_id = made.context.context_id
            text = f"# module number {random.randrange(10**9)}\nimport "
            await self._stub.Fill(pb.FillRequest(context_id=context_id, text=text, defer=True), **options)
            generate = pb.GenerateRequest(
                context_id=context_id,
                max_tokens=self._max_tokens,
                sampling=SamplingParams(temperature=0),
                ignore_eos=True,
            )
            sent = time.perf_counter()
            left = {"metadata": self._metadata, "timeout": max(0.001, until - sent)}
            async for _ in self._stub.Generate(generate, **left):
                pass
            if time.perf_counter() <= until:
                outcome.finished.append(time.perf_counter() - started)
            else:
                outcome.late += 1
        except grpc.RpcError as raised:
            self._count(outcome, from_rpc_error(raised), time.perf_counter() - sent)
        finally:
            if context_id:
                with contextlib.suppress(grpc.RpcError):
                    close = pb.CloseContextRequest(context_id=context_id)
                    await self._stub.CloseContext(close, metadata=self._metadata, timeout=30.0)

    def _count(self, outcome: Outcome, error: JaxctxError, took_s: float) -> None:
        if error.code == "RESOURCE_EXHAUSTED":
            outcome.refusals.append(took_s)
            outcome.without_retry += error.retry_after_s is None
        elif error.code == "DEADLINE_EXCEEDED":
            outcome.late += 1
        else:
            outcome.others[error.reason] = outcome.others.get(error.reason, 0) + 1


async def closed_loop(caller: Caller, concurrency: int, seconds: float) -> Outcome:
    """So many callers, each with one request after the other."""
    outcome, started = Outcome(), time.perf_counter()

    async def one() -> None:
        while time.perf_counter() - started < seconds:
            await caller.request(outcome, started)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return outcome


async def open_loop(caller: Caller, rate: float, seconds: float) -> Outcome:
    """Requests at fixed times, `rate` a second, whatever comes of them."""
    outcome, started = Outcome(), time.perf_counter()
    open_: set[asyncio.Task[None]] = set()
    for n in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, started + n / rate - time.perf_counter()))
        if len(open_) >= MAX_OPEN:
            outcome.skipped += 1
            continue
        outcome.asked.append(time.perf_counter() - started)
        task = asyncio.create_task(caller.request(outcome, started))
        open_.add(task)
        task.add_done_callback(open_.discard)
    while open_:
        await asyncio.wait(open_)
    return outcome


@contextlib.contextmanager
def server(command: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A server of its own: its address, and the keys of tenants a and b."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        keys = {tenant: secrets.token_hex(32) for tenant in ("a", "b")}
        lines = [f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}:{tenant}" for tenant, key in keys.items()]
        (path := Path(folder) / "keys").write_text("\n".join(lines) + "\n")
        socket = f"{folder}/socket"
        arguments = ["--grpc-port", "0", "--http-port", "0", "--unix-socket", socket, "--keys", str(path)]
        process = subprocess.Popen(shlex.split(command) + arguments, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, f"unix:{socket}", log)
            yield f"unix:{socket}", keys
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], target: str, log: Any) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(target) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                if check(b"\x0a" + bytes([len(SERVICE)]) + SERVICE, timeout=1.0) == b"\x08\x01":  # SERVING
                    return
            time.sleep(0.5)
    log.seek(0)
    raise SystemExit("the server was not ready in time; it printed:\n" + log.read().decode(errors="replace")[-2000:])


async def one_round(target: str, keys: dict[str, str], chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Capacity, then every load, then two tenants."""
    flood, other = (Caller(target, keys[tenant], chosen.max_tokens, chosen.deadline) for tenant in ("a", "b"))
    rows: dict[str, dict[str, float]] = {}
    try:
        await closed_loop(flood, chosen.concurrency, 3.0)
        start = chosen.deadline
        full = await closed_loop(flood, chosen.concurrency, start + chosen.seconds)
        if not (capacity := full.rate(start / 2, start + chosen.seconds)):
            told = f"late {full.late}, refused {len(full.refusals)}, {full.others}"
            raise SystemExit(f"nothing finishes in time, even without overload: {told}")
        print(f"capacity {capacity:.2f} outputs/s ({chosen.concurrency} callers)", flush=True)
        end = start + chosen.seconds
        for load in chosen.loads:
            outcome = await open_loop(flood, load * capacity, end)
            rows[f"{load:g} times"] = outcome.row(start, end, capacity)
            _tell(f"{load:g} times", rows[f"{load:g} times"])
        both = await asyncio.gather(open_loop(flood, 10 * capacity, end), open_loop(other, 0.4 * capacity, end))
        for name, outcome in zip(("10 times, a", "0.4 times beside it, b"), both, strict=True):
            rows[name] = outcome.row(start, end, capacity)
            rows[name]["finished of asked"] = len(outcome.finished) / max(1, len(outcome.asked))
            _tell(name, rows[name])
        for row in rows.values():
            row["capacity"] = capacity
    finally:
        await flood.aclose()
        await other.aclose()
    return rows


def _tell(name: str, row: dict[str, float]) -> None:
    print(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=f"{sys.executable} -m jaxctx_server.cli --compile-all")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0, 5.0, 10.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of every load, after its first deadline")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--deadline", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=32, help="callers that measure capacity")
    parser.add_argument("--json", type=Path, default=None, help="where to keep every round")
    chosen = parser.parse_args()
    with server(chosen.command) as (target, keys):
        rounds = [asyncio.run(one_round(target, keys, chosen)) for _ in range(chosen.rounds)]
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rounds, indent=2))
    print(f"\nmedian (smallest to largest) of {chosen.rounds} rounds")
    for name, row in rounds[0].items():
        print(name)
        for key in row:
            values = sorted(each[name][key] for each in rounds)
            print(f"  {key:28}{statistics.median(values):10.3g} ({values[0]:.3g} to {values[-1]:.3g})")


if __name__ == "__main__":
    main()
