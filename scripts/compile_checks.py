#!/usr/bin/env python3
"""Compile every kernel variant and whole steps for v5e, v6e and H200 with the vendors' compilers, on any machine.

    scripts/compile_checks.py [--target v5e …] [--only PATTERN] [--update]

Nothing is allocated or run: all arguments are shapes. What each function takes, as its compiler tells it, is compared
with scripts/compile_baseline.json. Exit status 1 if something does not compile, takes over 2 % more temporary memory or
code than there, is not in the baseline, or if a step does not update the pages in place; for a GPU also if a step is
more than one launch, sorts the vocabulary, or has more sorts than there. `--update` writes what was found instead, for
the targets and names that were run; say in the commit why it grew.

Another compiler may take other amounts, so the baseline names the versions, and under others nothing is compared. Needs
the extras tpu and cuda13, or at least libtpu, jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiler_output.thunks import compile_with_thunks, longest_sort
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.compiler_options import compiler_options
from jaxctx.engine.runner.memory_planner import compile_described, compiling_for
from jaxctx.errors import FailedPrecondition
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import TENSOR, logical_sharding
from jaxctx.model.weights import read_config
from jaxctx_kernels import KVPages, attend, kv_pages_struct, metadata_shape, select_kernel, unpack_metadata

BASELINE = Path(__file__).with_name("compile_baseline.json")
SLACK = 1.02  # growth that is none
SMALL_BYTES = 1 << 16  # growth that does not matter
MAX_SORTED = 4096  # numbers of a row: as many as one thread block of a GPU sorts; any vocabulary has more
STEPS = (("qwen3-0.6b", 16), ("qwen3-0.6b", 512), ("llama-3.1-8b", 512))  # models and rows: decoding, and the largest
KERNEL_ROWS = 64
EIGHT_BITS = ((64, "int8"), (128, "int8"), (128, "float8_e4m3fn"), (256, "int8"))
KV_HEADS = 8
SIZES = EngineConfig(pages=256, max_batch=32, max_batch_tokens=512, max_context_tokens=8192)  # 8B fits a v5e, just
KERNEL_TOKENS = 32768  # of the pool of a kernel by itself
PACKAGES = {"v5e": "libtpu", "v6e": "libtpu", "h200": "jax-cuda13-plugin"}


class Chips(NamedTuple):
    """What functions are compiled for."""

    one: jax.Device
    four: Mesh


Lower = Callable[[Chips], jax.stages.Lowered]


def kernel(rows: int, dim: int, page_size: int, group: int, dtype: str = "bfloat16") -> Lower:
    """Attention by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        device, place = chips.one, SingleDeviceSharding(chips.one)
        pages = KERNEL_TOKENS // page_size
        pool = kv_pages_struct(KV_HEADS, pages, page_size, dim, dtype, device.platform)
        name = select_kernel(device, pool).name
        if name == "reference":
            raise LookupError("no kernel is chosen")
        shape = metadata_shape(rows, page_size, SIZES.max_context_tokens, pages, name)

        def struct(size: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype, sharding=place)

        def run(q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array) -> jax.Array:
            output: jax.Array = attend(q, k, v, unpack_metadata(shape, packed), shape=shape)
            return output

        stored = jax.tree.map(lambda array: struct(array.shape, array.dtype), pool)
        query = struct((rows, KV_HEADS * group, dim), jnp.bfloat16)
        return jax.jit(run).lower(query, stored, stored, struct((shape.size(),), jnp.int32))

    return lower


def step(model_name: str, rows: int, *, split: bool = False, kv_dtype: str = "bfloat16") -> Lower:
    """The whole step of an engine, on one chip or split over four."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        model, params = abstract(read_config(SHAPES / model_name), "bfloat16", kv_dtype=kv_dtype)
        if split:
            places = [logical_sharding(chips.four, spec.axes) for spec in model.specs]
            params = tuple(p.update(sharding=place) for p, place in zip(params, places, strict=True))
        program = CompiledModel(model, params, SIZES, chips.four if split else chips.one)
        if program.kernel.name == "reference":
            raise LookupError(f"no kernel is chosen: {program.kernel.why_no_kernel}")
        return program.lower(next(shape for shape in program.shapes if shape.rows == rows))

    return lower


def checks() -> Iterator[tuple[str, Lower]]:
    """Names and what they lower."""
    for model_name, rows in STEPS:
        yield f"step {model_name}, {rows} rows", step(model_name, rows)
    yield "step qwen3-0.6b, 16 rows, on four chips", step("qwen3-0.6b", 16, split=True)
    yield "step qwen3-0.6b, 16 rows, KV of int8", step("qwen3-0.6b", 16, kv_dtype="int8")
    for dim, dtype in EIGHT_BITS:
        yield f"kernel {dtype} head_dim {dim}, pages of 16, group 4", kernel(KERNEL_ROWS, dim, 16, 4, dtype)
    for dim, page_size, group in product((64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8)):
        yield f"kernel head_dim {dim}, pages of {page_size}, group {group}", kernel(KERNEL_ROWS, dim, page_size, group)


def measure(name: str, lowered: jax.stages.Lowered, platform: str) -> dict[str, int]:
    """What is kept of a function: sizes in bytes; of a GPU's steps also launches, sorts, and numbers of the longest."""
    counts: dict[str, int] = {}
    if name.startswith("step") and platform == "gpu":
        compiled, thunks = compile_with_thunks(lowered, compiler_options(platform))
        counts = {"launches": thunks.launches, "sorts": thunks.sorts, "sorted": longest_sort(compiled.as_text() or "")}
    else:
        compiled = compile_described(lowered, compiler_options(platform))
    found: Any = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "not_in_place": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
        **counts,
    }


def compare(name: str, found: dict[str, int], before: dict[str, int] | None) -> list[str]:
    """What is wrong with what was found."""
    wrong = []
    if name.startswith("step") and found["not_in_place"] > SMALL_BYTES:  # a page array is larger than that
        wrong.append(f"{found['not_in_place']:,} bytes of outputs are not written in place")
    if found.get("launches", 1) > 1:
        wrong.append(f"{found['launches']} launches and waits of the host, which should be one launch")
    if found.get("sorted", 0) > MAX_SORTED:
        wrong.append(f"{found['sorted']:,} numbers of a row are sorted")
    if before is None:
        return [*wrong, "not in the baseline: run with --update"]
    for what in ("temporaries", "code"):
        if found[what] > before[what] * SLACK + SMALL_BYTES:
            wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,} bytes")
    if found.get("sorts", 0) > before.get("sorts", 0):
        wrong.append(f"sorts grew from {before.get('sorts', 0)} to {found['sorts']}")
    return wrong


def check(target: str, only: str, kept: dict[str, Any], update: bool) -> tuple[int, dict[str, Any]]:
    """Run the checks of one target. Returns how many failed and, with `update`, what to keep."""
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # what is found there is not compiled, so nothing is dumped
    with compiling_for(target) as (devices, _):
        chips = Chips(devices[0], Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,)))
        versions = {name: version(name) for name in ("jax", PACKAGES[target])}
        same = versions == kept["versions"]
        if not (same or update):
            print(f"{target}: the baseline is of {kept['versions']}, this is {versions}: sizes are not compared")
        functions = dict(kept["functions"]) if same else {}
        failed = 0
        for name, lower in checks():
            if not fnmatch.fnmatch(name, only):
                continue
            start = time.monotonic()
            try:
                found = measure(name, lower(chips), chips.one.platform)
            except Exception as error:  # compilers raise what they like
                wrong = [f"does not compile: {type(error).__name__}: {' '.join(str(error).split()):.300}"]
            else:
                wrong = compare(name, found, found if update or not same else functions.get(name))
                functions[name] = found
            failed += bool(wrong)
            verdict = "; ".join(wrong) or "ok"
            print(f"{target}: {name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    return failed, {"versions": versions, "functions": functions} if update else kept


def main() -> int:
    """Exit status: 1 if a check failed, 3 if a compiler is not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=list(PACKAGES), default=list(PACKAGES))
    parser.add_argument("--only", default="*", help="names of checks, with * and ?")
    parser.add_argument("--update", action="store_true", help="write what is found as the baseline")
    options = parser.parse_args()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    nothing: dict[str, Any] = {"versions": {}, "functions": {}}
    failed = missing = 0
    with ProcessPoolExecutor(len(options.target), multiprocessing.get_context("spawn")) as pool:
        running = {
            target: pool.submit(check, target, options.only, baseline.get(target, nothing), options.update)
            for target in options.target
        }
        for target, result in running.items():
            try:
                failures, baseline[target] = result.result()
                failed += failures
            except FailedPrecondition as error:
                print(error, file=sys.stderr)
                missing += 1
    if options.update:
        BASELINE.write_text(json.dumps(baseline, indent=1) + "\n")
    print(f"{failed} failed")
    return 1 if failed else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
