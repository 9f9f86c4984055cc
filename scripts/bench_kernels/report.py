"""From seconds to fractions of the ceilings; as a table, as JSON and as a picture."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from bench_serving.report import Spread, processor

from bench_kernels.attention import Reading
from jaxctx.engine.runner.check.device_timing import COPY, PRODUCT, Work


@dataclass(frozen=True, slots=True)
class Result:
    """A work's measures. Fractions are those of the ceilings of the same round."""

    work: Work
    reading: Reading | None  # of what has attention metadata
    seconds: Sequence[float]
    of_copy: Spread
    of_product: Spread

    @property
    def milliseconds(self) -> Spread:
        return Spread.of([each * 1e3 for each in self.seconds])

    @property
    def roofline(self) -> Spread:
        """The fraction of that ceiling which it is nearer to: what it cannot do without, by the time it took."""
        return max(self.of_copy, self.of_product, key=lambda spread: spread.median)


def results(works: Sequence[tuple[Work, Reading | None]], seconds: Mapping[str, Sequence[float]]) -> list[Result]:
    """The result of each work, from the seconds of its rounds; the ceilings were measured in the same rounds."""
    by_name = {work.name: work for work, _ in works}
    copy = [by_name[COPY].read_bytes / each for each in seconds[COPY]]
    product = [by_name[PRODUCT].flops / each for each in seconds[PRODUCT]]

    found: list[Result] = []
    for work, reading in works:
        spent = seconds[work.name]
        of_copy = fractions_of_ceiling(work.read_bytes, spent, copy)
        of_product = fractions_of_ceiling(work.flops, spent, product)
        found.append(Result(work, reading, spent, of_copy, of_product))
    return found


def fractions_of_ceiling(amount: float, seconds: Sequence[float], ceilings: Sequence[float]) -> Spread:
    """`amount` per second, as a fraction of the ceiling of the same round."""
    return Spread.of([amount / spent / ceiling for spent, ceiling in zip(seconds, ceilings, strict=True)])


def machine() -> dict[str, Any]:
    """What was measured on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "processor": processor(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def table(found: Sequence[Result]) -> str:
    """One line a work: median (smallest-largest) of its time and of its fractions."""
    lines = [
        f"{'':46}{'kernel':>10}{'items':>7}{'pages: read of seen':>21}{'metadata, µs':>14}"
        f"{'ms':>24}{'GB/s':>8}{'of copy':>9}{'TFLOP/s':>9}{'of product':>12}  roofline"
    ]
    for result in found:
        work, ms, built = result.work, result.milliseconds, f"{'':52}"
        if reading := result.reading:
            pages = f"{reading.pages_read} of {reading.pages_seen}"
            built = f"{reading.kernel:>10}{reading.items:>7}{pages:>21}{reading.metadata_us:>14.0f}"
        seconds = ms.median / 1e3
        line = f"{work.name:46}{built}{ms!s:>24}{work.read_bytes / seconds / 1e9:>8.1f}{result.of_copy.median:>9.2f}"
        line += f"{work.flops / seconds / 1e12:>9.3f}{result.of_product.median:>12.2f}  {result.roofline}"
        lines.append(line)
    return "\n".join(lines)


def as_json(found: Sequence[Result], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and the medians and spreads."""

    def entry(result: Result) -> dict[str, Any]:
        return {
            "read_bytes": result.work.read_bytes,
            "flops": result.work.flops,
            "metadata": result.reading and asdict(result.reading),
            "seconds": list(result.seconds),
            "milliseconds": asdict(result.milliseconds),
            "of_copy": asdict(result.of_copy),
            "of_product": asdict(result.of_product),
            "roofline": asdict(result.roofline),
        }

    n = len(found[0].seconds)
    works = {result.work.name: entry(result) for result in found}
    return {"settings": dict(settings), "machine": machine(), "n": n, "works": works}


def plot(found: Sequence[Result], file: Path) -> None:
    """Two bars a work, the fractions of both ceilings. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [result for result in found if result.work.name not in (COPY, PRODUCT)]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(shown) + 1.4))
    for offset, (label, color) in enumerate(((COPY, "#4a7aa5"), (PRODUCT, "#c98a3c"))):
        spreads = [result.of_copy if label == COPY else result.of_product for result in shown]
        whiskers = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        at = [place + 0.4 * offset - 0.2 for place in range(len(shown))]
        axes.barh(at, [s.median for s in spreads], 0.38, xerr=whiskers, color=color, capsize=2, label=label)
    axes.set_yticks(range(len(shown)), [result.work.name for result in shown])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"fraction of the ceiling, {machine()['device']} (median and range of {len(found[0].seconds)} rounds)"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
