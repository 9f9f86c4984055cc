#!/usr/bin/env python3
"""Seconds until a server says that it is ready: with the largest steps compiled, and with all of them.

    .venv/bin/python scripts/bench_start.py [MODEL_DIR] [--rounds 3]

Each round starts four servers, one after the other: with an empty compilation cache as a server starts by itself and
with `--compile-all`, then the same with the cache that the latter has filled. Nothing else should run.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

READY = re.compile(r"ready in ([0-9.]+) s")


def seconds_until_ready(model: str | None, cache: Path, *, compile_all: bool) -> float:
    """Start a server, and stop it once it is ready. Raises SystemExit if it ends before."""
    command = [str(Path(sys.executable).with_name("jaxctx-serve")), *([] if model is None else [model])]
    command += ["--grpc-port", "0", "--http-port", "0", "--compile-cache", str(cache)]
    command += ["--compile-all"] if compile_all else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = READY.search(line)
            if found is not None:
                return float(found[1])
        raise SystemExit(f"{' '.join(command)}: ended before it was ready")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory (default: the bundled model)")
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for _ in range(settings.rounds):
        with tempfile.TemporaryDirectory() as directory:
            one, whole = Path(directory, "one"), Path(directory, "whole")
            for name, cache, compile_all in (
                ("empty cache", one, False),
                ("empty cache, --compile-all", whole, True),
                ("filled cache", whole, False),
                ("filled cache, --compile-all", whole, True),
            ):
                taken = seconds_until_ready(settings.model, cache, compile_all=compile_all)
                seconds.setdefault(name, []).append(taken)
    for name, each in seconds.items():
        print(f"{name}: {statistics.median(each):.1f} s ({min(each):.1f} to {max(each):.1f}), n = {len(each)}")


if __name__ == "__main__":
    main()
