"""scripts/environment: what it refuses, and what it leaves alone. Making one for real is what .ci/run does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "environment"), "server"],
        env={**os.environ, "JAXCTX_VENV": str(folder), **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("python", ["/nonexistent/python", "ls", "3.10"])
def test_an_unsuitable_python_is_refused_by_name(tmp_path: Path, python: str) -> None:
    result = environment(tmp_path / "new", JAXCTX_PYTHON=python)
    assert result.returncode == 3
    assert python in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_of_other_things_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    result = environment(tmp_path)
    assert result.returncode == 1
    assert "not an environment" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_one_made_by_hand_with_another_python_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "by hand"
    venv.create(folder, with_pip=False)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").write_text('#!/bin/sh\ntest "$2" = pass\n')
    (folder / "bin" / "python").chmod(0o755)
    result = environment(folder, JAXCTX_PYTHON=sys.executable)
    assert result.returncode == 1
    assert "made by hand" in result.stderr
    assert (folder / "pyvenv.cfg").exists()


def test_a_ready_one_is_only_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "ready"
    venv.create(folder, with_pip=False)  # without pip nothing can be installed: reuse is the only way to succeed
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    checksum = subprocess.run(["cksum"], input=pyproject, capture_output=True, check=True).stdout.decode().strip()
    (folder / "jaxctx.server").write_text(f"{folder} {ROOT} {checksum}")
    result = environment(folder)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{folder}\n", "")


@pytest.mark.parametrize("status", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_under_a_pipe_a_long_install_says_how_far_it_is(tmp_path: Path, status: int) -> None:
    """In place of pip: what waits until somebody has read a line about it."""
    folder, seen = tmp_path / "slow", tmp_path / "seen"
    venv.create(folder, with_pip=False)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pip "*) ;; *) exec {sys.executable} "$@" ;; esac\n'
        f"echo Collecting one; echo Collecting another\nuntil [ -e {seen} ]; do sleep 0.1; done\nexit {status}\n"
    )
    (folder / "bin" / "python").chmod(0o755)
    process = subprocess.Popen(
        [str(ROOT / "scripts" / "environment"), "server"],
        env={**os.environ, "JAXCTX_VENV": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert next(process.stderr) == f"jaxctx: installing jaxctx[server] into {folder}\n"
        assert re.fullmatch(r"jaxctx: \d+ s: Collecting another\n", next(process.stderr))
        seen.touch()
        out, err = process.communicate(timeout=600)
    finally:
        seen.touch()
        process.kill()
    assert process.returncode == status
    assert out == ("" if status else f"{folder}\n")
    assert ("could not install" in err) == bool(status)
    if status:
        assert "Collecting one" in err
