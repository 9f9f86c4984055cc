"""Weights of 8 bits in compiled HLO: whether they are widened where they are multiplied, or as a whole, in memory.

Temporaries do not tell: a TPU has room for a widened weight beside its main memory.
"""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp

# A computation's name and body; an instruction's name, type, operation, and what is behind that.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"calls=%([\w.\-]+)")
_WIDE = re.compile(r"(?:bf16|f16|f32)\[([\d,]+)\]")
_NARROW = re.compile(r"(?:s8|u8|f8e4m3fn)\[([\d,]+)\]")

Instruction = tuple[str, str, str, str]


def eight_bit_weights(lowered: jax.stages.Lowered) -> set[int]:
    """Sizes, in elements, of the arguments that are weights of 8 bits; keys and values have four axes."""
    arguments = jax.tree.leaves(lowered.in_avals)
    return {each.size for each in arguments if each.ndim == 2 and each.dtype in (jnp.int8, jnp.uint8)}


def wide_weights(hlo: str, sizes: set[int]) -> list[str]:
    """The instructions of compiled HLO that make of an array of 8 bits a floating one of as many elements, in memory.

    `sizes` are the numbers of elements that weights have. What stands inside a fusion is computed where it is used and
    is never in memory; a product may happen to be as large as its weight.
    """
    computations: dict[str, list[Instruction]] = {
        name: _INSTRUCTION.findall(body) for name, body in _COMPUTATION.findall(hlo)
    }
    every = [instruction for body in computations.values() for instruction in body]
    fused = {called for instruction in every for called in _inside(instruction)}
    types = {name: result for name, result, _, _ in every}
    found = []
    for computation, body in computations.items():
        if computation in fused:
            continue
        for instruction in body:
            name, result, operation, rest = instruction
            operands = " ".join(types.get(operand, "") for operand in _OPERAND.findall(rest.partition("), ")[0]))
            widened = _elements(_NARROW.findall(operands)) & _elements(_WIDE.findall(result)) & sizes
            if widened and not _is_product(computations, instruction):
                found.append(f"{name} = {result} {operation}")
    return found


def _elements(shapes: list[str]) -> set[int]:
    """Of arrays, by their shapes: "8,16" has 128."""
    return {math.prod(int(size) for size in shape.split(",")) for shape in shapes}


def _inside(instruction: Instruction) -> list[str]:
    """The computation that is the inside of a fusion; none of another instruction."""
    *_, operation, rest = instruction
    return _CALLS.findall(rest) if operation == "fusion" else []


def _is_product(computations: dict[str, list[Instruction]], instruction: Instruction) -> bool:
    """Whether an instruction multiplies matrices, or is a fusion that does."""
    if instruction[2] in ("dot", "convolution"):
        return True
    inside = [inner for called in _inside(instruction) for inner in computations[called]]
    return any(_is_product(computations, inner) for inner in inside)
