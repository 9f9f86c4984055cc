"""The command `scripts/equality`: the product of kernels, types, page sizes, head dims, groups and trees, or a part.

    scripts/equality                                  what there is, and what has been run of it
    scripts/equality --fraction 0.05 [--seed 7]       a twentieth of every part, drawn by the seed
    scripts/equality --fraction 1                     all of it: some eight hours of a core
    scripts/equality --fraction 1 --only 'attend mosaic_hopper int8 page 16 *' --minutes 30

Every result is a line of the report, a file of JSON lines (`--report`, build/equality.jsonl). What is there for this
seed is not run again, so that a run that was stopped goes on where it was; what was wrong is. A kernel that waits for
ever ends the run after 15 minutes: run it again, and it goes on behind that. Ends with 1 if anything was wrong, also
before. A failure is had again by its name and seed: `--only NAME --seed N --fraction 1 --report /dev/null`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

import jax

from .checks import Subject
from .product import Combination, combinations, draw, part_of

ROOT = Path(__file__).parents[3]
REPORT = ROOT / "build/equality.jsonl"
OLDEST_JAX = (0, 12)
LIMIT_S = 900.0  # of one combination, which takes seconds
Verdict: TypeAlias = Literal["equal", "announced", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("equal", "announced", "wrong")


@dataclass(frozen=True)
class Result:
    """A line of the report."""

    name: str
    seed: int
    verdict: Verdict
    drawn: str
    detail: str
    seconds: float


def read_report(path: Path) -> list[Result]:
    """What was found, each combination and seed once: the last."""
    if not path.is_file():
        return []
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(result.name, result.seed): result for result in results}.values())


def run(combination: Combination, subject: Subject) -> Result:
    """Check one."""
    begun = time.monotonic()
    verdict: Verdict
    detail = ""
    try:
        verdict = "announced" if subject.check(combination.case) else "equal"
    except Exception as error:  # interpreters raise what they like
        verdict, detail = "wrong", f"{type(error).__name__}: {' '.join(str(error).split()):.500}"
    seconds = round(time.monotonic() - begun, 2)
    return Result(str(combination), subject.seed, verdict, str(subject.drawn), detail, seconds)


def run_all(chosen: list[Combination], seed: int, path: Path, until: float) -> None:
    """Run what the report does not have, until a time of `time.monotonic`."""
    known = {
        result.name
        for result in read_report(path)
        if result.seed == seed and (result.verdict != "wrong" or result.seconds == LIMIT_S)
    }
    left = [combination for combination in chosen if str(combination) not in known]
    print(f"{len(chosen):,} combinations, {len(chosen) - len(left):,} of them in {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    subject: Subject | None = None
    with path.open("a") as report:
        for number, combination in enumerate(left):
            if time.monotonic() > until:
                print(f"{len(left) - number:,} are left", flush=True)
                break
            if subject is None or subject.layout != combination.layout:
                subject = Subject(combination.layout, seed)
            with ends_by(LIMIT_S, partial(give_up, report, combination, subject)):
                result = run(combination, subject)
            write(report, result)
            if result.verdict != "wrong" and number % 100 == 99:
                print(f"{number + 1:,} of {len(left):,}", flush=True)


def write(report: TextIO, result: Result) -> None:
    """Add a line to the report, and say what is wrong."""
    report.write(json.dumps(asdict(result)) + "\n")
    report.flush()
    if result.verdict == "wrong":
        print(f"WRONG {result.name}, seed {result.seed}, {result.drawn}: {result.detail}", flush=True)


@contextmanager
def ends_by(limit_s: float, otherwise: Callable[[], None]) -> Iterator[None]:
    """Call `otherwise`, in another thread, if what is inside takes longer."""
    timer = threading.Timer(limit_s, otherwise)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def give_up(report: TextIO, combination: Combination, subject: Subject) -> None:
    """Write down that a combination does not end, and end this process, as an interpreter that waits cannot be."""
    detail = f"not done after {LIMIT_S:g} s: it waits for ever, or this machine is very busy"
    write(report, Result(str(combination), subject.seed, "wrong", str(subject.drawn), detail, LIMIT_S))
    os._exit(1)


def summary(results: list[Result]) -> str:
    """A table: of every part of the product how much there is, how much of it was run, and what came of it."""
    everything = {str(each): part_of(each) for each in combinations()}
    total = Counter(everything.values())
    found = {verdict: Counter[str]() for verdict in VERDICTS}
    latest = {result.name: result for result in results if result.name in everything}
    for result in latest.values():
        found[result.verdict][everything[result.name]] += 1
    lines = [("part", "combinations", "run", *VERDICTS)]
    for part, count in total.items():
        of_part = [found[verdict][part] for verdict in VERDICTS]
        lines.append((part, f"{count:,}", f"{sum(of_part):,}", *(f"{each:,}" for each in of_part)))
    of_all = [found[verdict].total() for verdict in VERDICTS]
    lines.append(("all", f"{total.total():,}", f"{sum(of_all):,}", *(f"{each:,}" for each in of_all)))
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def main() -> int:
    """Exit status: 1 if anything was wrong, 3 if this JAX has not the interpreters."""
    parser = argparse.ArgumentParser(description="Kernels against float64, over all that they take.")
    parser.add_argument("--fraction", type=float, default=0.0, help="of the layouts of every part; 0: only the summary")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="*", help="names of combinations, with * and ?")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no combination begins later than that")
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    if jax.__version_info__ < OLDEST_JAX:
        print("the interpreters of JAX 0.12 or newer are needed", file=sys.stderr)
        return 3
    if options.fraction:
        named = [each for each in combinations() if fnmatch.fnmatch(str(each), options.only)]
        until = time.monotonic() + options.minutes * 60
        run_all(draw(named, options.fraction, options.seed), options.seed, options.report, until)
    results = read_report(options.report)
    print(summary(results))
    return 1 if any(result.verdict == "wrong" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
