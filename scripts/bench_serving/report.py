"""From raw measures to medians, spreads and ratios; as a table, as JSON and as a picture."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench_serving.load import Measure

OURS, PEER = "jaxctx", "peer"
Rounds = Mapping[str, Mapping[str, Sequence[Measure]]]  # scenario → server → one measure a round

# Of each scenario, the number that it is about, and whether more of it is better.
HEADLINE: Mapping[str, tuple[str, bool]] = {
    "prefill1k": ("ttft_ms", False),
    "prefix2k-cold": ("ttft_ms", False),
    "prefix2k-hit": ("ttft_ms", False),
}
USUAL_HEADLINE = ("tokens_per_s", True)
COUNTS = ("cached", "drafted", "accepted")  # which not every server tells
UNITS = {"ttft_ms": "ms to first token", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of the rounds, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def headline(scenario: str) -> tuple[str, bool]:
    """(name of the number, whether more is better)."""
    return HEADLINE.get(scenario, USUAL_HEADLINE)


def ratio(servers: Mapping[str, Sequence[Measure]], number: str) -> Spread | None:
    """Ours over the peer's, round by round; None without a peer."""
    if PEER not in servers:
        return None
    pairs = zip(servers[OURS], servers[PEER], strict=True)
    return Spread.of([getattr(ours, number) / getattr(peer, number) for ours, peer in pairs])


def table(rounds: Rounds) -> str:
    """One line a scenario and server: every number as median (smallest-largest), and the ratio of the headline."""
    lines = [
        f"{'scenario':15}{'server':8}{'tokens/s':>22}{'ms to first token':>26}{'ms per token':>22}{'cached':>8}"
        f"{'drafts right':>16}  ratio"
    ]
    for scenario, servers in rounds.items():
        number, more_is_better = headline(scenario)
        against = ratio(servers, number)
        for server, measures in servers.items():
            cells = [Spread.of([getattr(m, name) for m in measures]) for name in ("tokens_per_s", "ttft_ms", "tpot_ms")]
            cached = "-" if measures[-1].cached is None else measures[-1].cached
            drafted = sum(measure.drafted or 0 for measure in measures)
            drafts = f"{sum(measure.accepted or 0 for measure in measures)} of {drafted}" if drafted else "-"
            line = f"{scenario:15}{server:8}{cells[0]!s:>22}{cells[1]!s:>26}{cells[2]!s:>22}{cached:>8}{drafts:>16}"
            if server == OURS and against is not None:
                line += f"  {against} × {UNITS[number]}, {'more' if more_is_better else 'less'} is better"
            lines.append(line)
    return "\n".join(lines)


def as_json(rounds: Rounds, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and the medians, spreads and ratios."""
    scenarios: dict[str, Any] = {}
    for scenario, servers in rounds.items():
        number, more_is_better = headline(scenario)
        against = ratio(servers, number)
        scenarios[scenario] = {
            "headline": {"number": number, "more_is_better": more_is_better, "ratio": against and asdict(against)},
            "servers": {
                server: {
                    "rounds": [asdict(measure) for measure in measures],
                    "spread": {
                        each.name: asdict(Spread.of([getattr(measure, each.name) for measure in measures]))
                        for each in fields(Measure)
                        if each.name not in COUNTS
                    },
                }
                for server, measures in servers.items()
            },
        }
    machine = {"platform": platform.platform(), "processor": processor(), "python": platform.python_version()}
    return {"settings": dict(settings), "machine": machine, "scenarios": scenarios}


def processor() -> str:
    """The processor's name, where the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def plot(rounds: Rounds, file: Path) -> None:
    """A bar for each scenario: how many times as fast as the peer, in the scenario's headline. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, speedups = [], []
    for scenario, servers in rounds.items():
        number, more_is_better = headline(scenario)
        against = ratio(servers, number)
        if against is not None:
            low, high = (against.low, against.high) if more_is_better else (1 / against.high, 1 / against.low)
            names.append(scenario)
            speedups.append(Spread(against.median if more_is_better else 1 / against.median, low, high))
    if not names:
        raise ValueError("nothing to plot: no peer was measured")
    medians = [speedup.median for speedup in speedups]
    whiskers = [[s.median - s.low for s in speedups], [s.high - s.median for s in speedups]]
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(names) + 1.2))
    axes.barh(names, medians, xerr=whiskers, color="#4a7aa5", capsize=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the peer (median and range of rounds)")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
