"""scripts/bench: the scenarios against scripted servers, and what becomes of their numbers."""

# ruff: noqa: N802 - servicers bear the names of the protocol

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxctx.v1 import context_service_pb2 as pb
from jaxctx.v1 import generation_pb2, model_service_pb2
from jaxctx.v1.context_service_pb2_grpc import ContextServiceServicer, add_ContextServiceServicer_to_server
from jaxctx.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


class Recorder:
    """A target that answers at once and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[tuple[int, ...], int]] = []

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Any:
        from bench_serving.load import Answer

        self.requests.append((tuple(prompt), max_tokens))
        return Answer(first_s=0.1, last_s=0.1 + 0.01 * (max_tokens - 1), tokens=max_tokens, first_tokens=1, cached=0)

    async def drafts(self) -> tuple[int, int]:
        return 3 * len(self.requests), len(self.requests)


async def test_scenarios_ask_both_servers_the_same_and_differ_by_round() -> None:
    from bench_serving.command import all_rounds
    from bench_serving.load import SCENARIOS
    from bench_serving.report import OURS, PEER

    chosen = {name: SCENARIOS[name] for name in ("batch8", "prefix2k", "multiturn")}
    ours, peer = Recorder(), Recorder()
    measured = await all_rounds(chosen, {OURS: ours, PEER: peer}, 8192, rounds=2, seed=0, started={})
    assert ours.requests == peer.requests
    assert len(set(ours.requests)) == len(ours.requests) == 2 * (16 + 3 + 6)
    assert set(measured) == {"batch8", "prefix2k-cold", "prefix2k-hit", "multiturn"}
    assert all(len(measures) == 2 for servers in measured.values() for measures in servers.values())
    assert measured["batch8"][OURS][0].ttft_ms == pytest.approx(100)
    assert measured["batch8"][OURS][0].tpot_ms == pytest.approx(10)
    assert (measured["batch8"][OURS][1].drafted, measured["batch8"][OURS][1].accepted) == (3 * 16, 16)


async def test_every_scenario_stays_within_the_length_it_states() -> None:
    from bench_serving.load import SCENARIOS, Load

    for scenario in SCENARIOS.values():
        target = Recorder()
        await scenario.run(Load(target, 100, "seed"))
        assert max(len(prompt) + count for prompt, count in target.requests) == scenario.longest
        assert {token for prompt, _ in target.requests for token in prompt} <= set(range(5, 100))


async def test_a_text_that_repeats_itself_has_a_passage_five_times_and_begins_it_again() -> None:
    from bench_serving.load import SCENARIOS, Load

    target = Recorder()
    await SCENARIOS["repeat"].run(Load(target, 8192, "seed"))
    (first, _), (prompt, count) = target.requests
    assert (len(prompt), count) == (552, 256)
    assert len({prompt[8 + 104 * i : 104 + 104 * i] for i in range(5)}) == 1
    assert prompt[-24:] == prompt[8:32]
    assert first != prompt


class Echo(ContextServiceServicer, ModelServiceServicer):
    """Speaks the protocol; counts contexts that were not closed."""

    def __init__(self, shortfall: int = 0) -> None:
        self.open: dict[str, int] = {}
        self.made = 0
        self.shortfall = shortfall

    async def GetModel(self, request: Any, context: Any) -> model_service_pb2.GetModelResponse:
        return model_service_pb2.GetModelResponse(
            model=model_service_pb2.Model(model_id="echo", vocab_size=100, max_context_tokens=300, dtype="float32")
        )

    async def CreateContext(self, request: Any, context: Any) -> pb.CreateContextResponse:
        self.made += 1
        response = pb.CreateContextResponse()
        response.context.context_id = f"c{self.made}"
        self.open[response.context.context_id] = 0
        return response

    async def Fill(self, request: pb.FillRequest, context: Any) -> pb.FillResponse:
        assert request.defer
        self.open[request.context_id] += len(request.tokens.ids)
        return pb.FillResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        assert request.sampling.HasField("temperature")
        assert request.ignore_eos
        prompt = self.open[request.context_id]
        for _ in range(request.max_tokens - self.shortfall):
            yield pb.GenerateResponse(context_id=request.context_id, token_ids=[7])
        yield pb.GenerateResponse(usage=generation_pb2.Usage(prompt_tokens=prompt, cached_tokens=prompt // 16 * 16))

    async def CloseContext(self, request: pb.CloseContextRequest, context: Any) -> pb.CloseContextResponse:
        del self.open[request.context_id]
        return pb.CloseContextResponse()


async def serve(echo: Echo) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    add_ContextServiceServicer_to_server(echo, server)
    add_ModelServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_ours_is_driven_through_grpc_and_leaves_no_context(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from bench_serving.command import measure, parse
    from bench_serving.report import as_json, table

    echo = Echo()
    server, address = await serve(echo)
    settings = parse(["--server", address, "--scenarios", "single,batch8,fanout16", "--rounds", "2"])
    measured = await measure(settings, address, None, {})
    await server.stop(None)
    assert echo.open == {}
    assert echo.made == 2 + 2 * (1 + 16)
    assert "fanout16: left out" in capsys.readouterr().out
    assert [m.cached for m in measured["single"]["jaxctx"]] == [128, 128]
    written = json.loads(json.dumps(as_json(measured, {"seed": 0})))
    assert len(written["scenarios"]["single"]["servers"]["jaxctx"]["rounds"]) == 2
    assert written["scenarios"]["single"]["headline"]["ratio"] is None
    assert table(measured).count("\n") == 2


async def test_a_peer_may_be_another_build_of_ours() -> None:
    from bench_serving.command import measure, parse
    from bench_serving.report import table

    ours, other = Echo(), Echo()
    (server, address), (other_server, other_address) = await serve(ours), await serve(other)
    asked = ["--server", address, "--peer-url", other_address, "--peer-api", "grpc", "--scenarios", "single"]
    measured = await measure(parse([*asked, "--rounds", "3"]), address, other_address, {})
    for each in (server, other_server):
        await each.stop(None)
    assert ours.made == other.made == 2 + 3 * 1
    assert ours.open == other.open == {}
    assert [len(measured["single"][name]) for name in ("jaxctx", "peer")] == [3, 3]
    assert "(" in table(measured)


def test_what_tells_whether_a_started_peer_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_serving import command

    monkeypatch.setattr(command, "grpc_ready", lambda address: ("grpc", address))
    monkeypatch.setattr(command, "http_ready", lambda url: ("http", url))
    for api, address in (("grpc", "127.0.0.1:5"), ("openai", "http://127.0.0.1:5")):
        found, is_ready = command.peer_address(api, 5)
        assert found == address
        assert is_ready() == ("grpc" if api == "grpc" else "http", address)


async def test_too_few_tokens_end_the_run() -> None:
    from bench_serving.command import measure, parse
    from bench_serving.targets import ServerError

    server, address = await serve(Echo(shortfall=1))
    with pytest.raises(ServerError, match="7 tokens came where 8 were asked for"):
        await measure(parse(["--server", address, "--scenarios", "single"]), address, None, {})
    await server.stop(None)


async def test_events_of_a_peer_are_read_as_they_come() -> None:
    from bench_serving.targets import read_events

    async def lines() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"text": "a"}]}\n'
        yield b"\n"
        await asyncio.sleep(0)
        yield b'data: {"choices": [{"text": "b"}], "usage": null}\n'
        usage = b'{"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 32}}'
        yield b'data: {"choices": [], "usage": ' + usage + b"}\n"
        yield b"data: [DONE]\n"

    answer = await read_events(lines(), begin=0.0)
    assert (answer.tokens, answer.cached) == (9, 32)
    assert answer.last_s > answer.first_s > 0


def test_ratios_pair_the_rounds() -> None:
    from bench_serving.load import Measure
    from bench_serving.report import OURS, PEER, headline, ratio, table

    def measures(*rates: float) -> list[Measure]:
        return [Measure(ttft_ms=1e3 / rate, tpot_ms=1, tokens_per_s=rate, wall_s=1, cached=None) for rate in rates]

    servers = {OURS: measures(20, 40, 90), PEER: measures(10, 20, 30)}
    against = ratio(servers, headline("single")[0])
    assert against is not None
    assert (against.median, against.low, against.high) == (2, 2, 3)
    assert headline("prefill1k") == ("ttft_ms", False)
    assert "2.00 (2.00-3.00)" in table({"single": servers})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scenarios", "nonsense"],
        ["--rounds", "0"],
        ["--server", "a:1", "--model", "dir"],
        ["--peer-url", "http://a", "--peer-command", "b {port}"],
        ["--plot", "a.png"],
        ["--peer-api", "grpc"],
        ["--peer-api", "rest", "--peer-url", "a:1"],
    ],
)
def test_contradictory_arguments_are_refused(arguments: list[str]) -> None:
    from bench_serving.command import parse

    with pytest.raises(SystemExit, match="2"):
        parse(arguments)


def test_a_server_that_ends_early_is_reported_with_its_last_words() -> None:
    from bench_serving.servers import StartError, running

    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(StartError, match=r"(?s)status 3.*no such model"), running("ours", command, lambda: False, 30):
        pass


async def test_the_one_that_is_not_measured_is_paused() -> None:
    from bench_serving.command import all_rounds
    from bench_serving.load import Load, Scenario
    from bench_serving.report import OURS, PEER

    events: list[str] = []

    class Started:
        def __init__(self, name: str) -> None:
            self.name = name

        def pause(self) -> None:
            events.append(f"{self.name} pauses")

        def resume(self) -> None:
            events.append(f"{self.name} goes on")

    async def run(load: Load) -> dict[str, object]:
        events.append("measured")
        return {}

    both = {OURS: Started(OURS), PEER: Started(PEER)}
    scenario = {"nothing": Scenario("", 1, run)}
    await all_rounds(scenario, {OURS: Recorder(), PEER: Recorder()}, 8192, rounds=1, seed=0, started=both)
    first = [f"{PEER} pauses", f"{OURS} goes on", "measured"]
    assert events == [*first, f"{OURS} pauses", f"{PEER} goes on", "measured"]


def test_a_paused_server_does_nothing_and_still_can_be_ended(tmp_path: Path) -> None:
    from bench_serving.servers import running

    log = tmp_path / "log"
    program = f"import time\nwhile True: open({str(log)!r}, 'a').write('x'); time.sleep(0.01)"
    with running("ours", [sys.executable, "-c", program], log.exists, 30) as server:
        server.pause()
        time.sleep(0.1)
        size = log.stat().st_size
        time.sleep(0.3)
        assert log.stat().st_size == size
        server.resume()
        while log.stat().st_size == size:
            time.sleep(0.01)
        server.pause()


def test_a_started_server_is_stopped_with_its_children() -> None:
    from bench_serving.servers import peer_command, running

    command = peer_command(f"{shlex.quote(sys.executable)} -c 'import time; time.sleep({{port}})'", 60)
    assert command[-1] == "import time; time.sleep(60)"
    with running("peer", command, lambda: True, 30):
        pass
    with pytest.raises(ValueError, match="port"):
        peer_command("serve", 1)
