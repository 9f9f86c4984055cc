"""What --help prints, and that it does nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize("name", ["environment", "check", "stubs", "check_rules.py", "sync_client.py"])
def test_help_is_printed_and_nothing_written(name: str, tmp_path: Path) -> None:
    """Of scripts that write, install or read a whole folder."""
    python = [sys.executable] if name.endswith(".py") else []
    environ = {**os.environ, "JAXCTX_VENV": str(tmp_path / "venv"), "PYTHON": "/no/such/python"}
    command = [*python, str(SCRIPTS / name), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"scripts/{name} " in done.stdout
    assert list(tmp_path.iterdir()) == []
