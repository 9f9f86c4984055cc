"""scripts/test: how it ends when a test takes its whole process down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CRASHES = """
import os, signal
def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)
def test_after():
    pass
"""


def test_a_test_that_crashes_fails_the_run_by_name(tmp_path: Path) -> None:
    """pytest-xdist 3.8 puts another process in place of one that died, gives it no file, and waits for it for ever."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "test", scripts)
    (scripts / "environment").write_text(f"#!/bin/sh\necho '{sys.prefix}'\n")
    (scripts / "environment").chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (tmp_path / "test_1.py").write_text(CRASHES)
    for number in range(2, 6):
        (tmp_path / f"test_{number}.py").write_text("def test_passes():\n    pass\n")
    result = subprocess.run(
        [str(scripts / "test")],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "crashed while running 'test_1.py::test_crashes'" in result.stdout
    assert "1 failed" in result.stdout
