"""Attention and whole steps against a large copy and a large product, on the device found here.

    scripts/bench kernels --json results.json --plot roofline.png

The first column of fractions is what must be read at the least (each page once, however many rows see it) by the time
it took, over the bytes that a copy moves; the second is FLOPs by time over those of a bfloat16 product. The larger of
the two is the place under the roofline. On a shared machine trust fractions and ratios, not milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from bench_kernels.attention import Attention, Layer, Reading, batches, random_pools, scattered
from bench_kernels.report import as_json, machine, plot, results, table
from bench_kernels.steps import TINY, Sizes, Steps
from jaxctx.engine.runner.check.device_timing import Work, ceilings, measure
from jaxctx.model.weights import read_config

SHAPES = Path(__file__).parents[1] / "shapes"
SCALE = 64  # that --tiny divides lengths by
CPU_LAYER = Layer(kv_heads=4, group=2)  # of models that one runs on a CPU
LAYER = Layer(kv_heads=8, group=4, layers=4)  # of Llama 3.1 8B, so many that caches hold none of it
CPU_CEILINGS = 1 << 28, 2048  # bytes, and rows of a matrix
CEILINGS = 1 << 30, 8192
MIN_S = 0.05  # of a measure on an accelerator, so that what it takes to start and to wait does not count


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="how often each runs (default: 9)")
    parser.add_argument("--only", default="", metavar="TEXT", help="batches whose name contains this")
    parser.add_argument("--scattered", action="store_true", help="pages in random order instead of consecutive ones")
    parser.add_argument("--no-plain", action="store_true", help="without attention in plain JAX")
    parser.add_argument("--kernels-only", action="store_true", help="without whole steps")
    parser.add_argument(
        "--shape",
        metavar="DIR",
        help=f"config.json of the steps' model (default: {SHAPES.name}/llama-3.1-8b, and on a CPU no steps)",
    )
    for name, value in asdict(Sizes()).items():
        what = name.replace("_", " ")
        parser.add_argument(f"--{what.replace(' ', '-')}", type=int, default=value, help=f"of steps (default: {value})")
    parser.add_argument("--tiny", action="store_true", help="everything, as small as can be: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the fractions into this file (needs matplotlib)"
    )
    settings = parser.parse_args(arguments)
    if settings.rounds < 1:
        parser.error("--rounds: at least 1")
    return settings


def steps_of(settings: argparse.Namespace) -> Steps | None:
    """What `--shape`, `--tiny` and the device ask for."""
    if settings.tiny:
        return Steps(TINY, Sizes(streams=4, context_tokens=48, prompt_tokens=64, batch_tokens=32))
    shape = settings.shape or (None if jax.default_backend() == "cpu" else SHAPES / "llama-3.1-8b")
    if shape is None:
        return None
    return Steps(read_config(Path(shape)), Sizes(**{name: getattr(settings, name) for name in asdict(Sizes())}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 when everything was measured."""
    settings = parse(arguments)
    on_cpu = jax.default_backend() == "cpu"
    layer = CPU_LAYER if on_cpu else LAYER
    layer = replace(layer, layers=1) if settings.tiny else layer
    chosen = [batch for batch in batches(layer.page_size, SCALE if settings.tiny else 1) if settings.only in batch.name]
    longest = max((batch.longest for batch in chosen), default=1)
    pages = 1 + max((int(s.pages.max()) for batch in chosen for s in batch.segments), default=1)
    pools = random_pools(layer, pages)

    def progress(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    works: list[tuple[Work, Reading | None]] = [
        (work, None) for work in ceilings(*((1 << 16, 64) if settings.tiny else CPU_CEILINGS if on_cpu else CEILINGS))
    ]
    for batch in chosen:
        attention = Attention(scattered(batch, pages) if settings.scattered else batch, layer, pools, longest)
        works += attention.works(with_plain=not settings.no_plain)
    if not settings.kernels_only and (steps := steps_of(settings)):
        works += [(work, None) for work in steps.works()]
    seconds = measure([work for work, _ in works], settings.rounds, 0 if on_cpu else MIN_S, progress)
    found = results(works, seconds)
    described = ", ".join(f"{name} {value}" for name, value in machine().items())
    heads = f"{layer.kv_heads} KV heads of {layer.dim}, groups of {layer.group}, pages of {layer.page_size}"
    print(f"{described}\nattention of one layer, {heads}, bfloat16; n = {settings.rounds}, median (smallest-largest)")
    if settings.tiny:
        print(f"tiny: lengths are divided by {SCALE}, and none of these figures means anything")
    print(table(found))
    if settings.json:
        shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()}
        settings.json.write_text(json.dumps(as_json(found, shown | {"layer": asdict(layer)}), indent=1) + "\n")
    if settings.plot:
        plot(found, settings.plot)
    return 0
