"""The campaign: long sequences of random operations in several processes, until one fails.

    scripts/play --operations 100000000 --jobs 2 [--seed 0]

Prints progress and operations a second; at a failure the seed, its setup and the fewest operations that still fail.
Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count

from .operations import run_seed

EACH = 20_000  # operations of one harness
REPORT_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Random operations of the cache against its oracle.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first one; each run has its own")
    options = parser.parse_args()
    seeds, finished, begun, reported = count(options.seed), 0, time.monotonic(), 0.0
    runs = -(-options.operations // EACH)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as processes:
        running: set[Future[str]] = set()
        while runs or running:
            while runs and len(running) < 2 * options.jobs:
                running.add(processes.submit(run_seed, next(seeds), EACH))
                runs -= 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                if failure := future.result():
                    print(failure, flush=True)
                    processes.shutdown(wait=False, cancel_futures=True)
                    return 1
                finished += EACH
            passed = time.monotonic() - begun
            if passed > reported + REPORT_S or not (runs or running):
                reported = passed
                print(
                    f"{finished:,} operations, {finished / passed:,.0f} /s, "
                    f"next seed {options.seed + finished // EACH}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
