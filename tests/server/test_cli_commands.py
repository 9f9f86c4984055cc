"""The command line: each command runs its own function, and prepares the process only as far as it needs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxctx_server import cli
from jaxctx_server.config import (
    CompileConfig,
    ConvertConfig,
    DrawConfig,
    KubernetesConfig,
    PlanConfig,
    RayConfig,
    ServeConfig,
)
from jaxctx_server.errors import OK, USAGE

COMMANDS = [
    (["model"], "serve", ServeConfig("model")),
    (["compile", "model"], "compile_ahead", CompileConfig("model")),
    (["plan", "--target", "v5e"], "plan", PlanConfig(target="v5e")),
    (["convert", "a", "b"], "convert", ConvertConfig(Path("a"), Path("b"))),
    (["draw", "mine", "--server", "here:1"], "draw", DrawConfig("mine", server="here:1")),
    (
        ["ray", "--router", "here:1", "--engines", "2:4", "--", "model", "--max-batch", "4"],
        "ray",
        RayConfig(("model", "--max-batch", "4"), router="here:1", engines="2:4"),
    ),
]


@pytest.mark.parametrize(("argv", "function", "config"), COMMANDS)
def test_each_command_runs_its_function(
    argv: list[str], function: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def record(config: Any) -> int:
        seen.append(config)
        return 7

    monkeypatch.setattr(cli, function, record)
    assert cli.main(argv, {}) == 7
    assert seen == [config]
    assert type(seen[0]) is type(config)


def test_kubernetes_has_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(KubernetesConfig()) == OK
    assert capsys.readouterr().out.startswith("# A router and its engines on Kubernetes")


class Prepared:
    """What was done to the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ignored: list[int] = []
        self.environments: list[dict[str, str]] = []
        monkeypatch.setattr(signal, "signal", lambda number, handler: self.ignored.append(number))
        monkeypatch.setattr(os, "execve", lambda path, argv, environ: self.environments.append(environ))


@pytest.mark.parametrize("subcommand", ["", "model", "--role"])
def test_a_server_ignores_hangups_and_starts_with_settings_of_the_c_library(
    subcommand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared(monkeypatch)
    cli.prepare_process(subcommand, {"A": "b"})
    assert prepared.ignored == [signal.SIGHUP]
    assert prepared.environments == [{"A": "b", "GLIBC_TUNABLES": cli.MALLOC}]
    cli.prepare_process(subcommand, {"GLIBC_TUNABLES": "own"})
    assert len(prepared.environments) == 1


@pytest.mark.parametrize(("subcommand", "starts_again"), [("compile", 1), ("plan", 1), ("convert", 1), ("draw", 0)])
def test_other_commands_end_with_a_hangup(subcommand: str, starts_again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(monkeypatch)
    cli.prepare_process(subcommand, {})
    assert prepared.ignored == []
    assert len(prepared.environments) == starts_again


def test_drawing_without_a_server_is_a_mistake_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", "mine", "--server", "127.0.0.1:1"], {}) == USAGE
    error = capsys.readouterr().err
    assert error.startswith("jaxctx-serve: 127.0.0.1:1: ")
    assert error.count("\n") == 1


def test_without_ray_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["ray", "--router", "127.0.0.1:1", "--engines", "1"], {}) == USAGE
    assert capsys.readouterr().err == "jaxctx-serve: ray is not installed: pip install 'jaxctx[ray]'\n"


def test_drawing_with_roots_that_are_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", "mine", "--tls-ca", str(tmp_path / "missing")], {}) == USAGE
    assert f"tls.ca_file: {tmp_path}/missing: No such file" in capsys.readouterr().err
