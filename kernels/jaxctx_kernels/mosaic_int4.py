"""Products with weights of 4 bits on NVIDIA GPUs since Ampere, in Pallas Mosaic GPU.

A warpgroup computes 64 output channels of up to 64 rows, one chunk of 128 inputs after the other. The weight is the
left operand: a thread loads the words whose codes its part of a product needs, and widens them where they are, so that
weights are never in shared memory. Rows of x are there, for all four warps.

    words ──registers── four times (shift, and, or) ──▶ 32 inputs ─┐
    x ──registers──▶ shared memory ────────────────────────────────┴─▶ product, of a group ──▶ scaled, added

Words and x of the next chunk are on their way while one is multiplied. A thread has, of a product's 16 inputs, pairs
2·t and 2·t + 8, where t is the last two bits of its number: those of words t, t + 4, t + 8 and t + 12 of a chunk.
"""

from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, BFloat16, Float32, Int32

from jaxctx_kernels.gpu_merge import in_columns
from jaxctx_kernels.hopper_registers import constant_word
from jaxctx_kernels.int4_weights import CHUNK, MIDDLE, OFFSET, TWO_CODES, TWO_OFFSETS, UNIT, UNITS, WORDS
from jaxctx_kernels.mosaic_mma import BY_COLUMN, BY_ROW, LEFT, RIGHT, in_vectors, ranges_of, store_rows, tiled, zeros

plgpu: Any = mosaic_gpu  # its annotations do not cover how it is used
Ref: TypeAlias = Any  # to memory of the device

OUTPUTS = 64  # of a product's left operand
ROWS = (16, 32, 64)  # of its right one
PROGRAMS = 512  # that a GPU of about 130 processors runs at once, four on each
MOST_PARTS = 8  # of the inputs: each part's product is written and read again
IN_REGISTERS = True  # interpreters know no inline code
# The words of a chunk: of 16 output channels a warp has two in each thread, eight threads apart, and every fourth word.
BY_WORD = plgpu.Layout.TILED(plgpu.Tiling(((WORDS, OUTPUTS), (4, 16), (8,), (1,))), (-5,), (-2, -4), -1)


def multiply(
    x: BFloat16[Array, "rows in"],
    words: Int32[Array, "words out"],
    scales: Float32[Array, "parts groups out"],
) -> Float32[Array, "rows out"]:
    """See `int4_weights.multiply`."""
    rows, inside, out, groups = x.shape[0], x.shape[1], words.shape[1], scales.shape[1]
    group = inside // groups
    most = ROWS[-1] if group == CHUNK else ROWS[-2]  # more do not fit into registers
    of_rows = next(size for size in ROWS if size >= min(rows, most))
    x = jnp.pad(x, ((0, -rows % of_rows), (0, 0)))
    sums = x.astype(jnp.float32).reshape(len(x), groups, -1).sum(2).T
    tiles = out // OUTPUTS * (len(x) // of_rows)
    parts = parts_of(inside // CHUNK, tiles)
    products = plgpu.kernel(
        partial(multiply_tile, of_rows=of_rows, group=group, in_registers=IN_REGISTERS),
        kernel_name="multiply_int4",
        out_type=jax.ShapeDtypeStruct((parts, out, len(x)), jnp.float32),
        grid=(out // OUTPUTS, len(x) // of_rows, parts),
        grid_names=("outputs", "rows", "part"),
        scratch_types=(tiled((of_rows, CHUNK)),),
    )(x, sums, words, scales)
    product: jax.Array = products.sum(0).T[:rows]
    return product


def parts_of(chunks: int, tiles: int) -> int:
    """Into how many parts a product of so many tiles divides its chunks, so that all of a GPU has something to load."""
    return max(n for n in range(1, MOST_PARTS + 1) if chunks % n == 0 and (n == 1 or n * tiles <= PROGRAMS))


def multiply_tile(
    x: Ref,
    sums: Ref,
    words: Ref,
    scales: Ref,
    product: Ref,
    shared: Ref,
    *,
    of_rows: int,
    group: int,
    in_registers: bool,
) -> None:
    """64 output channels of `of_rows` rows, for a part of the inputs. Arguments are refs.

    `sums` are those of x over each group, `[groups, rows]`.
    """
    outputs = pl.ds(lax.axis_index("outputs") * OUTPUTS, OUTPUTS)
    rows = pl.ds(lax.axis_index("rows") * of_rows, of_rows)
    part_number = lax.axis_index("part")
    chunks = words.shape[0] // WORDS // product.shape[0]
    begin = part_number * chunks
    units = group // UNIT  # of a group

    def load(chunk: "jax.Array | int") -> tuple[jax.Array, jax.Array]:
        numbers = x.at[rows, pl.ds(chunk * CHUNK, CHUNK)]
        packed = words.at[pl.ds(chunk * WORDS, WORDS), outputs]
        return (
            plgpu.load(numbers, layout=in_vectors(CHUNK), optimized=False),
            plgpu.load(packed, layout=BY_WORD, optimized=False),
        )

    def add(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, numbers, packed = carry
        shared[...] = numbers  # all threads wait for each other, before and after
        coming = load(jnp.minimum(chunk + 1, begin + chunks - 1))
        for first in range(0, UNITS, units):
            number = chunk * (UNITS // units) + first // units
            scale = load_vector(scales.at[0, number, outputs], BY_ROW)
            zero = load_vector(scales.at[1, number, outputs], BY_ROW) if scales.shape[0] == 2 else None
            sum_of_x = lax.broadcast_in_dim(load_vector(sums.at[number, rows], BY_COLUMN), total.shape, [1])
            part = zeros(of_rows)
            for unit in range(first, first + units):
                inputs, start = ranges_of(CHUNK)[unit // 2], unit % 2 * UNIT  # shared memory is read by 64 of them
                if start == 0 or unit == first:
                    right = plgpu.load(shared.at[:, inputs].transpose((1, 0)), layout=RIGHT)
                part = plgpu.mma(part, widened(packed, unit, in_registers), right[start : start + UNIT])
            if zero is None:
                part -= sum_of_x * float(MIDDLE + OFFSET)
            else:
                part -= sum_of_x * in_columns(zero + float(OFFSET), of_rows)
            total += part * in_columns(scale, of_rows)
        return total, *coming

    total, *_ = lax.fori_loop(begin, begin + chunks, add, (zeros(of_rows), *load(begin)))
    store_rows(product.at[part_number, outputs, rows], total)


def load_vector(numbers: Ref, layout: Any) -> jax.Array:
    """A number for each row, or column, of a product."""
    return cast(jax.Array, plgpu.load(numbers, layout=layout, optimized=False))


def widened(packed: Int32[Array, "16 64"], unit: int, in_registers: bool) -> BFloat16[Array, "64 32"]:
    """Inputs 32 * unit … 32 * unit + 31 of a chunk, as a left operand: 128 + code each."""
    if not in_registers:
        pairs = [(lax.shift_right_logical(packed, place) & 15) + OFFSET for place in (4 * unit, 4 * unit + 16)]
        return jnp.stack(pairs, axis=1).reshape(UNIT, OUTPUTS).T.astype(jnp.bfloat16)

    def widen(_: Any, packed: Any) -> Any:
        wide = [widened_register(register, unit) for register in packed.registers.flat]
        layout = mosaic.MMALayouts(ir.BF16Type.get()).lhs
        registers = np.array(wide, object).reshape(layout.registers_shape((OUTPUTS, UNIT)))
        return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    wide = plgpu.ShapeDtypeStruct((OUTPUTS, UNIT), jnp.bfloat16, layout=LEFT)
    result: jax.Array = plgpu.inline_mgpu(arg_types=(BY_WORD,), return_type=wide)(widen)(packed)
    return result


def widened_register(register: Any, unit: int) -> Any:
    """A word as two bfloat16. Both arrays have their registers in one order: of the inputs, then of output channels."""
    word = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
    moved = arith.shrui(word, constant_word(4 * unit))
    two = arith.ori(arith.andi(moved, constant_word(TWO_CODES)), constant_word(TWO_OFFSETS))
    words = vector.from_elements(ir.VectorType.get((1,), two.type), [two])
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), words)
