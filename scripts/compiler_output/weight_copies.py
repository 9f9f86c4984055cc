"""Weights that a compiled function copies as a whole: from the HLO, what is in memory a second time in some other form.

    large arguments of bfloat16 with two or three axes ──▶ which instructions make an array of as many elements of them?

A product that reads weights makes no such array. A TPU's copy to the memory beside its cores (S(1)) is how it reads,
and is none either. What stands inside a fusion is computed where it is used and is never in memory.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from compiler_output.wide_weights import elements, written_arrays

LARGE = 1 << 19  # elements; whatever is smaller costs nothing
COPYING = ("copy", "copy-start", "transpose", "convert", "reshape", "fusion")
FLOATING = re.compile(r"(?:bf16|f16|f32)\[([\d,]+)\](\{[^}]*\})?")
BESIDE_THE_CORES = "S(1)"


def large_weights(lowered: jax.stages.Lowered) -> set[int]:
    """Sizes, in elements, of the large arguments that are weights of bfloat16; keys and values have four axes.

    Of weights of several experts also those of one of them.
    """
    arguments = jax.tree.leaves(lowered.in_avals)
    weights = [each for each in arguments if each.ndim in (2, 3) and each.dtype == jnp.bfloat16]
    sizes = {each.size for each in weights} | {each.size // each.shape[0] for each in weights if each.ndim == 3}
    return {size for size in sizes if size >= LARGE}


def weight_copies(hlo: str, sizes: set[int]) -> list[str]:
    """The instructions of compiled HLO that make of an array of one of these sizes another one, in main memory."""
    found = []
    for written in written_arrays(hlo):
        if written.operation not in COPYING:
            continue
        read = {elements(shape) for operand in written.operands for shape, _ in FLOATING.findall(operand)} & sizes
        made = FLOATING.findall(written.result)
        if written.operation == "copy-start":  # its result has the target, then the source
            made = made[:1] if BESIDE_THE_CORES not in written.result else []
        if read & {elements(shape) for shape, layout in made if BESIDE_THE_CORES not in layout}:
            found.append(str(written))
    return found
