#!/usr/bin/env python3
"""Compile every kernel variant and whole steps for TPUs and H200 with the vendors' compilers, on any machine.

    scripts/compile_checks.py [--target v5e …] [--only PATTERN] [--update]

Nothing is allocated or run: all arguments are shapes. What each function takes, as its compiler tells it, is compared
with scripts/compile_baseline.json. Exit status 1 if something does not compile, takes over 2 % more temporary memory or
code than there, is not in the baseline, or if a step or a write does not update the pages in place. `--update` writes
what was found instead, for the targets and names that were run; say in the commit why it grew.

Of TPUs bundles are counted, too: over 2 % more of them, or of spills, fail, and any copy of a pool in a step or write.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiler_output.bundles import compile_and_count, dump_bundles, pool_copies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.memory_planner import compile_without_device, compiling_for
from jaxctx.errors import FailedPrecondition
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import TENSOR, logical_sharding
from jaxctx.model.weights import read_config
from jaxctx_kernels import KVPages, attend, kv_pages_struct, metadata_shape, select_kernel, unpack_metadata, write_rows

BASELINE = Path(__file__).with_name("compile_baseline.json")
SLACK = 1.02  # growth that is none
SMALL_BYTES = 1 << 16  # growth that does not matter
COUNTS = ("bundles", "bundles_run", "spills")  # of TPUs
STEPS = (("qwen3-0.6b", 16), ("qwen3-0.6b", 512), ("llama-3.1-8b", 512))  # models and rows: decoding, and the largest
KERNEL_ROWS = 64
EIGHT_BITS = ((64, "int8"), (128, "int8"), (128, "float8_e4m3fn"), (256, "int8"))
WRITES = (  # dtypes, sizes of pages and rows: chunks of prompts, and decoding
    ("bfloat16", 16, 512),
    ("bfloat16", 128, 512),
    ("bfloat16", 128, 64),
    ("float32", 64, 64),
    ("int8", 16, 64),
    ("int8", 64, 64),
    ("int8", 128, 512),
    ("float8_e4m3fn", 64, 64),
)
KV_HEADS = 8
SIZES = EngineConfig(pages=256, max_batch=32, max_batch_tokens=512, max_context_tokens=8192)  # 8B fits a v5e, just
KERNEL_TOKENS = 32768  # of the pool of a kernel by itself
PACKAGES = {"v5e": "libtpu", "v6e": "libtpu", "v7x": "libtpu", "h200": "jax-cuda13-plugin"}
SOME = {"v7x": ("write *",)}
"""Targets that are checked in part: the patterns of names of what is."""
COUNTED = ("step *", "write *", "kernel *pages of 16,*", "kernel *pages of 64,*")
"""Of TPUs, the patterns of names of what bundles are counted of."""


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


def write(dtype: str, page_size: int, rows: int) -> Lower:
    """Writing the keys and values of a layer by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        device, place = chips.one, SingleDeviceSharding(chips.one)
        pool = kv_pages_struct(KV_HEADS, KERNEL_TOKENS // page_size, page_size, 128, dtype, device.platform)

        def struct(size: tuple[int, ...], dtype: object) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype, sharding=place)

        def run(k_pages: KVPages, v_pages: KVPages, k: jax.Array, v: jax.Array, slots: jax.Array) -> Any:
            return write_rows(k_pages, v_pages, k, v, slots, kernel=select_kernel(device, pool).name)

        stored = jax.tree.map(lambda array: struct(array.shape, array.dtype), pool)
        of_batch = struct((rows, KV_HEADS, 128), jnp.bfloat16)
        slots = struct((rows,), jnp.int32)
        return jax.jit(run, donate_argnums=(0, 1)).lower(stored, stored, of_batch, of_batch, slots)

    return lower


def step(
    model_name: str, rows: int, *, split: bool = False, kv_dtype: str = "bfloat16", sizes: EngineConfig = SIZES
) -> Lower:
    """The whole step of an engine, on one chip or split over four."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        model, params = abstract(read_config(SHAPES / model_name), "bfloat16", kv_dtype=kv_dtype)
        if split:
            places = [logical_sharding(chips.four, spec.axes) for spec in model.specs]
            params = tuple(p.update(sharding=place) for p, place in zip(params, places, strict=True))
        program = CompiledModel(model, params, sizes, chips.four if split else chips.one)
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
    large_pages = replace(SIZES, pages=SIZES.pages // 8, page_size=SIZES.page_size * 8)
    name = f"step qwen3-0.6b, 16 rows, KV of int8 in pages of {large_pages.page_size}"
    yield name, step("qwen3-0.6b", 16, kv_dtype="int8", sizes=large_pages)
    for dtype, page_size, rows in WRITES:
        yield f"write {dtype}, {rows} rows, pages of {page_size}", write(dtype, page_size, rows)
    for dim, dtype in EIGHT_BITS:
        yield f"kernel {dtype} head_dim {dim}, pages of 16, group 4", kernel(KERNEL_ROWS, dim, 16, 4, dtype)
    for dim, page_size, group in product((64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8)):
        yield f"kernel head_dim {dim}, pages of {page_size}, group {group}", kernel(KERNEL_ROWS, dim, page_size, group)


def is_checked(target: str, name: str) -> bool:
    """Whether the check of this name is one of the target's."""
    return matches(name, SOME.get(target, ("*",)))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name matches one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def measure(lowered: jax.stages.Lowered, bundles_folder: Path | None) -> dict[str, int]:
    """What is kept of a function: bytes; of a TPU, where `bundles_folder` is where they are written, also counts."""
    counts: dict[str, int] = {}
    if bundles_folder is None:
        compiled = compile_without_device(lowered)
    else:
        compiled, programs = compile_and_count(lowered, bundles_folder)
        counts = {
            "bundles": sum(program.bundles for program in programs),
            "bundles_run": sum(program.least_run for program in programs if not program.is_top_level),
            "spills": sum(program.spills for program in programs),
            "pool_copies": len(pool_copies(compiled.as_text() or "")),
        }
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
    if name.startswith(("step", "write")):
        if found["not_in_place"] > SMALL_BYTES:  # a page array is larger than that
            wrong.append(f"{found['not_in_place']:,} bytes of outputs are not written in place")
        if found.get("pool_copies"):
            wrong.append(f"{found['pool_copies']} copies of whole pools")
    if before is None:
        return [*wrong, "not in the baseline: run with --update"]
    for what in ("temporaries", "code"):
        if found[what] > before[what] * SLACK + SMALL_BYTES:
            wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,} bytes")
    for what in COUNTS:
        if what in found and what not in before:
            wrong.append(f"{what} not in the baseline: run with --update")
        elif what in found and found[what] > before[what] * SLACK:
            wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,}")
    return wrong


def check(target: str, only: str, kept: dict[str, Any], update: bool) -> tuple[int, dict[str, Any]]:
    """Run the checks of one target. Returns how many failed and, with `update`, what to keep."""
    with ExitStack() as stack:
        bundles_folder = Path(stack.enter_context(dump_bundles())) if PACKAGES[target] == "libtpu" else None
        devices, _ = stack.enter_context(compiling_for(target))
        chips = Chips(devices[0], Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,)))
        versions = {name: version(name) for name in ("jax", PACKAGES[target])}
        same = versions == kept["versions"]
        if not (same or update):
            print(f"{target}: the baseline is of {kept['versions']}, this is {versions}: sizes are not compared")
        functions = dict(kept["functions"]) if same else {}
        failed = 0
        for name, lower in checks():
            if not (is_checked(target, name) and fnmatch.fnmatch(name, only)):
                continue
            start = time.monotonic()
            try:
                found = measure(lower(chips), bundles_folder if matches(name, COUNTED) else None)
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
