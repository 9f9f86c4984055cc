#!/usr/bin/env python3
"""Measures snapshots and tiers through a running server: open against compute, and the effect on another stream.

    python scripts/bench_snapshots.py --address HOST:PORT [--tokens 8192] [--rounds 3] [--json FILE]

The server must have a store and nothing else to do (`jaxctx-serve MODEL --store DIR`). Each round fills a context of
new random tokens, saves it durably, drops every cached page, and opens it again. If the server has a host tier of as
many pages (`--host-tokens`), the context is also suspended to it and resumed. That is done once by itself and once
beside a stream that decodes, whose intervals between tokens are compared: with nothing else going on, during the saves,
during the opens, during the resumptions.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import jaxctx


@dataclass
class Neighbour:
    """A stream that decodes until `stopped`, and the time at which each of its tokens came."""

    address: str
    times: list[float] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> None:
        with jaxctx.Client(self.address) as client:
            while not self.stopped:
                with client.create(tokens=[1, 2, 3]) as context:
                    for piece in context.generate(max_tokens=200, ignore_eos=True, temperature=0):
                        self.times += [time.perf_counter()] * len(piece.token_ids)  # of a slow reader: several at once
                        if self.stopped:
                            break

    def interval_s(self, spans: list[tuple[float, float]]) -> float:
        """The mean interval in seconds between tokens that came within the spans, (start, stop) each."""
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        inside = [
            gap for gap, at in zip(gaps, self.times[1:], strict=True) if any(start < at < stop for start, stop in spans)
        ]
        return statistics.fmean(inside) if inside else float("nan")


def timed(spans: list[tuple[float, float]], call):  # type: ignore[no-untyped-def]
    """Call, append (start, stop) of the call to `spans`, and return its result."""
    start = time.perf_counter()
    result = call()
    spans.append((start, time.perf_counter()))
    return result


SPARE = 64  # pages that a neighbour may need


def suspend(client: jaxctx.Client, context: jaxctx.Context) -> None:
    """Suspend the context, by reserving nearly all pages for another one."""
    with client.create() as greedy:
        greedy.reserve(client.stats().pages_total - SPARE)
        assert context.refresh().state is jaxctx.ContextState.SUSPENDED


def resume(context: jaxctx.Context) -> None:
    """Compute one token, for which the pages return to the device."""
    usage = context.complete(max_tokens=1, temperature=0).usage
    assert usage is not None
    assert usage.restored_tokens >= usage.prompt_tokens - (SPARE + 1) * context.info.page_size, usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fills: list[tuple[float, float]] = []
    alone: dict[str, list[tuple[float, float]]] = {"save": [], "open": []}
    beside: dict[str, list[tuple[float, float]]] = {"idle": [], "save": [], "open": []}
    kinds = ["save", "open"]
    neighbour = Neighbour(arguments.address)
    with jaxctx.Client(arguments.address) as client:
        vocabulary, stats = client.model().vocab_size, client.stats()
        if stats.host_pages_total >= stats.pages_total:
            kinds.append("resume")
            alone["resume"], beside["resume"] = [], []
        for spans in (alone, beside):
            thread = threading.Thread(target=neighbour.run)
            if spans is beside:
                thread.start()
                timed(beside["idle"], lambda: time.sleep(3))
            for number in range(arguments.rounds):
                name = f"bench-{number}-{len(fills)}"
                tokens = random.Random(name).choices(range(4, vocabulary), k=arguments.tokens)
                context = client.create()
                timed(fills if spans is alone else [], lambda: context.fill(tokens=tokens))  # noqa: B023
                saved = timed(spans["save"], lambda: context.save(name, durable=True))  # noqa: B023
                if "resume" in kinds:
                    suspend(client, context)
                    timed(spans["resume"], lambda: resume(context))  # noqa: B023
                context.close()
                client.clear_cache()
                opened = timed(spans["open"], lambda: client.open(name))  # noqa: B023
                assert opened.opened is not None
                assert opened.opened.restored >= arguments.tokens - 1, opened.opened
                opened.close()
                client.delete_snapshot(name)
                client.clear_cache()
            if spans is beside:
                neighbour.stopped = True
                thread.join()
    result = {"tokens": arguments.tokens, "rounds": arguments.rounds, "size_bytes": saved.size_bytes}
    for name, measured in {"fill": fills, **{kind: alone[kind] for kind in kinds}}.items():
        seconds = [stop - start for start, stop in measured]
        result |= {f"{name}_s": statistics.median(seconds), f"{name}_spread_s": max(seconds) - min(seconds)}
        spread_s = max(seconds) - min(seconds)
        print(f"{name:6} {statistics.median(seconds):8.3f} s  (n {len(seconds)}, spread {spread_s:.3f} s)")
    print(f"open is {result['fill_s'] / result['open_s']:.1f} times as fast as computing")
    idle = neighbour.interval_s(beside["idle"])
    for name in kinds:
        ratio = neighbour.interval_s(beside[name]) / idle
        result[f"neighbour_{name}"] = ratio
        print(f"a neighbour's tokens come {ratio:.2f} times as far apart during {name}s ({idle * 1e3:.1f} ms without)")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
