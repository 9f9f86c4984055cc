#!/usr/bin/env python3
"""Compile every kernel variant and whole steps for v5e, v6e and H200 with the vendors' compilers, on any machine.

    scripts/compile_checks.py [--target v5e …] [--only PATTERN] [--update]

Nothing is allocated or run: all arguments are shapes. What each function takes, as its compiler tells it, is compared
with scripts/compile_baseline.json. Exit status 1 if something does not compile, takes over 2 % more temporary memory or
code than there, is not in the baseline, or if a step does not update the pages in place or holds a weight of 8 bits
widened. `--update` writes what was found instead, for the targets and names that were run; say in the commit why it
grew.

Another compiler may take other amounts, so the baseline names the versions, and under others nothing is compared. Needs
the extras tpu and cuda13, or at least libtpu, jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import re
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
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.memory_planner import compile_untuned, compiling_for
from jaxctx.errors import FailedPrecondition
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import TENSOR, logical_sharding
from jaxctx.model.weights import read_config
from jaxctx_kernels import KVPages, attend, kv_pages_struct, metadata_shape, select_kernel, unpack_metadata

BASELINE = Path(__file__).with_name("compile_baseline.json")
SLACK = 1.02  # growth that is none
SMALL_BYTES = 1 << 16  # growth that does not matter
STEPS = (("qwen3-0.6b", 16), ("qwen3-0.6b", 512), ("llama-3.1-8b", 512))  # models and rows: decoding, and the largest
EIGHT_BIT_WEIGHTS = (
    *(("qwen3-0.6b", rows, dtype) for rows in (16, 512) for dtype in ("int8", "float8_e4m3fn")),
    ("llama-3.1-8b", 512, "int8"),
)
KERNEL_ROWS = 64
EIGHT_BITS = ((64, "int8"), (128, "int8"), (128, "float8_e4m3fn"), (256, "int8"))
KV_HEADS = 8
SIZES = EngineConfig(pages=256, max_batch=32, max_batch_tokens=512, max_context_tokens=8192)  # 8B fits a v5e, just
KERNEL_TOKENS = 32768  # of the pool of a kernel by itself
# Of compiled HLO: a computation's name and body; an instruction's name, type, operation, and what is behind that.
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
OPERAND = re.compile(r"%([\w.\-]+)")
CALLS = re.compile(r"calls=%([\w.\-]+)")
WIDE = re.compile(r"(?:bf16|f16|f32)\[([\d,]+)\]")
NARROW = re.compile(r"(?:s8|u8|f8e4m3fn)\[([\d,]+)\]")
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


def step(
    model_name: str,
    rows: int,
    *,
    split: bool = False,
    kv_dtype: str = "bfloat16",
    weights_dtype: str | None = None,
) -> Lower:
    """The whole step of an engine, on one chip or split over four."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        config = read_config(SHAPES / model_name)
        model, params = abstract(config, "bfloat16", kv_dtype=kv_dtype, weights_dtype=weights_dtype)
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
    for model_name, rows, dtype in EIGHT_BIT_WEIGHTS:
        yield f"step {model_name}, {rows} rows, weights of {dtype}", step(model_name, rows, weights_dtype=dtype)
    for dim, dtype in EIGHT_BITS:
        yield f"kernel {dtype} head_dim {dim}, pages of 16, group 4", kernel(KERNEL_ROWS, dim, 16, 4, dtype)
    for dim, page_size, group in product((64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8)):
        yield f"kernel head_dim {dim}, pages of {page_size}, group {group}", kernel(KERNEL_ROWS, dim, page_size, group)


def measure(lowered: jax.stages.Lowered) -> dict[str, int]:
    """What is kept of a function, in bytes."""
    compiled = compile_untuned(lowered)
    found: Any = compiled.memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "not_in_place": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
        "wide_weights": len(wide_arrays(compiled.as_text() or "", eight_bit_weights(lowered))),
    }


def eight_bit_weights(lowered: jax.stages.Lowered) -> set[int]:
    """Sizes, in elements, of the arguments that are weights of 8 bits; keys and values have four axes."""
    arguments = jax.tree.leaves(lowered.in_avals)
    return {each.size for each in arguments if each.ndim == 2 and each.dtype in (jnp.int8, jnp.uint8)}


def wide_arrays(hlo: str, sizes: set[int]) -> list[str]:
    """The instructions of compiled HLO that make of an array of 8 bits a floating one of as many elements, in memory.

    Only those of so many elements count as weights. What stands inside a fusion is computed where it is used and is
    never in memory; a product may happen to be as large as its weight. Temporaries alone would not show all: a TPU has
    room for a widened weight beside its main memory.
    """
    computations = {name: INSTRUCTION.findall(body) for name, body in COMPUTATION.findall(hlo)}
    fused = {
        called for body in computations.values() for *_, operation, rest in body for called in calls(operation, rest)
    }
    types = {name: result for body in computations.values() for name, result, _, _ in body}
    found = []
    for computation, body in computations.items():
        for name, result, operation, rest in body:
            operands = [types.get(operand, "") for operand in OPERAND.findall(rest.partition("), ")[0])]
            narrow = {elements(shape) for operand in operands for shape in NARROW.findall(operand)} & sizes
            wide = {elements(shape) for shape in WIDE.findall(result)}
            if computation not in fused and narrow & wide and not is_product(computations, operation, rest):
                found.append(f"{name} = {result} {operation}")
    return found


def elements(shape: str) -> int:
    """Of an array; "8,16" is a `shape`."""
    return math.prod(int(size) for size in shape.split(","))


def calls(operation: str, rest: str) -> list[str]:
    """The computation that is the inside of a fusion; `rest` is what stands behind the operation."""
    return CALLS.findall(rest) if operation == "fusion" else []


def is_product(computations: dict[str, Any], operation: str, rest: str) -> bool:
    """Whether an instruction multiplies matrices, or is a fusion that does."""
    if operation in ("dot", "convolution"):
        return True
    inside = [instruction for called in calls(operation, rest) for instruction in computations[called]]
    return any(is_product(computations, inner, behind) for *_, inner, behind in inside)


def compare(name: str, found: dict[str, int], before: dict[str, int] | None) -> list[str]:
    """What is wrong with what was found."""
    wrong = []
    if found["wide_weights"]:
        wrong.append(f"{found['wide_weights']} weights of 8 bits are widened as a whole")
    if name.startswith("step") and found["not_in_place"] > SMALL_BYTES:  # a page array is larger than that
        wrong.append(f"{found['not_in_place']:,} bytes of outputs are not written in place")
    if before is None:
        return [*wrong, "not in the baseline: run with --update"]
    for what in ("temporaries", "code"):
        if found[what] > before[what] * SLACK + SMALL_BYTES:
            wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,} bytes")
    return wrong


def check(target: str, only: str, kept: dict[str, Any], update: bool) -> tuple[int, dict[str, Any]]:
    """Run the checks of one target. Returns how many failed and, with `update`, what to keep."""
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
                found = measure(lower(chips))
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
