"""The campaign's command: it runs as many operations as told, reports, and says when a run failed."""

import subprocess
import sys
from pathlib import Path

import pytest

from .stateful import campaign

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_it_plays_and_reports():
    command = [sys.executable, "-m", "tests.jaxctx.cache.stateful.campaign", "--operations", "50000", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("60,000 operations"), done.stdout  # whole runs
    assert done.stdout.rstrip().endswith("next seed 3")


def test_it_ends_at_the_first_failure(monkeypatch, capsys):
    class Failing:
        """Runs in this process, so that its work can be replaced."""

        def __init__(self, *_):
            self.ended = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            assert self.ended, "other runs would go on"

        def submit(self, function, seed, operations):
            future = campaign.Future()
            future.set_result(f"seed {seed} went wrong" if seed == 8 else "")
            return future

        def shutdown(self, wait, cancel_futures):
            self.ended = cancel_futures and not wait

    monkeypatch.setattr(campaign, "ProcessPoolExecutor", Failing)
    monkeypatch.setattr(sys, "argv", ["play", "--operations", "10000000", "--seed", "5"])
    assert campaign.main() == 1
    assert "seed 8 went wrong" in capsys.readouterr().out
