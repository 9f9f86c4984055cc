"""Weights of 8 or 4 bits that a compiled function widens as a whole: from the HLO, what would be in memory as well.

    arguments of 8 bits with two or three axes ──▶ which instructions make floating numbers of as many elements of them?
    words of 32 bits with two axes             ──▶ which make eight times as many of them, or copy them?

What stands inside a fusion is computed where it is used and is never in memory. Temporaries alone would not show all: a
TPU has room for a widened weight beside its main memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Of compiled HLO: a computation's name and body; an instruction's name, type, operation, and what is behind that.
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
OPERAND = re.compile(r"%([\w.\-]+)")
CALLS = re.compile(r"calls=%([\w.\-]+)")
WIDE = re.compile(r"(?:bf16|f16|f32)\[([\d,]+)\]")
ANY_ARRAY = re.compile(r"[a-z]+\d+\w*\[([\d,]+)\](\{[^}]*\})?")
WORDS = re.compile(r"s32\[([\d,]+)\]")
RENAMES = ("parameter", "bitcast", "get-tuple-element", "tuple")  # what makes nothing
BESIDE_THE_CORES = "S(1)"  # where a TPU copies what it reads
NARROW = re.compile(r"(?:s8|u8|f8e4m3fn)\[([\d,]+)\]")

Instruction = tuple[str, str, str, str]  # name, type, operation, what is behind that


def eight_bit_weights(lowered: jax.stages.Lowered) -> set[int]:
    """Sizes, in elements, of the arguments that are weights of 8 bits; keys and values have four axes.

    Of weights of several experts also those of one of them.
    """
    arguments = jax.tree.leaves(lowered.in_avals)
    weights = [each for each in arguments if each.ndim in (2, 3) and each.dtype in (jnp.int8, jnp.uint8)]
    return {each.size for each in weights} | {each.size // each.shape[0] for each in weights if each.ndim == 3}


def int4_weights(lowered: jax.stages.Lowered) -> set[int]:
    """Sizes, in words, of the arguments that are weights of 4 bits: scales, or scales and zeros, are beside them."""
    arguments = jax.tree.leaves(lowered.in_avals)
    scales = [each for each in arguments if each.ndim == 3 and each.dtype == jnp.float32 and each.shape[0] <= 2]
    outputs = {each.shape[2] for each in scales}
    return {each.size for each in arguments if each.ndim == 2 and each.dtype == jnp.int32 and each.shape[1] in outputs}


class Written(NamedTuple):
    """An instruction of compiled HLO that writes its result to memory, and is no product."""

    name: str
    result: str  # its type, and those of its operands
    operation: str
    operands: list[str]

    def __str__(self) -> str:
        return f"{self.name} = {self.result} {self.operation}"


def written_arrays(hlo: str) -> Iterator[Written]:
    """All of them, in the order of the text: what is inside a fusion is not written."""
    computations = {name: INSTRUCTION.findall(body) for name, body in COMPUTATION.findall(hlo)}
    fused = {
        called for body in computations.values() for *_, operation, rest in body for called in calls(operation, rest)
    }
    types = {name: result for body in computations.values() for name, result, _, _ in body}
    for computation, body in computations.items():
        for name, result, operation, rest in body:
            if computation not in fused and not is_product(computations, operation, rest):
                operands = [types.get(operand, "") for operand in OPERAND.findall(rest.partition("), ")[0])]
                yield Written(name, result, operation, operands)


def wide_arrays(hlo: str, sizes: set[int]) -> list[str]:
    """The instructions of compiled HLO that make of an array of 8 bits a floating one of as many elements, in memory.

    Only those of so many elements count as weights. A product may happen to be as large as its weight.
    """
    if not sizes:
        return []
    found = []
    for written in written_arrays(hlo):
        narrow = {elements(shape) for operand in written.operands for shape in NARROW.findall(operand)} & sizes
        wide = {elements(shape) for shape in WIDE.findall(written.result)}
        if narrow & wide:
            found.append(str(written))
    return found


def widened_words(hlo: str, sizes: set[int]) -> list[str]:
    """The instructions of compiled HLO that make of words of weights of 4 bits their codes, or copy them, in memory.

    A kernel's product may happen to be as large.
    """
    found = []
    for written in written_arrays(hlo) if sizes else ():
        if written.operation in (*RENAMES, "custom-call"):
            continue
        words = {elements(shape) for operand in written.operands for shape in WORDS.findall(operand)} & sizes
        made = ANY_ARRAY.findall(written.result)
        if written.operation == "copy-start":  # its result has the target, then the source
            made = made[:1]
        sizes_made = {elements(shape) for shape, layout in made if BESIDE_THE_CORES not in layout}
        if sizes_made & (words | {8 * size for size in words}):
            found.append(str(written))
    return found


def elements(shape: str) -> int:
    """Of an array; "8,16" is a `shape`."""
    return math.prod(int(size) for size in shape.split(","))


def calls(operation: str, rest: str) -> list[str]:
    """The computation that is the inside of a fusion; `rest` is what stands behind the operation."""
    return CALLS.findall(rest) if operation == "fusion" else []


def is_product(computations: Mapping[str, list[Instruction]], operation: str, rest: str) -> bool:
    """Whether an instruction multiplies matrices, or is a fusion that does."""
    if operation in ("dot", "convolution"):
        return True
    inside = [instruction for called in calls(operation, rest) for instruction in computations[called]]
    return any(is_product(computations, inner, behind) for *_, inner, behind in inside)
