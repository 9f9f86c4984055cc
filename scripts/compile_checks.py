#!/usr/bin/env python3
"""Compile kernels and whole steps for TPUs, an H200 and an A100 with the vendors' compilers, on any machine.

    scripts/compile_checks.py [--target v5e …] [--only PATTERN] [--all] [--update] [--most-changed N]

Nothing is allocated or run. What each function of compiled_functions.py takes is compared with compile_baseline.json.
A program that is, to the byte, the one that the baseline was made of is not compiled again, as the same compiler would
write the same: of those only `COMPILED_ALWAYS` are, which shows that the baseline is true. `--all` compiles all. Of a
change that reaches most programs compiling takes an hour: with `--most-changed` more than so many of a target fail
without being compiled.

    every function     bytes of temporaries and code, sums over chips and their bytes
    steps, writes      whether pages are updated where they lie, and weights of 8 or 4 bits stay so; the first also of
                       copies and loads of pages
    published steps,   copies of whole weights and whole pools
    those of adapters
    of a GPU           launches of a step, sorts; instructions, copies, barriers and spills of some kernels' loops
    of a TPU           bundles, spills, copies of whole pools

Exit status 1 if something does not compile, is not in the baseline, grew (by over 2 %, or at all, as `allowed` says),
or does what a step never may. `--update` writes what was found instead, for the targets and names that were run; say in
the commit why it grew. Whoever changes programs, or what compilers are told, does so before CI runs. With another
compiler all is written anew: `--update --all`.

Another compiler may take other amounts, so the baseline names the versions, and under others nothing is compared. Needs
the extras tpu and cuda13, or at least libtpu, jax-cuda13-plugin and jax-cuda13-pjrt of JAX's version; machine code is
read with nvidia-cuda-nvcc and nvidia-cuda-nvdisasm, and left out without them.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from compiled_functions import LONG_ROWS, Chips, Lower, functions
from compiler_output.bundles import compile_and_count, dump_bundles, pool_copies
from compiler_output.sass import MachineCode, MissingTools, Tools, dumped_kernels, find_tools, read_kernel
from compiler_output.thunks import compile_with_thunks, longest_sort
from compiler_output.weight_copies import large_weights, weight_copies
from compiler_output.wide_weights import eight_bit_weights, int4_weights, wide_arrays, widened_words
from jax.extend import source_info_util

from jaxctx.engine.plan.collectives import find_collectives
from jaxctx.engine.plan.memory_planner import compile_described, compiling_for
from jaxctx.engine.runner.compiler_options import CompilerOptions, compiler_options
from jaxctx.errors import FailedPrecondition

BASELINE = Path(__file__).with_name("compile_baseline.json")
ROOT = Path(__file__).parents[1]
CUDA = "jax-cuda13-plugin"
PACKAGES = {"v5e": "libtpu", "v6e": "libtpu", "v7x": "libtpu", "h200": CUDA, "a100-80gb": CUDA}
SOME = {"v7x": ("write *", "page *"), "a100-80gb": ("published step Gemma 2 2B,*",)}
"""Targets that are checked in part: the patterns of names of what is."""
COMPILED_ALWAYS = (
    *("published step Gemma 2 2B,*", "product of int4, 16 rows, groups of 128, zeros"),
    *("write int8, 64 rows, pages of 64", "page load, int8, pages of 128"),
    *("kernel head_dim 128, pages of 16, group 4", "kernel int8 head_dim 128, pages of 16, group 4"),
)
"""Patterns of names of what is compiled though its program is as it was: some of all kinds, and of all readers."""
LONG = ("step *",)
"""Patterns of names of what only `--all` looks at: steps of all layers, which take minutes, and are those of a few."""
WITH_BUNDLES = (
    *("short step, 16 rows", "short step, 16 rows, KV of int8 in *"),
    *("write *", "product *", "kernel *pages of 16,*", "kernel *pages of 64,*"),
)
"""Of TPUs, the patterns of names of what bundles are counted of. What is compiled beside it takes as long again."""
WITH_MACHINE_CODE = (  # kernels for H200 whose machine code is read
    *(f"kernel head_dim {dim}, pages of {size}, group 4" for dim in (64, 128, 256) for size in (16, 64)),
    "kernel int8 head_dim 128, pages of 16, group 4",
    f"kernel bfloat16 head_dim 128, pages of 64, group 4, {LONG_ROWS} rows",
    f"kernel int8 head_dim 128, pages of 64, group 4, {LONG_ROWS} rows",
    "kernel head_dim 128, pages of 64, group 4, window of 1024",
    "kernel head_dim 256, pages of 64, group 2, window of 1024, soft cap",
)

STEPS = ("step", "short step", "published step")  # beginnings of names

WITH_COPIES = ("published step *", "short step * adapters *")
"""Of all targets, the patterns of names of steps whose copies of weights and pools are counted."""

# What is compared. Not in all functions everything is counted.
MOST = {
    "launches": 1,  # of a GPU's step, and waits of the host
    "sorted": 4096,  # numbers of a row: as many as one thread block of a GPU sorts; any vocabulary has more
    "pool_copies": 0,
    "weight_copies": 0,
    "wide_weights": 0,  # of 8 or 4 bits, in memory
}
"""What nothing may have more of, whatever the baseline says."""
SMALL_BYTES = 1 << 16  # of growth that does not matter, and of outputs beside the pages
SLACK = 1.02  # growth that is none
FINGERPRINT_DIGITS = 16
OTHER_VERSIONS = "as nothing is compared"
MANY_CHANGED = "as the baseline is of other programs than this and several more: renew it with --update"
BYTES = ("temporaries", "code")
COUNTS = (
    *("bundles", "bundles_run", "spill_stores"),
    *("registers", "shared_bytes", "loop_instructions", "masked_loop_instructions", "loop_barriers"),
)
EXACT = ("sorts", "spills", "loop_copies", "all_reduces", "all_reduce_bytes", "other_collectives")
"""Where one more is one too many."""


@dataclass(frozen=True, slots=True)
class Readers:
    """What reads the compilers' output for a target."""

    platform: str
    bundles: Path | None  # where a TPU's compiler writes bundles
    tools: Tools | None  # of NVIDIA's machine code


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name matches one of the patterns."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def is_checked(target: str, name: str) -> bool:
    """Whether the function of this name is one of the target's."""
    return matches(name, SOME.get(target, ("*",)))


def updates_pages(name: str) -> bool:
    """Whether the function of this name takes page arrays to update them in place."""
    return name.startswith((*STEPS, "write", "page copy", "page load"))


def takes_pages(name: str) -> bool:
    """Whether the function of this name takes page arrays, and is no kernel by itself."""
    return updates_pages(name) or name.startswith("page save")


def measure_with_machine_code(name: str, lower: Lower, chips: Chips, readers: Readers, tools: Tools) -> dict[str, int]:
    """As `measure`, and what is kept of a kernel's machine code, which is only shown if it is lowered for that."""
    with dumped_kernels(tools) as folder:
        sizes = measure(name, lower(chips), readers)
        return sizes | count_loops(read_kernel(folder, "attend_unit", tools))


def measure(name: str, lowered: jax.stages.Lowered, readers: Readers) -> dict[str, int]:
    """Compile, and read what is kept of a function: sizes in bytes, and counts."""
    options = compiler_options(readers.platform)
    counts: dict[str, int] = {}
    if readers.platform == "gpu" and name.startswith(STEPS):
        compiled, thunks = compile_with_thunks(lowered, options)
        counts = {"launches": thunks.launches, "sorts": thunks.sorts, "sorted": longest_sort(compiled.as_text() or "")}
    elif readers.bundles is not None:
        compiled, programs = compile_and_count(lowered, options, readers.bundles)
        counts = {
            "bundles": sum(program.bundles for program in programs),
            "bundles_run": sum(program.least_run for program in programs if not program.is_top_level),
            "spill_stores": sum(program.spills for program in programs),
        }
    else:
        compiled = compile_described(lowered, options)
    text = compiled.as_text() or ""
    if (readers.platform == "tpu" and takes_pages(name)) or matches(name, WITH_COPIES):
        counts["pool_copies"] = len(pool_copies(text))
    if matches(name, WITH_COPIES):
        counts["weight_copies"] = len(weight_copies(text, large_weights(lowered)))
    found: Any = compiled.memory_analysis()
    collectives = [each for each in find_collectives(text) if each.always]
    sums = [each for each in collectives if each.kind == "all-reduce"]
    wide = wide_arrays(text, eight_bit_weights(lowered)) + widened_words(text, int4_weights(lowered))
    return {
        "arguments": found.argument_size_in_bytes,
        "not_in_place": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes,
        "all_reduces": len(sums),
        "all_reduce_bytes": sum(each.size_bytes for each in sums),
        "all_reduces_of_bf16": sum(each.dtype == "bf16" for each in sums),
        "other_collectives": len(collectives) - len(sums),
        "wide_weights": len(wide),
        **counts,
    }


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
    too_many = {what: most for what, most in MOST.items() if found.get(what, 0) > most}
    wrong = [f"{found[what]:,} {what}, and {most:,} at most" for what, most in too_many.items()]
    if updates_pages(name) and found["not_in_place"] > SMALL_BYTES:  # a page array is larger than that
        wrong.append(f"{found['not_in_place']:,} bytes of outputs are not written in place")
    if before is None:
        return [*wrong, "not in the baseline: run with --update"]
    for what, count in found.items():
        if what not in before:
            wrong.append(f"{what} is not in the baseline: run with --update")
        elif count > allowed(what, before[what]):
            wrong.append(f"{what} grew from {before[what]:,} to {count:,}")
    return wrong


def allowed(what: str, before: int) -> float:
    """As much of it as is no growth."""
    if what in EXACT:
        return before
    if what in COUNTS:
        return before * SLACK
    return before * SLACK + SMALL_BYTES if what in BYTES else float("inf")


class Part(NamedTuple):
    """The functions of a target that one process compiles: of a TPU those whose bundles are counted, or the others."""

    target: str
    counted: bool

    def names(self) -> list[str]:
        """Of its functions, in their order."""
        counted = PACKAGES[self.target] == "libtpu"
        return [
            name
            for name, _ in functions()
            if is_checked(self.target, name) and (counted and matches(name, WITH_BUNDLES)) == self.counted
        ]


def parts(target: str) -> list[Part]:
    """Those of a target that have functions."""
    return [part for part in (Part(target, False), Part(target, True)) if part.names()]


class Doing(NamedTuple):
    """What is done of the checks."""

    everything: bool  # also what takes long, and what cannot have changed
    update: bool  # what is found is the baseline from now on
    most_changed: int | None = None  # programs of a part that are compiled though they are not the baseline's


def selected(part: Part, only: str, doing: Doing) -> list[str]:
    """The names of a part's functions that match `only`."""
    named = [name for name in part.names() if fnmatch.fnmatch(name, only)]
    return named if doing.everything else [name for name in named if not matches(name, LONG)]


def fingerprint(lowered: jax.stages.Lowered, options: CompilerOptions) -> str:
    """Of what a compiler is given. Equal programs have equal ones, whoever lowered them and where."""
    given = f"{sorted(options.items())}\n{lowered.as_text()}"
    return hashlib.sha256(given.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def is_as_before(name: str, program: str, programs: Mapping[str, str], doing: Doing) -> bool:
    """Whether the function of this name need not be compiled: its program is that of the baseline."""
    return programs.get(name) == program and not (doing.everything or matches(name, COMPILED_ALWAYS))


def is_one_too_many(changed: int, doing: Doing) -> bool:
    """Whether so many programs of a part are not the baseline's that no more of them are compiled."""
    return doing.most_changed is not None and changed > doing.most_changed


def check(part: Part, names: Sequence[str], kept: dict[str, Any], doing: Doing) -> tuple[int, dict[str, Any]]:
    """Run the checks of these names of a part of a target.

    Returns how many failed and, to update, what to keep of the part.
    """
    update = doing.update
    target = part.target
    jax.config.update("jax_enable_compilation_cache", False)  # of what is found there compilers write nothing
    # Paths and lines of our sources would be in programs, and change their fingerprints.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    source_info_util.register_exclusion(str(ROOT))
    with ExitStack() as stack:
        bundles = Path(stack.enter_context(dump_bundles())) if part.counted else None
        devices, _ = stack.enter_context(compiling_for(target))
        tools = tools_of(target, kept, update)
        chips, readers = Chips(devices[0], devices), Readers(devices[0].platform, bundles, tools)
        versions = {name: version(name) for name in ("jax", PACKAGES[target])}
        same = versions == kept["versions"]
        if update and not doing.everything and not (same and same_tools(tools, kept)):
            raise FailedPrecondition(f"{target}: of other compilers or tools than before, --update needs --all")
        if not (same or update):
            print(f"{target}: the baseline is of {kept['versions']}, this is {versions}: sizes are not compared")
        all_found = dict(kept["functions"]) if same else {}
        programs = dict(kept.get("programs", {})) if same else {}
        failed = changed = 0
        for name, lower in functions():
            if name not in names:
                continue
            start, known = time.monotonic(), False
            try:
                lowered = lower(chips)
                program = fingerprint(lowered, compiler_options(readers.platform))
                known = is_as_before(name, program, programs, doing)
                changed += programs.get(name) != program
                if not (known or matches(name, COMPILED_ALWAYS)) and is_one_too_many(changed, doing):
                    failed += same
                    print(f"{target}: {name}: not compiled, {MANY_CHANGED if same else OTHER_VERSIONS}", flush=True)
                    continue
                if known:
                    found = all_found[name]  # which may have been written though it is more than anything may have
                elif readers.tools is not None and name in WITH_MACHINE_CODE:
                    found = measure_with_machine_code(name, lower, chips, readers, readers.tools)
                else:
                    found = measure(name, lowered, readers)
            except Exception as error:  # compilers raise what they like
                wrong = [f"does not compile: {type(error).__name__}: {' '.join(str(error).split()):.300}"]
            else:
                wrong = compare(name, found, found if update or not same else all_found.get(name))
                all_found[name], programs[name] = found, program
            failed += bool(wrong)
            verdict = "; ".join(wrong) or ("as in the baseline" if known else "ok")
            print(f"{target}: {name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    if not update:
        return failed, kept
    all_found = {name: all_found[name] for name in part.names() if name in all_found}  # no former functions
    if tools is not None:
        kept = {**kept, "tools": dict(tools.versions)}
    programs = {name: programs[name] for name in all_found if name in programs}
    options = dict(compiler_options(readers.platform))
    return failed, {**kept, "versions": versions, "options": options, "programs": programs, "functions": all_found}


def same_tools(tools: Tools | None, kept: Mapping[str, Any]) -> bool:
    """Whether the baseline was made with the tools that are here, if any are."""
    return tools is None or dict(tools.versions) == kept.get("tools")


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
    parser.add_argument("--only", default="*", help="names of functions, with * and ?")
    parser.add_argument(
        "--all", action="store_true", help="compile also what takes long, and what is as in the baseline"
    )
    parser.add_argument("--update", action="store_true", help="write what is found as the baseline")
    parser.add_argument(
        "--most-changed", type=int, help="programs not of the baseline that are compiled, of each target"
    )
    options = parser.parse_args()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    nothing: dict[str, Any] = {"versions": {}, "functions": {}}
    failed = missing = 0
    updated: dict[str, Any] = {}
    doing = Doing(options.all, options.update, options.most_changed)
    to_run = {part: selected(part, options.only, doing) for target in options.target for part in parts(target)}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(to_run), spawn, max_tasks_per_child=1) as pool:  # libtpu reads its flags only once
        running = {
            part: pool.submit(check, part, names, baseline.get(part.target, nothing), doing)
            for part, names in to_run.items()
        }
        for part, result in running.items():
            try:
                failures, found = result.result()
            except FailedPrecondition as error:
                print(error, file=sys.stderr)
                missing += 1
                continue
            failed += failures
            before = updated.get(part.target, nothing)
            updated[part.target] = {
                **found,
                **{kind: {**before.get(kind, {}), **found.get(kind, {})} for kind in ("programs", "functions")},
            }
    baseline |= updated
    if options.update:
        in_order = {target: baseline[target] for target in PACKAGES if target in baseline}
        BASELINE.write_text(json.dumps(in_order, indent=1) + "\n")
    print(f"{failed} failed")
    return 1 if failed else 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
