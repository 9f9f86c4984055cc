#!/usr/bin/env python3
"""Programs against the same calls driven by a client: a chain, a map-reduce, two roles that talk in turn.

    scripts/bench_programs.py [HOST:PORT] [--own-url URL] [--peer-url URL] [--only NAME] [--rounds N] [--delays S ...]

Needs a running server with at least 16 contexts of 3,000 tokens. The client makes each call as a context of its own
(create with the whole prompt, complete, close) and waits for the text before the next; the program submits all calls
and reads the last variable. With `--own-url` a client also drives the same calls by the OpenAI API (`/v1/completions`;
needs the extra [bench]) of our server, and with `--peer-url` of another
server, of the same model. `--delays` are seconds that every exchange with the server takes besides: once a call for
the client; for a program once for all submissions, which go together, and once for the reading. All are greedy, and of
equal lengths and texts: in every round first the client, then those by the OpenAI API, then the program, as the server
keeps what programs begin with; its cache is emptied before each, and texts are such as no round before had. Prints
medians in seconds, and how many times longer the program's rivals take: the median of the rounds, the smallest and the
largest.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc

import jaxctx
from jaxctx.v1 import session_service_pb2 as pb
from jaxctx.v1.generation_pb2 import SamplingParams
from jaxctx.v1.session_service_pb2_grpc import SessionServiceStub

if TYPE_CHECKING:
    from jaxctx.v1.session_service_pb2_grpc import SessionServiceAsyncStub

CHAIN, MAPS, TURNS = 20, 16, 8
TOKENS = 16  # of every output
SYSTEM = " ".join(
    f"Rule {n}: be brief, be careful, and say so when you do not know." for n in range(130)
)  # some 2k tokens


class Calls(Protocol):
    """One way to make calls: `call` returns what stands for the output in later prompts, `text` the text itself.

    The first part of a prompt is what many calls begin with; a program has it as its template, and others as inputs.
    """

    async def call(self, *prompt: Any) -> Any: ...
    async def text(self, output: Any) -> str: ...


class Driven:
    """The client makes every call and waits for it."""

    def __init__(self, client: jaxctx.aio.Client, delay_s: float) -> None:
        self._client, self._delay_s = client, delay_s

    async def call(self, *prompt: Any) -> str:
        await asyncio.sleep(self._delay_s)
        async with await self._client.create("".join(prompt)) as context:
            return (await context.complete(max_tokens=TOKENS, temperature=0, ignore_eos=True)).text

    async def text(self, output: str) -> str:
        return output


class Asked:
    """As `Driven`, by the OpenAI API."""

    def __init__(self, http: Any, url: str, model: str, delay_s: float) -> None:
        self._http, self._url, self._model, self._delay_s = http, url, model, delay_s

    async def call(self, *prompt: Any) -> str:
        await asyncio.sleep(self._delay_s)
        wanted = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"model": self._model, "prompt": "".join(prompt), **wanted}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            return str((await response.json())["choices"][0]["text"])

    async def text(self, output: str) -> str:
        return output


class Output(str):
    """The id of a variable, where a prompt has it."""


class Program:
    """Calls are submitted, and run when a text is asked for."""

    def __init__(self, stub: SessionServiceAsyncStub, session_id: str, delay_s: float) -> None:
        self._stub, self._session_id, self._delay_s = stub, session_id, delay_s

    async def call(self, *prompt: Any) -> Output:
        template, parameters = prompt[0], []
        for n, part in enumerate(prompt[1:]):
            is_output = isinstance(part, Output)
            parameter = (
                pb.Parameter(name=f"p{n}", variable_id=part) if is_output else pb.Parameter(name=f"p{n}", text=part)
            )
            parameters.append(parameter)
            template += f"{{{{p{n}}}}}"
        settings = pb.CallOutput(max_tokens=TOKENS, sampling=SamplingParams(temperature=0), ignore_eos=True)
        parameters.append(pb.Parameter(name="out", output=settings))
        request = pb.SubmitCallRequest(
            session_id=self._session_id, template=template + "{{out}}", parameters=parameters
        )
        return Output((await self._stub.SubmitCall(request)).outputs[0].variable_id)

    async def text(self, output: Output) -> str:
        await asyncio.sleep(2 * self._delay_s)  # the submissions, which went together, and this
        request = pb.GetVariableRequest(
            session_id=self._session_id, variable_id=output, criterion=pb.CRITERION_LATENCY, wait=True
        )
        return str((await self._stub.GetVariable(request)).variable.text)


async def chain(calls: Calls, salt: str) -> None:
    last = await calls.call(f"{salt}: begin. ")
    for n in range(1, CHAIN):
        last = await calls.call(f"{salt}: step {n} after ", last, ": ")
    await calls.text(last)


async def map_reduce(calls: Calls, salt: str) -> None:
    maps = await asyncio.gather(*(calls.call(f"{salt}. {SYSTEM}", f" Part {n}: ") for n in range(MAPS)))
    await calls.text(await calls.call(f"{salt}. All of it: ", *maps, ": "))


async def roles(calls: Calls, salt: str) -> None:
    said: list[Any] = []
    for turn in range(TURNS):
        for role in ("author", "critic"):
            said += [f" {role} {turn}: ", await calls.call(f"{salt}. {SYSTEM} ", *said, f" {role} {turn}: ")]
    await calls.text(said[-1])


WORKLOADS: dict[str, Callable[[Calls, str], Awaitable[None]]] = {
    f"chain of {CHAIN}": chain,
    f"map-reduce {MAPS} + 1": map_reduce,
    f"two roles, {TURNS} turns": roles,
}


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Callable[[float], Asked]]:
    """What makes calls of the first model that is served there."""
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        async with http.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        yield lambda delay_s: Asked(http, url, model, delay_s)


async def measure(target: str, rounds: int, delays: list[float], *, only: str = "", **urls: str) -> None:
    print(f"{'':24}{'delay':>8}{'program':>9}{'rival':>9}{'':>8}{'ratio':>8}{'smallest':>10}{'largest':>9}")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(jaxctx.aio.Client(target))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        stub = cast("SessionServiceAsyncStub", SessionServiceStub(channel))
        asked = {kind: await stack.enter_async_context(asking(url)) for kind, url in urls.items() if url}
        for name, workload in ((name, work) for name, work in WORKLOADS.items() if name.startswith(only)):
            for delay_s in delays:
                times: dict[str, list[float]] = {kind: [] for kind in ("client", *asked, "program")}
                for round_ in range(rounds):
                    salt = f"{name} {delay_s} {round_} {time.time_ns()}"
                    for kind in times:
                        await client.clear_cache()
                        session_id = (await stub.CreateSession(pb.CreateSessionRequest())).session.session_id
                        ways: dict[str, Any] = {kind: make(delay_s) for kind, make in asked.items()}
                        ways |= {"client": Driven(client, delay_s), "program": Program(stub, session_id, delay_s)}
                        started = time.perf_counter()
                        await workload(ways[kind], salt)
                        times[kind].append(time.perf_counter() - started)
                        await stub.DeleteSession(pb.DeleteSessionRequest(session_id=session_id))
                program = times.pop("program")
                for kind, rival in times.items():
                    ratios = [a / b for a, b in zip(rival, program, strict=True)]
                    print(
                        f"{name:24}{delay_s:8.2f}{statistics.median(program):9.2f}{statistics.median(rival):9.2f}"
                        f"{kind:>8}{statistics.median(ratios):8.2f}{min(ratios):10.2f}{max(ratios):9.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--own-url", default="", help="our server, as http://127.0.0.1:8000")
    parser.add_argument("--peer-url", default="", help="another server, as http://127.0.0.1:8000")
    parser.add_argument("--only", default="", help="the workload whose name begins so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.25])
    chosen = parser.parse_args()
    asyncio.run(
        measure(chosen.target, chosen.rounds, chosen.delays, only=chosen.only, own=chosen.own_url, peer=chosen.peer_url)
    )
