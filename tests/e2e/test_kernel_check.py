"""The check on the user's chip, as processes, on a CPU that has a planted kernel: starts, refusals, the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxctx.model.config import ModelConfig
from jaxctx_server.errors import CHECK, NEVER_ENDS, OK, USAGE
from scripts.checkpoints import write_random
from tests.e2e.server_processes import ROOT, SMALL, Server, environment
from tests.echo import echo_text

PLANTED = (sys.executable, "-m", "tests.serve_planted")
SIZES = (*SMALL[:4], "--kv-tokens", "1024", "--max-context-tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=512,
        width=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=64,
        ffn=16,
        max_positions=256,
        query_key_norm="head",
    )
    write_random(path, config, seed=0)
    (path / "tokenizer.json").write_text(echo_text().tokenizer._backend.to_str(), "utf-8")
    return str(path)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setenv("PLANTED_KERNEL", name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command until it ends."""
    command = [*PLANTED, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment()
    )


def attention_of(server: Server) -> tuple[str, str]:
    """The labels of the metric: what computes attention, and why."""
    with urllib.request.urlopen(f"{server.http_url}/metrics") as answer:
        found = re.findall(
            r'jaxctx_attention_info\{.*implementation="(\w+)",reason="(\w+)"\} 1.0', answer.read().decode()
        )
    assert len(found) == 1
    return found[0]


def output_of(server: Server, model: str) -> str:
    body = {"prompt": "a prompt of more than one page of tokens" * 3, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server.http_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def served(model: str, cache: Path, *options: str) -> tuple[tuple[str, str], str, str, str]:
    """Of a server that is started and ended: `attention_of` it, an output, its banner and its log."""
    server = Server(model, *SIZES, *options, cache=cache, command=PLANTED)
    try:
        attention, output = attention_of(server), output_of(server, model)
    finally:
        server.process.terminate()
        _, log = server.end()
    return attention, output, server.banner, log


@pytest.mark.slow
def test_a_wrong_kernel_is_replaced_and_outputs_are_right(model: str, plant: Callable, tmp_path: Path) -> None:
    """In banner, log and metrics."""
    plant("first layer")
    attention, output, banner, log = served(model, tmp_path)
    assert attention == ("reference", "differs")
    assert re.search(r"WARNING +attention is computed by plain JAX.*slower than a kernel: tpu:", banner)
    assert "differs: sequence " in banner
    assert "attention is computed by plain JAX, which is slower than a kernel: tpu:" in log
    attention, right_output, _, _ = served(model, tmp_path, "--attention", "reference")
    assert attention == ("reference", "requested")
    assert output == right_output


@pytest.mark.campaign
def test_what_a_right_kernel_passed_is_not_compared_at_the_next_start(
    model: str, plant: Callable, tmp_path: Path
) -> None:
    plant("right")
    outputs = []
    for start in range(2):
        attention, output, banner, _ = served(model, tmp_path)
        assert attention == ("tpu", "checked")
        assert "attention tpu kernel, equal to the reference on this device in 9 cases" in banner
        assert ("at an earlier start" in banner) == (start == 1)
        assert ", and in whole steps of 4 rows (mean difference " in banner
        assert "WARNING" not in banner
        outputs.append(output)
    _, reference_output, _, _ = served(model, tmp_path, "--attention", "reference")
    assert {*outputs} == {reference_output}


@pytest.mark.slow
def test_who_wants_a_kernel_or_nothing_gets_nothing(model: str, plant: Callable, tmp_path: Path) -> None:
    plant("does not compile")
    done = run(
        model, *SIZES, "--attention", "kernel", "--grpc-port", "0", "--no-http", "--compile-cache", str(tmp_path)
    )
    assert done.returncode == USAGE
    assert re.search(
        r"^jaxctx-serve: --attention: kernel: tpu: .*: does not compile: NotImpl", done.stderr, re.MULTILINE
    )
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
def test_a_kernel_that_ends_the_process_does_so_twice(model: str, plant: Callable, tmp_path: Path) -> None:
    plant("aborts")
    arguments = (model, *SIZES, "--grpc-port", "0", "--no-http", "--compile-cache", str(tmp_path))
    for _ in range(2):
        assert run(*arguments).returncode == -6  # SIGABRT
    server = Server(model, *SIZES, cache=tmp_path, command=PLANTED)
    try:
        assert attention_of(server) == ("reference", "crashed")
        assert "ended this process when it was compared with the reference, twice" in server.banner
    finally:
        server.kill()


@pytest.mark.campaign
def test_a_kernel_that_never_ends_does_so_once(model: str, plant: Callable, tmp_path: Path) -> None:
    plant("never ends")
    arguments = (model, *SIZES, "--check-timeout-s", "30", "--compile-cache", str(tmp_path))
    done = run(*arguments, "--grpc-port", "0", "--no-http")
    assert done.returncode == NEVER_ENDS, done.stderr
    said = "attention: tpu: decoding, 1 rows: did not end within 30 s; the next start takes plain JAX"
    assert f"jaxctx-serve: {said}" in done.stderr
    assert len(re.findall(said, done.stderr)) == 2  # in the log, too
    assert "Traceback" not in done.stderr
    server = Server(model, *SIZES, cache=tmp_path, command=PLANTED)
    try:
        assert attention_of(server) == ("reference", "never_ends")
        assert "slower than a kernel: tpu: decoding, 1 rows: never ends: run jaxctx-serve check" in server.banner
        assert output_of(server, model)
    finally:
        server.kill()
    done = run("check", *arguments, "--json", str(tmp_path / "report.json"))
    assert done.returncode == CHECK, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "never ends"


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        pytest.param("right", OK, "equal to the reference on this device in 9 cases", marks=pytest.mark.campaign),
        pytest.param(
            *("one head", CHECK, r"tpu: \w+, \d rows: differs: from the reference: row \d, query head 1"),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            *(
                "first layer",
                CHECK,
                r"tpu: whole steps, \d rows: differs: sequence \d, token \d+: a log probability of",
            ),
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            *("aborts", CHECK, "tpu: decoding, 1 rows: crashed: the process was ended by SIGABRT; what comes after"),
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_the_command_names_the_case(
    model: str, plant: Callable, tmp_path: Path, name: str, status: int, said: str
) -> None:
    plant(name)
    done = run("check", model, *SIZES, "--json", str(tmp_path / "report.json"))
    assert done.returncode == status, done.stderr
    assert re.search(said, done.stdout.splitlines()[-2])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == {"right": "equal", "aborts": "crashed"}.get(name, "differs")
    assert re.search(said, report["summary"])
    assert report["model"] == Path(model).name
    assert bool(report["timings"]) == (name == "right")
