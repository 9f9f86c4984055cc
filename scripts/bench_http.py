#!/usr/bin/env python3
"""What HTTP adds to the time to the first token: the same prompts by gRPC and by HTTP, in turn, on one server.

    scripts/bench_http.py HOST:PORT http://127.0.0.1:8000 [--rounds N] [--prompt-tokens N] [--page]

Every round asks once by gRPC (create, fill, generate, close by the asyncio client) and once by POST /v1/completions,
streamed, over a connection that is kept; which goes first alternates. Prompts are token ids that no request had before.
Prints the medians in milliseconds, and the median, smallest and largest of the differences of the rounds. With `--page`
the page's events are read all the time beside it. Needs the extra [bench].
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import aiohttp

import jaxctx

TOKENS = 4  # of every output


async def first_token_by_grpc(client: jaxctx.aio.Client, prompt: list[int]) -> float:
    """Seconds to the first token of an output."""
    began = time.perf_counter()
    async with await client.create() as context:
        await context.fill(tokens=prompt, defer=True)
        first = 0.0
        async for _ in context.generate(max_tokens=TOKENS, temperature=0, ignore_eos=True):
            first = first or time.perf_counter() - began
    return first


async def first_token_by_http(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> float:
    """Seconds to the first event of a stream, which comes with the first token."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    first = 0.0
    async with http.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - began
    return first


async def read_page(http: aiohttp.ClientSession, url: str) -> None:
    """Read the events of the page until this is cancelled."""
    async with http.get(f"{url}/page/events") as response:
        response.raise_for_status()
        async for _ in response.content:
            pass


async def measure(address: str, url: str, rounds: int, prompt_tokens: int) -> list[tuple[float, float]]:
    """Seconds to the first token by gRPC and by HTTP, for each round."""
    rng = random.Random(0)
    times: list[tuple[float, float]] = []
    async with jaxctx.aio.Client(address, timeout_s=600) as client, aiohttp.ClientSession() as http:
        vocab_size = (await client.model()).vocab_size
        for number in range(rounds + 2):
            prompts = [[rng.randrange(300, vocab_size) for _ in range(prompt_tokens)] for _ in range(2)]
            if number % 2:
                by_http = await first_token_by_http(http, url, prompts[1])
                by_grpc = await first_token_by_grpc(client, prompts[0])
            else:
                by_grpc = await first_token_by_grpc(client, prompts[0])
                by_http = await first_token_by_http(http, url, prompts[1])
            times.append((by_grpc, by_http))
    return times[2:]  # the first two open connections


async def run(options: argparse.Namespace) -> None:
    """Measure, and print what was found."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        page = asyncio.create_task(read_page(http, options.url)) if options.page else None
        times = await measure(options.address, options.url, options.rounds, options.prompt_tokens)
        if page is not None:
            page.cancel()
    differences = [(by_http - by_grpc) * 1000 for by_grpc, by_http in times]
    for name, values in (("gRPC", [each for each, _ in times]), ("HTTP", [each for _, each in times])):
        print(f"{name}: {statistics.median(values) * 1000:.1f} ms to the first token, median of {len(values)}")
    lowest, *_, highest = statistics.quantiles(differences, n=20)
    print(f"HTTP adds {statistics.median(differences):.1f} ms (5 % to 95 %: {lowest:.1f} to {highest:.1f})")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of gRPC, HOST:PORT")
    parser.add_argument("url", help="of HTTP, as http://127.0.0.1:8000")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--page", action="store_true", help="read the events of the page beside it")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
