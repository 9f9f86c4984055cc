"""Products of rows with weights, as each kind of device computes them best.

Weights are stored `[out, in]`, as in the checkpoints, and contracted on their last axis. What is multiplied is narrow,
products are float32. Weights of 8 bits are widened inside the product, and those of 4 bits on accelerators by a kernel
(`jaxctx_kernels.int4_weights`): no wide copy of one is ever in memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, Shaped

from jaxctx.model.sharding import EVERY_DEVICE
from jaxctx_kernels.int4_weights import ProductKernel, multiply
from jaxctx_kernels.kv_cache import CPU_HAS_LONG_VECTORS, LARGEST_INT8

TAKES_BITS = jax.__version_info__ < (0, 11)  # instead of bfloat16, where a part of an array is taken
FEW_ROWS = 64  # of a product on CPU; with more, packing the weights costs less than it saves
MANY_ROWS = 256  # from which on blocks of bfloat16 weights are widened on a CPU that computes them as float32 anyway


class VectorSums(NamedTuple):
    """How one row's products are summed on a CPU."""

    lanes: int  # numbers of a vector
    terms: int  # vectors that one loop adds at most
    sums: int  # to which it adds them in turn


# With AVX-512 a vector is two of the CPU's, and of int8 weights one, which are there sooner than a sum alone would have
# added them; float8 takes longer to be widened. Without it a vector is one, as more take more registers than there are.
WIDE_SUMS = VectorSums(32, 32, 1) if CPU_HAS_LONG_VECTORS else VectorSums(8, 32, 4)
INT8_SUMS = VectorSums(16, 64, 4) if CPU_HAS_LONG_VECTORS else VectorSums(8, 32, 4)
LONG_ROW = 6144  # numbers of a row: with more, it is summed part by part, as float32 of it fill a CPU's nearest cache
PART_ROWS = 8  # output channels of which a part is summed before the next part
BLOCK_ELEMENTS = 1 << 20  # of a weight of 8 bits that are wide at a time on CPU: 2 MiB, which its cache holds
COPIED_ELEMENTS = 1 << 22  # of a weight that stays as narrow, likewise
LEAST_BLOCK = 64  # output channels that fit into a block, however long they are; equal blocks have over half as many
HIGH_PART = 128  # a row of int16 is so many times one of int8, and another
INTEGERS = {
    "int8": LARGEST_INT8,
    "int16": LARGEST_INT8 * HIGH_PART,
}  # the largest of a row, by the type it is rounded to
WIDENS_BFLOAT16 = not CPU_HAS_LONG_VECTORS and not TAKES_BITS  # in blocks, see `project`
SUMS_ARE_FAST = jax.__version_info__ >= (0, 11)  # those of `contract_one`; before, padding a row to four was faster


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("matmul_dtype",))
@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight of 8 bits: `values[o, i] * scale[o]`, a scale for each output channel.

    `matmul_dtype` is the type in which values and what they are multiplied with meet. "bfloat16" and "float32" hold
    every value exactly. "int8" and "int16", on a CPU and of int8 values, round what they are multiplied with to
    integers, a scale for each row: see `multiply_rounded`.
    """

    values: Shaped[Array, "*experts out in"]  # int8, or in uint8 the bits of float8_e4m3fn, which XLA:CPU widens whole
    scale: Float32[Array, "*experts out"]
    matmul_dtype: str = field(metadata={"static": True})


@partial(jax.tree_util.register_dataclass, data_fields=("words", "scales"), meta_fields=("kernel",))
@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight of 4 bits, with a scale for each group of inputs, and zeros if `scales` has two parts.

    See `jaxctx_kernels.int4_weights`, of which `kernel` multiplies it. What it is multiplied with becomes bfloat16.
    """

    words: Int32[Array, "words out"]  # of eight inputs each
    scales: Float32[Array, "parts groups out"]
    kernel: ProductKernel = field(metadata={"static": True})


Weight: TypeAlias = "jax.Array | QuantizedWeight"  # `[out, in]`, or of several experts `[experts, out, in]`
Matrix: TypeAlias = "Weight | Int4Weight"  # `[out, in]`


class LowRank(NamedTuple):
    """Adapters beside a weight: `x @ a.T @ b.T` over the columns that a row keeps."""

    a: Float[Array, "columns in"]
    b: Float[Array, "out columns"]
    columns: Bool[Array, "rows columns"]

    def project(self, x: Float[Array, "rows in"]) -> Float32[Array, "rows out"]:
        """What adapters add to the product; exact zeros for a row without columns."""
        return project(jnp.where(self.columns, project(x, self.a), 0.0), self.b)


def project(x: Float[Array, "rows in"], weight: Matrix) -> Float32[Array, "rows out"]:
    """Contract both last axes. `x` is narrowed to the weight's type, the product is not.

    A product that returns bfloat16, or a weight widened in the step, is several times slower on CPU. There the right
    operand is packed anew at every call; so few rows are made that one (1.5 times as fast in bfloat16, twice in
    float32). A row alone takes another path, good in float32 and else seven times slower, unless spelt out. For many
    rows blocks of the weight are widened where the CPU has no products of bfloat16 (a tenth faster): the numbers that
    meet are the same.
    """
    if isinstance(weight, QuantizedWeight):
        return project_quantized(x, weight)
    if isinstance(weight, Int4Weight):
        return multiply(x, weight.words, weight.scales, weight.kernel)
    rows, x = x.shape[0], x.astype(weight.dtype)

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        if rows >= MANY_ROWS and weight.dtype == jnp.bfloat16 and WIDENS_BFLOAT16:
            return contract_in_blocks(x.astype(jnp.float32), weight)
        if rows > FEW_ROWS:
            return contract(x, weight)
        if rows == 1 and weight.dtype != jnp.float32:
            return contract_one(x[0], weight)[None]
        return contract_few(x, weight)

    product: jax.Array = lax.platform_dependent(x, weight, cpu=on_cpu, default=contract)
    return product


def project_each_part(
    x: Float[Array, "rows in"], weight: Matrix, mesh: Mesh | None, out: "str | tuple[str, ...] | None"
) -> Float32[Array, "rows out"]:
    """`project` where the weight's outputs are split over the axes `out` of `mesh`; so is the product.

    XLA splits all products but those of kernels.
    """
    if not isinstance(weight, Int4Weight) or mesh is None or mesh.size == 1:
        return project(x, weight)
    places: Any = {"words": PartitionSpec(None, out), "scales": PartitionSpec(None, None, out)}
    in_specs = (PartitionSpec(), replace(weight, **places))
    # As of attention: kernels say nothing of what varies over devices.
    split = jax.shard_map(project, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(None, out), check_vma=False)
    product: jax.Array = split(x, weight)
    return product


def project_and_sum(
    x: Float[Array, "rows in"],
    weight: Matrix,
    mesh: Mesh | None,
    adapters: LowRank | None = None,
) -> Float32[Array, "rows out"]:
    """`project` where `in` is split over `mesh`: each device's product, and then their sum, which every device gets.

    What devices send each other has the type in which products are computed: bfloat16 are half the bytes of the
    products. Each product is rounded to it once, and so may be each sum of two; one device alone rounds nothing.

    `adapters` add to it. Each device adds what they make of its part of x, so that nothing more is sent.
    """
    if mesh is None or mesh.size == 1:
        product = project(x, weight)
        return product if adapters is None else product + adapters.project(x)

    split, whole = PartitionSpec(None, EVERY_DEVICE), PartitionSpec()
    place: Any = split  # of the weight
    if isinstance(weight, QuantizedWeight):
        places: Any = {"values": split, "scale": whole}  # in place of arrays
        place = replace(weight, **places)
    if isinstance(weight, Int4Weight):
        places = {"words": PartitionSpec(EVERY_DEVICE), "scales": PartitionSpec(None, EVERY_DEVICE)}
        place = replace(weight, **places)
    sent = type_between_devices(weight)

    def part(x: jax.Array, weight: Matrix, adapters: "tuple[jax.Array, ...] | None") -> jax.Array:
        product = project(x, weight)
        if adapters is not None:
            product += LowRank(*adapters).project(x)
        summed: jax.Array = lax.psum(product.astype(sent), EVERY_DEVICE)
        return summed.astype(jnp.float32)

    places_of_adapters = None if adapters is None else (split, whole, whole)
    in_specs = (split, place, places_of_adapters)
    # As of attention: kernels say nothing of what varies over devices, nor do loops over blocks of a weight.
    summed: jax.Array = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=whole, check_vma=False)(
        x, weight, None if adapters is None else tuple(adapters)
    )
    return summed


def type_between_devices(weight: Matrix) -> "jnp.dtype[Any]":
    """In which devices send each other products with a weight: that in which it is multiplied; for int8 bfloat16."""
    if isinstance(weight, Int4Weight):
        return jnp.dtype("bfloat16")
    if not isinstance(weight, QuantizedWeight):
        return weight.dtype
    return jnp.dtype("bfloat16" if weight.matmul_dtype in INTEGERS else weight.matmul_dtype)


def project_quantized(x: Float[Array, "rows in"], weight: QuantizedWeight) -> Float32[Array, "rows out"]:
    """As `project`: the product with the values, scaled afterwards.

    Accelerators' compilers fuse the widening into the product. XLA:CPU would first widen the whole weight; there one
    row's sums widen as they read, and more rows go through the weight by blocks.
    """
    if weight.matmul_dtype in INTEGERS:

        def multiply(rows: Shaped[Array, "parts in"]) -> Float32[Array, "parts out"]:
            if rows.shape[0] == 1:
                return contract_one(rows[0], weight.values)[None]
            return multiply_int8(rows, weight.values).astype(jnp.float32)

        return multiply_rounded(x, weight.matmul_dtype, multiply) * weight.scale
    x = x.astype(weight.matmul_dtype)

    def on_cpu(x: jax.Array, values: jax.Array) -> jax.Array:
        return contract_one(x[0], values)[None] if x.shape[0] == 1 else contract_in_blocks(x, values)

    def fused(x: jax.Array, values: jax.Array) -> jax.Array:
        return contract(x, widen(values, x.dtype))

    product: jax.Array = lax.platform_dependent(x, weight.values, cpu=on_cpu, default=fused)
    return product * weight.scale


def multiply_rounded(
    x: Float[Array, "rows in"], matmul_dtype: str, multiply: Callable[[Shaped[Array, "parts in"]], jax.Array]
) -> Float32[Array, "rows out"]:
    """The product of rows rounded to "int8" or "int16", which `multiply` makes of rows of int8, or of one of float32.

    A row of int16 is 128 times one of int8 and another. Two products of int8 take less time than one of bfloat16 with
    widened values, where a CPU multiplies int8 by itself. A 32,000th of a row's largest number is lost at most, of
    which bfloat16 loses up to a 512th. One row alone is not rounded to int16: its sums are of float32 anyway.
    """
    rows = x.shape[0]
    if matmul_dtype == "int16" and rows == 1:
        return multiply(x.astype(jnp.float32))
    rounded, scale = round_rows(x, INTEGERS[matmul_dtype])
    if matmul_dtype == "int8":
        return multiply(rounded if rows == 1 else rounded.astype(jnp.int8)) * scale
    high = jnp.round(rounded / HIGH_PART)
    low = rounded - high * HIGH_PART
    products = multiply(jnp.concatenate([high, low]).astype(jnp.int8))
    return (products[:rows] * HIGH_PART + products[rows:]) * scale


def round_rows(x: Float[Array, "rows in"], largest: int) -> tuple[Float32[Array, "rows in"], Float32[Array, "rows 1"]]:
    """Rows as whole numbers up to `largest`, and the scale of each: x ≈ rounded * scale, NaN if a row is not finite."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(1, keepdims=True) / largest
    rounded = jnp.round(x / jnp.where(scale == 0, 1, scale))
    # XLA's maximum of many rows on a CPU leaves a NaN out.
    return rounded, jnp.where(jnp.isfinite(x).all(1, keepdims=True), scale, jnp.nan)


def multiply_int8(rows: Int8[Array, "rows in"], values: Int8[Array, "out in"]) -> Int32[Array, "rows out"]:
    """The product of int8 on a CPU, which is exact."""
    dimensions = (((1,), (1,)), ((), ()))
    multiply = partial(lax.dot_general, dimension_numbers=dimensions, preferred_element_type=jnp.int32)
    if rows.shape[0] > FEW_ROWS:
        product: jax.Array = multiply(rows, values)
        return product
    swapped: jax.Array = lax.optimization_barrier(multiply(values, rows))
    return swapped.T


def widen(values: Shaped[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Values of a `QuantizedWeight`, or numbers of a floating type, as `dtype`; exact."""
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return values.astype(dtype)


def widen_on_cpu(values: Shaped[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """As `widen`, by way of float16: its bits are those of float8_e4m3fn moved up, but for 256 times the value.

    XLA:CPU's own conversion of float8 takes up to three times as long.
    """
    if values.dtype != jnp.uint8:
        return values.astype(dtype)
    bits = values.astype(jnp.uint16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    numbers = lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32) * 256
    return numbers.astype(dtype)


def contract_in_blocks(
    x: Shaped[Array, "rows in"], values: Shaped[Array, "all in"], first: "int | jax.Array" = 0, out: int | None = None
) -> Float32[Array, "rows out"]:
    """The product with `out` rows of `values` from `first` on; None: with all, on CPU.

    BLOCK_ELEMENTS of them at a time are copied, which widens values of 8 bits; COPIED_ELEMENTS where they stay as they
    are. Only int8 meets int8, and is exact.
    """
    inside = values.shape[1]
    out = values.shape[0] if out is None else out
    most = COPIED_ELEMENTS if x.dtype == values.dtype else BLOCK_ELEMENTS
    count = -(-out // max(LEAST_BLOCK, most // inside))
    block = -(-out // count)  # equal parts: what is left for a last one that is shorter would be multiplied twice

    # JAX 0.10 cannot take a part of bfloat16 on a CPU: it would widen all of the values. Of their bits it can, which
    # later ones take three times as long for.
    narrow = values.dtype == jnp.bfloat16 and TAKES_BITS
    held = lax.bitcast_convert_type(values, jnp.uint16) if narrow else values

    def part(start: "int | jax.Array") -> jax.Array:
        taken = lax.dynamic_slice_in_dim(held, first + start, block)
        taken = lax.bitcast_convert_type(taken, jnp.bfloat16) if narrow else taken
        if x.dtype == jnp.int8:
            return multiply_int8(x, taken).astype(jnp.float32)
        taken = taken if x.dtype == values.dtype else widen_on_cpu(taken, x.dtype)
        # As in `project`. Values of 8 bits that meet as bfloat16 gained nothing, on a CPU that has no products of it.
        swaps = x.shape[0] <= FEW_ROWS and (x.dtype == values.dtype or x.dtype == jnp.float32)
        return contract_few(x, taken) if swaps else contract(x, taken)

    if block == out:
        return part(0)

    def fill(number: jax.Array, product: jax.Array) -> jax.Array:
        start = jnp.minimum(number * block, out - block)  # the last block overlaps the one before
        filled: jax.Array = lax.dynamic_update_slice(product, part(start), (jnp.zeros_like(start), start))
        return filled

    filled: jax.Array = lax.fori_loop(0, count, fill, jnp.zeros((x.shape[0], out), jnp.float32))
    return filled


def contract_one(
    x: Shaped[Array, " in"], weight: Shaped[Array, "*experts out in"], expert: "jax.Array | None" = None
) -> Float32[Array, " out"]:
    """One row by sums of vectors, for which XLA:CPU makes a loop that reads weights as fast as memory gives them.

    `weight` may be the values of a `QuantizedWeight`; of several experts, it is that of `expert`.

    Widened or reshaped otherwise, weights or what `x` is made of would be computed apart, or in every term. An expert
    that is taken out before its terms are would be copied. The numbers of the vectors that are left are added by a
    product with ones, as XLA:CPU's own sum of so few takes a quarter of the time that reading 1 KiB of weights does.

    A long row of int8 is summed in parts, each with the weights of PART_ROWS output channels: `x` would else be read
    from a farther cache again for each of them, at half the speed. bfloat16 gained nothing.
    """
    most = INT8_SUMS if weight.dtype == jnp.int8 else WIDE_SUMS
    lanes = math.gcd(x.size, most.lanes)
    count = x.size // lanes
    parts = next(n for n in range(-(-count // most.terms), count + 1) if count % n == 0)
    out = weight.shape[-2]
    is_long = x.size > LONG_ROW and weight.dtype == jnp.int8 and out % PART_ROWS == 0 and SUMS_ARE_FAST
    rows = PART_ROWS if is_long else 1
    x = lax.optimization_barrier(x.astype(jnp.float32))
    x, weight = (a.reshape(*a.shape[:-1], parts, -1, lanes) for a in (x, weight))

    def term_of_weight(term: int) -> jax.Array:
        if expert is None:
            taken = weight[..., term, :]
        else:
            taken = lax.dynamic_slice(weight, (expert, 0, 0, term, 0), (1, out, parts, 1, lanes))
        return taken.reshape(out // rows, rows, parts, lanes).swapaxes(1, 2)

    def product(term: int) -> jax.Array:
        return widen_on_cpu(term_of_weight(term), jnp.float32) * x[:, None, term, :]

    terms = [product(term) for term in range(count // parts)]
    total: Any = sum(sum(terms[first :: most.sums]) for first in range(min(most.sums, len(terms))))
    if is_long:  # as XLA would else go from output channel to output channel
        total = with_layout_constraint(total, Layout(major_to_minor=(0, 1, 2, 3)))
    vectors = lax.optimization_barrier(total).reshape(out * parts if is_long else out, -1)
    sums = lax.dot(vectors, jnp.ones(vectors.shape[1]), precision=lax.Precision.HIGHEST)
    return sums.reshape(-1, parts, rows).sum(1).reshape(out) if is_long else sums


def contract_few(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float32[Array, "rows out"]:
    """The product of few rows on CPU, as the right operand."""
    swapped: jax.Array = lax.optimization_barrier(contract(weight, x))
    return swapped.T  # without the barrier XLA swaps them back


def contract(a: Float[Array, "m in"], b: Float[Array, "n in"]) -> Float32[Array, "m n"]:
    """Both last axes; float32 exactly."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
