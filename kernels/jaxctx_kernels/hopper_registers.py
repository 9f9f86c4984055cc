"""What the Hopper kernel does in registers: products, and the few instructions that Pallas has no word for.

JAX's interpreter knows no accumulator with a value and no inline code, so each such function has plain operations
beside it that give the same numbers, which `TileConfig.in_registers` chooses. Inline code that computes consists of the
operations of `WordOperations` only, so that numpy can do the same to every bit pattern: see `widened_words`.

Called by `mosaic_hopper`. Nothing here reads or writes global memory, or knows of tiles and steps.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector
from jaxtyping import Array, BFloat16, Float32, Int8

from jaxctx_kernels.gpu_merge import BY_PRODUCT, BY_ROW, in_columns
from jaxctx_kernels.gpu_schedule import SIDE

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Branch: Any = scf.IfOp  # types are known of its base class only
Ref: TypeAlias = Any  # to memory of the device
Results = TypeVar("Results")  # arrays in registers
Word = TypeVar("Word")  # 32 bits: a value of the compiler's, or a numpy array of uint32

INT8_UNIT = 64  # what `widened_int8` divides by
OFFSET_INT8 = 0x80808080  # four int8 xor this are themselves + 128, without a sign
LOW_PAIR, HIGH_PAIR = 0x4140, 0x4342  # permutations: bytes 0 and 1, or 2 and 3, each below a byte of zeros
ALL_THREADS = 0xFFFFFFFF  # of a warp
TWO_TO_127, MINUS_TWO = 0x7F007F00, 0xC000C000  # two bfloat16 each


class WordOperations(Protocol[Word]):
    """Instructions of a Hopper on words of 32 bits."""

    def xor(self, word: Word, constant: int) -> Word:
        """The bits of one of both."""

    def permute(self, word: Word, selector: int) -> Word:
        """Bytes of the word, or zeros: hexadecimal digit n of the selector is 0 to 3, the word's byte at n, or 4."""

    def multiply_add(self, word: Word, factor: int, addend: int) -> Word:
        """Two bfloat16 times those of `factor`, plus those of `addend`, rounded once; subnormal numbers are kept."""


def widened_words(word: Word, on: WordOperations[Word]) -> tuple[Word, Word]:
    """Four int8 as four bfloat16, each divided by INT8_UNIT, which is exact, in two words: five instructions.

    Eight bits alone in a bfloat16 are their number times 2**-133, in all 256 cases: as a subnormal number up to 127,
    and from 128 on with exponent 1, whose step is the same. With any other exponent only seven bits are kept so.
    (number + 128) * 2**-133 * 2**127 - 2 is number / 64.
    """
    offset = on.xor(word, OFFSET_INT8)
    low, high = (on.permute(offset, selector) for selector in (LOW_PAIR, HIGH_PAIR))
    return on.multiply_add(low, TWO_TO_127, MINUS_TWO), on.multiply_add(high, TWO_TO_127, MINUS_TWO)


class InlineCode:
    """`WordOperations` as code of a kernel."""

    def xor(self, word: Any, constant: int) -> Any:
        """See `WordOperations`."""
        return arith.xori(word, constant_word(constant))

    def permute(self, word: Any, selector: int) -> Any:
        """See `WordOperations`."""
        return llvm.inline_asm(word.type, [word], f"prmt.b32 $0, $1, 0, {selector:#x};", "=r,r")

    def multiply_add(self, word: Any, factor: int, addend: int) -> Any:
        """See `WordOperations`."""
        constants = constant_word(factor), constant_word(addend)
        return llvm.inline_asm(word.type, [word, *constants], "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r")


def constant_word(bits: int) -> Any:
    """A constant of the compiler's."""
    word = ir.IntegerType.get_signless(32)
    return llvm.ConstantOp(word, ir.IntegerAttr.get(word, bits - (bits >> 31 << 32))).result


def widened_int8(
    numbers: Int8[Array, "rows columns"], layout: Any, in_registers: bool
) -> BFloat16[Array, "rows columns"]:
    """int8 as bfloat16, each divided by INT8_UNIT. In `layout` a thread has a multiple of four numbers side by side."""
    if not in_registers:
        return numbers.astype(jnp.bfloat16) / INT8_UNIT

    def widen(_: Any, numbers: Any) -> Any:
        registers = np.empty_like(numbers.registers)
        for place, register in np.ndenumerate(numbers.registers):
            registers[place] = widened_register(register)
        return mosaic.FragmentedArray(_registers=registers, _layout=numbers.layout, _is_signed=None)

    wide = plgpu.ShapeDtypeStruct(numbers.shape, jnp.bfloat16, layout=layout)
    widened: jax.Array = plgpu.inline_mgpu(arg_types=(layout,), return_type=wide)(widen)(numbers)
    return widened


def widened_register(register: Any) -> Any:
    """A vector of int8 as a vector of bfloat16."""
    word, (length,) = ir.IntegerType.get_signless(32), register.type.shape
    narrow = vector.bitcast(ir.VectorType.get((length // 4,), word), register)
    wide = [half for n in range(length // 4) for half in widened_words(vector.extract(narrow, [], [n]), InlineCode())]
    words = vector.from_elements(ir.VectorType.get((len(wide),), word), wide)
    return vector.bitcast(ir.VectorType.get((length,), ir.BF16Type.get()), words)


def shrunk(
    output: Float32[Array, "64 columns"], factor: Float32[Array, "64"], in_registers: bool
) -> Float32[Array, "64 columns"]:
    """Outputs times each row's factor. On a GPU a warp jumps over that where all factors of its 16 rows are 1."""
    if not in_registers:
        return output * in_columns(factor, output.shape[1])

    def shrink(_: Any, factor: Any, output: Any) -> Any:
        grown = [arith.cmpf(arith.CmpFPredicate.UNE, each, one(each.type)) for each in scalars(factor.registers)]
        any_grown = nvvm.vote_sync(constant_word(ALL_THREADS), reduce(arith.ori, grown), "any")
        old = list(output.registers.flat)
        branch = Branch(any_grown, [register.type for register in old], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = output * factor.broadcast_in_dim(output.shape, (0,), output.layout)
            scf.yield_(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(old)
        registers = np.array(list(branch.results)).reshape(output.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=output.layout, _is_signed=None)

    like = plgpu.ShapeDtypeStruct(output.shape, jnp.float32, layout=BY_PRODUCT)
    less: jax.Array = plgpu.inline_mgpu(arg_types=(BY_ROW, BY_PRODUCT), return_type=like)(shrink)(factor, output)
    return less


def scalars(registers: Any) -> list[Any]:
    """All numbers that a thread has of an array of float32."""
    vectors = [register for register in registers.flat if isinstance(register.type, ir.VectorType)]
    alone = [register for register in registers.flat if not isinstance(register.type, ir.VectorType)]
    return [vector.extract(each, [], [n]) for each in vectors for n in range(each.type.shape[0])] + alone


def one(dtype: Any) -> Any:
    """The number 1 as a constant of the compiler's."""
    return llvm.ConstantOp(dtype, ir.FloatAttr.get(dtype, 1.0)).result


def accumulated(start: Float32[Array, "64 columns"], a: Any, b: Ref) -> Float32[Array, "64 columns"]:
    """`start` plus the product of `a` and `b`, added up in place. Interpreters know no accumulator with a value."""

    def add(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, a, b)

    result: jax.Array = pl.run_state(add)(plgpu.ACC.init(start))
    return result


def overlapped(
    query: Any,
    key: Ref,
    outputs: Float32[Array, "64 columns"],
    weights: BFloat16[Array, "64 64"],
    value: Ref,
    then: Callable[[Float32[Array, "64 64"]], Results],
    like: Results,
) -> tuple[Float32[Array, "64 columns"], Results]:
    """Outputs plus the product of weights and values, and `then(query @ key)`, which is computed meanwhile.

    What `then` returns may not be kept in the registers of `weights`, which are still read: round it later. `like`: any
    arrays like those that it returns, in the same layouts.
    """

    def multiply_both(state: Any) -> None:
        accumulator, results = state

        def start(scores: Ref) -> jax.Array:
            plgpu.wgmma(scores, query, key)
            plgpu.wgmma(accumulator, weights, value)
            score: jax.Array = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            return score

        new = then(pl.run_scoped(start, plgpu.ACC((SIDE, SIDE), jnp.float32)))
        for result, ref in zip(jax.tree.leaves(new), jax.tree.leaves(results), strict=True):
            ref[...] = result

    results: tuple[jax.Array, Results] = pl.run_state(multiply_both)((plgpu.ACC.init(outputs), like))
    return results


def product(a: Any, b: Ref, columns: int) -> Float32[Array, "64 columns"]:
    """The product of two matrices, `[64, k]` and `[k, columns]`, in shared memory; the first also in registers."""
    result: jax.Array = pl.run_scoped(partial(multiply, a, b), plgpu.ACC((SIDE, columns), jnp.float32))
    return result


def multiply(a: Ref, b: Ref, accumulator: Ref) -> jax.Array:
    """Read the accumulator, which starts as zeros, after the product."""
    plgpu.wgmma(accumulator, a, b)
    product: jax.Array = accumulator[...]
    return product
