"""Progress of a start: plain lines and bars."""

from __future__ import annotations

import io
import re
import subprocess
import sys

from jaxctx_server.errors import USAGE
from jaxctx_server.progress import SILENCE_S, PlainLines, Progress, progress_shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_progress_prints_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = Progress(PlainLines(stream, lambda: now[0]).show)
    for done in range(0, 101):
        progress.weights(done << 20, 100 << 20)
        now[0] += 0.1
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["weights: 0.0/100.0 MiB, 0 s", "weights: 20.0/100.0 MiB, 2 s"]
    assert lines[-1] == "weights: 100.0/100.0 MiB, 10 s"
    assert len(lines) == 6


def test_plain_progress_says_so_when_nothing_else_is_said_for_long() -> None:
    stream, now = io.StringIO(), [0.0]
    lines = PlainLines(stream, lambda: now[0])
    progress = Progress(lines.show)

    def passes(seconds: int) -> list[str]:
        """Each second somebody asks; what is said."""
        said = len(stream.getvalue())
        for _ in range(seconds):
            now[0] += 1
            lines.write_if_silent()
        return stream.getvalue()[said:].splitlines()

    assert passes(11) == ["loading, 5 s", "loading, 10 s"]
    assert lines.silence_left_s() == SILENCE_S - 1
    progress.weights(1 << 20, 2 << 20)
    assert passes(4) == []
    progress.weights(2 << 20, 2 << 20)  # and then what is no weights
    assert passes(6) == ["starting, 20 s"]
    progress.compiled("step of 4 rows", 1, 14)
    assert passes(6) == ["compiling: 1/14 step of 4 rows, 26 s"]


def test_under_a_pipe_a_start_that_reports_nothing_is_not_silent() -> None:
    program = """
import sys, time
from jaxctx_server import progress
from jaxctx_server import cli
from jaxctx_server.engine_builder import build
from jaxctx_server.errors import StartError
progress.SILENCE_S = 0.05
def load(config, progress):
    time.sleep(1)
    progress.compiled("step of 4 rows", 1, 2)
    time.sleep(1)
    raise StartError("at the end")
build.build_engine = load
sys.exit(cli.main(["--grpc-port", "0"], {}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == USAGE
    *lines, last = done.stderr.splitlines()
    assert last == "jaxctx-serve: at the end"
    assert re.fullmatch(r"loading, \d+ s", lines[0])
    assert re.fullmatch(r"compiling: 1/2 step of 4 rows, \d+ s", lines[-1])
    assert lines.count(lines[-1]) > 1


def test_bars_on_a_terminal() -> None:
    stream = Terminal()
    with progress_shown(stream) as progress:
        progress.weights(0, 0)
        progress.weights(5 << 20, 10 << 20)
        progress.weights(10 << 20, 10 << 20)
        progress.compiled("step of 4 rows", 1, 2)
    assert "10.0/10.0 MiB" in stream.getvalue()
    assert "1/2 step of 4 rows" in stream.getvalue()
