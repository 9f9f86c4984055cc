"""The command line: signals, exit statuses, mistakes in one line."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from jaxctx_server import cli
from jaxctx_server.cli import MALLOC, main, on_signals
from jaxctx_server.errors import MODEL, OK, USAGE, StartError
from jaxctx_server.signals import SAME_SIGNAL_S


@pytest.fixture
def _quiet() -> Any:
    """`main` configures logging for a process of its own."""
    root, level = logging.getLogger(), logging.getLogger("jaxctx").level
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    logging.getLogger("jaxctx").setLevel(level)


class Loop:
    """What `on_signals` needs of an event loop, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handlers: dict[int, Any] = {}
        self.add_signal_handler = self.handlers.__setitem__

    def time(self) -> float:
        return self.now


def test_the_first_signal_stops_and_the_second_ends() -> None:
    loop, stop, ended = Loop(), asyncio.Event(), []
    on_signals(loop, stop, lambda: ended.append(True))  # type: ignore[arg-type]
    loop.now = 100.0
    loop.handlers[signal.SIGTERM]()
    assert stop.is_set()
    loop.now += SAME_SIGNAL_S / 2
    loop.handlers[signal.SIGTERM]()  # the same one, to the whole group
    assert ended == []
    loop.now += SAME_SIGNAL_S
    loop.handlers[signal.SIGINT]()
    assert ended == [True]


def test_ending_at_once_removes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        program = "import sys, pathlib; from jaxctx_server.cli import end_now; end_now(7, pathlib.Path(sys.argv[1]))"
        done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=600, check=False)
    assert done.returncode == 7
    assert not path.exists()


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(argv, {})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return status, captured.err


class Begun(Exception):
    """The process would begin once more."""


@pytest.mark.parametrize("tuned", [None, "glibc.malloc.check=0"])
def test_the_command_begins_once_more_to_set_up_memory(monkeypatch: pytest.MonkeyPatch, tuned: str | None) -> None:
    def execve(path: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Begun(path, argv[0], environ)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["jaxctx-serve", "--nothing-of-this-name"])
    environ = {"HOME": "/"} if tuned is None else {"GLIBC_TUNABLES": tuned}
    if tuned:
        assert main(None, environ) == USAGE
    else:
        with pytest.raises(Begun) as raised:
            main(None, environ)
        assert raised.value.args == (sys.executable, sys.executable, environ | {"GLIBC_TUNABLES": MALLOC})


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--page-size", "0"], USAGE, 'Invalid value "0" for --page-size. Must be >= 1.'),
        (["--kv-tokens", "9", "--memory-fraction", "0.5"], USAGE, "only one of them may be set"),
        (["--max-batch", "64", "--max-batch-tokens", "8"], USAGE, "--max-batch-tokens: must be at least --max-batch"),
        (["--keys", "/no/such/keys"], USAGE, "--keys: /no/such/keys: No such file"),
        (["--host", "0.0.0.0"], USAGE, "without keys the server listens on loopback only"),
        (["convert", "/no/such/model", "/no/such/target"], MODEL, "/no/such/model: does not exist"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = fails(capsys, *argv)
    assert found == status
    assert text.startswith("jaxctx-serve: ")
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.usefixtures("_quiet")
def test_convert_writes_a_directory_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxctx.model.config import ModelConfig
    from jaxctx.model.weights import read_config, stored_matrix_types
    from scripts.checkpoints import write_random

    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=64,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        max_positions=32,
        query_key_norm="head",
        tied=True,
    )
    write_random(tmp_path / "src", config, seed=0)
    types = ["--dtype", "bfloat16", "--weights-dtype", "int8"]
    command = ["convert", str(tmp_path / "src"), str(tmp_path / "dst"), *types]
    assert main(command, {}) == OK
    captured = capsys.readouterr()
    assert captured.out == f"wrote {tmp_path}/dst\n"
    assert "weights: " in captured.err
    assert read_config(tmp_path / "dst").layers == 1
    assert stored_matrix_types(tmp_path / "dst").dtype == "int8"
    status, text = fails(capsys, *command)
    assert status == USAGE
    assert "exists" in text


@pytest.mark.parametrize("model", ["/no/such/model", __file__])
def test_a_bad_path_ends_the_process_with_its_status(model: str) -> None:
    command = [
        sys.executable,
        "-m",
        "jaxctx_server.cli",
        model,
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--compile-cache",
        "None",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == MODEL
    assert done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert last.startswith(f"jaxctx-serve: {model}: ")
    assert all(re.fullmatch(r"loading, \d+ s", line) for line in before), "which a busy machine may have time for"


def test_help_needs_neither_jax_nor_grpc() -> None:
    code = "import sys; from jaxctx_server import cli; sys.exit(len({'jax', 'grpc'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


@pytest.mark.parametrize("missing", ["cyclopts", "rich", "grpc_health", "jax"])
def test_without_the_server_extra_one_line_says_what_to_install(missing: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from jaxctx_server.cli import main\n"
        "sys.exit(main(['--grpc-port', '0', '--http-port', '0', '--compile-cache', 'None'], {}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert done.stderr.splitlines() == [f"jaxctx-serve: {missing} is not installed: pip install 'jaxctx[server]'"]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_looked_for_once_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """And not before. A router, which loads none, looks for it all the time."""
    during: list[bool] = []

    def build(config: object, progress: object) -> tuple[str, str]:
        during.append(gc.isenabled())
        if fails:
            raise StartError("no model")
        return "engine", "text"

    monkeypatch.setattr("jaxctx_server.engine_builder.build.build_engine", build)
    given: Any = object()
    with pytest.raises(StartError) if fails else nullcontext():
        assert cli.load_engine(given, given) == ("engine", "text")
    assert during == [False]
    assert gc.isenabled()
    gc.unfreeze()
