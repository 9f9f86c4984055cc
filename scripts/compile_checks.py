#!/usr/bin/env python3
"""Compile every kernel variant and whole steps for v5e, v6e and H200 with the vendors' compilers, on any machine.

    scripts/compile_checks.py [--target v5e …] [--only PATTERN] [--update]

Nothing is allocated or run: all arguments are shapes. What each function takes, as its compiler tells it, is compared
with scripts/compile_baseline.json. Exit status 1 if something does not compile, takes over 2 % more temporary memory or
code than there, sends more from chip to chip, is not in the baseline, or if a step does not update the pages in place.
`--update` writes what was found instead, for the targets and names that were run; say in the commit why it grew.

Of some kernels for H200 the machine code is read, too: over 2 % more instructions or barriers in its loops fail, and
any copy or spilled register more. That takes NVIDIA's assembler and disassembler (nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from compiler_output.sass import MachineCode, MissingTools, Tools, dumped_kernels, find_tools, read_kernel
from jax.sharding import SingleDeviceSharding

from jaxctx.engine.config import EngineConfig
from jaxctx.engine.runner.collectives import find_collectives
from jaxctx.engine.runner.compiled_model import CompiledModel
from jaxctx.engine.runner.memory_planner import compile_without_device, compiling_for
from jaxctx.engine.runner.mesh_plan import described_on
from jaxctx.errors import FailedPrecondition
from jaxctx.model.config import SHAPES
from jaxctx.model.functional import abstract
from jaxctx.model.sharding import make_mesh
from jaxctx.model.weights import read_config
from jaxctx_kernels import KVPages, attend, kv_pages_struct, metadata_shape, select_kernel, unpack_metadata

BASELINE = Path(__file__).with_name("compile_baseline.json")
SLACK = 1.02  # growth that is none
SMALL_BYTES = 1 << 16  # growth that does not matter
STEPS = (("qwen3-0.6b", 16), ("qwen3-0.6b", 512), ("llama-3.1-8b", 512))  # models and rows: decoding, and the largest
KERNEL_ROWS = 64
LONG_ROWS = 256  # of a kernel in whose steps consumers have a product each
EIGHT_BITS = ((64, "int8"), (128, "int8"), (128, "float8_e4m3fn"), (256, "int8"))
KV_HEADS = 8
SIZES = EngineConfig(pages=256, max_batch=32, max_batch_tokens=512, max_context_tokens=8192)  # 8B fits a v5e, just
KERNEL_TOKENS = 32768  # of the pool of a kernel by itself
MACHINE_CODE = (  # kernels for H200 whose machine code is read
    *(f"kernel head_dim {dim}, pages of {size}, group 4" for dim in (64, 128, 256) for size in (16, 64)),
    "kernel int8 head_dim 128, pages of 16, group 4",
    "kernel bfloat16 head_dim 128, pages of 64, group 4, 256 rows",
    "kernel int8 head_dim 128, pages of 64, group 4, 256 rows",
)
EXACT = ("spills", "loop_copies")  # where one more is one too many
COUNTS = ("registers", "shared_bytes", "loop_instructions", "masked_loop_instructions", "loop_barriers")
PACKAGES = {"v5e": "libtpu", "v6e": "libtpu", "h200": "jax-cuda13-plugin"}


class Chips(NamedTuple):
    """What functions are compiled for."""

    one: jax.Device
    four: Sequence[jax.Device]


Lower = Callable[[Chips], jax.stages.Lowered]
Changes = Mapping[str, Any]


def kernel(rows: int, dim: int, page_size: int, group: int, dtype: str = "bfloat16") -> Lower:
    """Attention by itself."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        device, place = chips.one, SingleDeviceSharding(chips.one)
        pages = KERNEL_TOKENS // page_size
        pool = kv_pages_struct(KV_HEADS, pages, page_size, dim, dtype, device.platform)
        choice = select_kernel(device, pool, group)
        if choice.name == "reference":
            raise LookupError("no kernel is chosen")
        shape = metadata_shape(rows, page_size, SIZES.max_context_tokens, pages, choice.name, choice.processors)

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
    model_name: str, rows: int, *, split: bool = False, kv_dtype: str = "bfloat16", changes: Changes | None = None
) -> Lower:
    """The whole step of an engine, on one chip or split over four. `changes`: of the model's configuration."""

    def lower(chips: Chips) -> jax.stages.Lowered:
        config = replace(read_config(SHAPES / model_name), **(changes or {}))
        model, params = abstract(config, "bfloat16", kv_dtype=kv_dtype)
        mesh = make_mesh(config, tensor=len(chips.four), devices=chips.four) if split else None
        if mesh is not None:
            params = described_on(mesh, model, params)
        program = CompiledModel(model, params, SIZES, mesh or chips.one)
        if program.kernel.name == "reference":
            raise LookupError(f"no kernel is chosen: {program.kernel.why_no_kernel}")
        return program.lower(next(shape for shape in program.shapes if shape.rows == rows))

    return lower


def checks() -> Iterator[tuple[str, Lower]]:
    """Names and what they lower."""
    for model_name, rows in STEPS:
        yield f"step {model_name}, {rows} rows", step(model_name, rows)
    yield "step qwen3-0.6b, 16 rows, on four chips", step("qwen3-0.6b", 16, split=True)
    few: Changes = {"layers": 4, "kv_heads": 2}
    yield (
        "step qwen3-0.6b with 2 KV heads and 4 layers, 16 rows, on four chips",
        step("qwen3-0.6b", 16, split=True, changes=few),
    )
    yield "step qwen3-0.6b, 16 rows, KV of int8", step("qwen3-0.6b", 16, kv_dtype="int8")
    for dim, dtype in EIGHT_BITS:
        yield f"kernel {dtype} head_dim {dim}, pages of 16, group 4", kernel(KERNEL_ROWS, dim, 16, 4, dtype)
    for dtype in ("bfloat16", "int8"):
        name = f"kernel {dtype} head_dim 128, pages of 64, group 4, {LONG_ROWS} rows"
        yield name, kernel(LONG_ROWS, 128, 64, 4, dtype)
    for dim, page_size, group in product((64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 8)):
        yield f"kernel head_dim {dim}, pages of {page_size}, group {group}", kernel(KERNEL_ROWS, dim, page_size, group)


def measure(lowered: jax.stages.Lowered) -> dict[str, int]:
    """What is kept of a function, in bytes; and how many sums over devices there are, with the bytes of these."""
    compiled = compile_without_device(lowered)
    found: Any = compiled.memory_analysis()
    collectives = [each for each in find_collectives(compiled.as_text()) if each.always]
    sums = [each for each in collectives if each.kind == "all-reduce"]
    return {
        "arguments": found.argument_size_in_bytes,
        "not_in_place": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
        "all_reduces": len(sums),
        "all_reduce_bytes": sum(each.size_bytes for each in sums),
        "all_reduces_of_bf16": sum(each.dtype == "bf16" for each in sums),
        "other_collectives": len(collectives) - len(sums),
    }


def measure_machine_code(lower: Lower, chips: Chips, tools: Tools) -> dict[str, int]:
    """What `measure` keeps, and of the kernel's machine code counts of its loops."""
    with dumped_kernels(tools) as folder:
        found = measure(lower(chips))
        return found | count_loops(read_kernel(folder, "attend_unit", tools))


def count_loops(code: MachineCode) -> dict[str, int]:
    """What is kept of a kernel's machine code. An iteration is 64 tokens of a consumer, or of the producer."""
    consumer = [loop.shortest for loop in code.loops if loop.products]
    fastest = min((loop for loop in code.loops if loop.products), key=lambda loop: loop.shortest)
    return {
        "registers": code.registers,
        "spills": code.spill_bytes,
        "shared_bytes": code.shared_bytes,
        "loop_instructions": fastest.shortest,
        "masked_loop_instructions": max(consumer),
        "loop_barriers": fastest.barriers,
        "loop_copies": max(loop.copies for loop in code.loops),
    }


def compare(name: str, found: dict[str, int], before: dict[str, int] | None) -> list[str]:
    """What is wrong with what was found."""
    wrong = []
    if name.startswith("step") and found["not_in_place"] > SMALL_BYTES:  # a page array is larger than that
        wrong.append(f"{found['not_in_place']:,} bytes of outputs are not written in place")
    if before is None:
        return [*wrong, "not in the baseline: run with --update"]
    for what in ("temporaries", "code"):
        if found[what] > before[what] * SLACK + SMALL_BYTES:
            wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,} bytes")
    for what in ("all_reduces", "all_reduce_bytes", "other_collectives"):
        kept = before.get(what, 0)  # functions of one chip that were kept before these were counted have none
        if found[what] > kept:
            wrong.append(f"{what.replace('_', ' ')} grew from {kept:,} to {found[what]:,}")
    if "registers" in found:
        if "registers" not in before:
            return [*wrong, "its machine code is not in the baseline: run with --update"]
        for what in (*EXACT, *COUNTS):
            if found[what] > before[what] * (1 if what in EXACT else SLACK):
                wrong.append(f"{what} grew from {before[what]:,} to {found[what]:,}")
    return wrong


def check(target: str, only: str, kept: dict[str, Any], update: bool) -> tuple[int, dict[str, Any]]:
    """Run the checks of one target. Returns how many failed and, with `update`, what to keep."""
    with compiling_for(target) as (devices, _):
        chips = Chips(devices[0], devices)
        versions = {name: version(name) for name in ("jax", PACKAGES[target])}
        tools = tools_of(target, kept, update)
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
                if tools is not None and name in MACHINE_CODE:
                    found = measure_machine_code(lower, chips, tools)
                else:
                    found = measure(lower(chips))
            except Exception as error:  # compilers raise what they like
                wrong = [f"does not compile: {type(error).__name__}: {' '.join(str(error).split()):.300}"]
            else:
                wrong = compare(name, found, found if update or not same else functions.get(name))
                functions[name] = found
            failed += bool(wrong)
            verdict = "; ".join(wrong) or "ok"
            print(f"{target}: {name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    if not update:
        return failed, kept
    if tools is not None:
        kept = {**kept, "tools": dict(tools.versions)}
    return failed, {**kept, "versions": versions, "functions": functions}


def tools_of(target: str, kept: dict[str, Any], update: bool) -> Tools | None:
    """What reads a target's machine code; None, saying why, where there is nothing or not the baseline's version."""
    if target != "h200":
        return None
    try:
        tools = find_tools()
    except MissingTools as error:
        print(f"{target}: machine code is not read: {error}")
        return None
    if tools.versions != kept.get("tools") and not update:
        print(f"{target}: machine code is not read: the baseline is of {kept.get('tools')}, this is {tools.versions}")
        return None
    return tools


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
