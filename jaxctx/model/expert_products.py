"""Feed-forward by experts: products of each row with the weights of the experts that it chose, and of no others.

    chosen experts of each row ─▶ pairs of a row and an expert, sorted by expert ─▶ products ─▶ summed by row

No pair is left out, however many rows choose the same expert, and nothing is computed for an expert that none chooses.
A row's result does not depend on the other rows, but for the order of sums on some devices. What computes the products:

    CPU                          tiles of pairs of one expert, one after the other: `feed_in_tiles`
    TPU, weights of bfloat16     the grouped product that JAX has for TPUs, megablox
    H100, H200, bfloat16         the one that it has for these, or for few pairs sums of products, `feed_in_sums`
    other GPUs, 8 bits           `feed_in_sums` for few pairs, `feed_in_tiles` for many

`jax.lax.ragged_dot` is not used: XLA multiplies all rows with all experts for it on a CPU and on a GPU.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxctx.model.products import (
    INTEGERS,
    SUMS_ARE_FAST,
    WIDENS_BFLOAT16,
    QuantizedWeight,
    Weight,
    contract,
    contract_in_blocks,
    contract_one,
    multiply_rounded,
    widen,
)
from jaxctx_kernels import KernelName

Gate: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]  # what goes on of the products with gate and up
ProjectTile: TypeAlias = Callable[[jax.Array, Weight, jax.Array], jax.Array]

PAIRS_ALONE = 2  # for each expert, up to which pairs on a CPU are multiplied one by one
FEW_PAIRS = 4  # for each expert, up to which tiles are small
PAIRS_IN_SUMS = 2  # likewise on a GPU, in sums of products
HOPPER_BLOCK = 64  # rows, and elements of a row, that the product of H100 and H200 takes at a time
HOPPER_OUT = 128  # output channels, likewise
TPU_ROWS, TPU_INSIDE, TPU_OUT = 128, 2048, 512  # the most that megablox takes at a time: two MiB of weights
SUBLANES, LANES = 16, 128  # of a TPU's tile of bfloat16


class ExpertWeights(NamedTuple):
    """Of all experts of a layer. A bias that is None adds nothing."""

    gate: Weight  # [experts, ffn, embed]
    up: Weight  # [experts, ffn, embed]
    down: Weight  # [experts, embed, ffn]
    gate_bias: Float[Array, "experts ffn"] | None = None
    up_bias: Float[Array, "experts ffn"] | None = None
    down_bias: Float[Array, "experts embed"] | None = None

    @property
    def matrices(self) -> tuple[Weight, Weight, Weight]:
        """Gate, up and down."""
        return self.gate, self.up, self.down


class Pairs(NamedTuple):
    """Pairs of a row and an expert that it chose, sorted by expert. Those of rows that are padding are the last."""

    rows: Int32[Array, " pairs"]  # the row of each
    places: Int32[Array, "rows per_token"]  # where each row's pairs are
    sizes: Int32[Array, " experts"]  # how many each expert has


def sort_pairs(chosen: Int32[Array, "rows per_token"], experts: int, padding: Bool[Array, " rows"] | None) -> Pairs:
    """The pairs of the experts `chosen`; those of rows that are `padding` belong to no expert."""
    per_token = chosen.shape[1]
    if padding is not None:
        chosen = jnp.where(padding[:, None], experts, chosen)
    of_pair = chosen.reshape(-1)
    numbers = jnp.arange(of_pair.size, dtype=jnp.int32)
    # One array to sort: the experts first, then the pairs' numbers.
    order = lax.sort(of_pair * of_pair.size + numbers, is_stable=False) % of_pair.size
    places = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    sizes = (of_pair[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    return Pairs(order // per_token, places.reshape(chosen.shape), sizes)


def feed_experts(
    x: Float32[Array, "rows embed"],
    chosen: Int32[Array, "rows per_token"],
    scores: Float32[Array, "rows per_token"],
    weights: ExpertWeights,
    gate: Gate,
    padding: Bool[Array, " rows"] | None = None,
    kernel: KernelName = "reference",
) -> Float32[Array, "rows embed"]:
    """`sum of score * down(gate(weights.gate(x), weights.up(x)))` over the experts that each row chose.

    Rows that are `padding` give zeros. `kernel`: the kind of device, as by what computes attention on it.
    """
    values = weights.gate.values if isinstance(weights.gate, QuantizedWeight) else weights.gate
    experts, pairs = values.shape[0], sort_pairs(chosen, values.shape[0], padding)
    count = pairs.rows.size

    def on_cpu(x: jax.Array, scores: jax.Array, pairs: Pairs, weights: ExpertWeights) -> jax.Array:
        tile = rows_of_tile(count, experts)
        return sum_by_row(feed_in_tiles(x, pairs, weights, gate, tile, project_on_cpu), pairs, scores)

    def on_tpu(x: jax.Array, scores: jax.Array, pairs: Pairs, weights: ExpertWeights) -> jax.Array:
        arrays = bfloat16_arrays(weights)
        if kernel == "tpu" and arrays:
            fed = feed_by_kernel(x, pairs, weights, gate, multiply_on_tpu)
        else:
            tile = LANES if count > FEW_PAIRS * experts else SUBLANES
            fed = feed_in_tiles(x, pairs, weights, gate, tile, project_one)
        return sum_by_row(fed, pairs, scores)

    def elsewhere(x: jax.Array, scores: jax.Array, pairs: Pairs, weights: ExpertWeights) -> jax.Array:
        arrays = bfloat16_arrays(weights)
        if count <= PAIRS_IN_SUMS * experts:
            fed = feed_in_sums(x, pairs, weights, gate)
        elif kernel == "gpu" and fits_hopper(arrays):
            fed = feed_by_kernel(x, pairs, weights, gate, multiply_on_hopper)
        else:
            fed = feed_in_tiles(x, pairs, weights, gate, HOPPER_BLOCK, project_one)
        return sum_by_row(fed, pairs, scores)

    summed: jax.Array = lax.platform_dependent(x, scores, pairs, weights, cpu=on_cpu, tpu=on_tpu, default=elsewhere)
    return summed if padding is None else jnp.where(padding[:, None], 0, summed)


def sum_by_row(
    fed: Float32[Array, "at_least_pairs embed"], pairs: Pairs, scores: Float32[Array, "rows per_token"]
) -> Float32[Array, "rows embed"]:
    """What experts made of each row by its scores, in the order in which it chose: no other row changes the sum."""
    of_row = (scores[:, n, None] * fed[pairs.places[:, n]] for n in range(scores.shape[1]))
    summed: jax.Array = sum(of_row, start=jnp.float32(0))
    return summed


def rows_of_tile(pairs: int, experts: int) -> int:
    """How many pairs of an expert a CPU multiplies at a time: one by one where an expert has few of them.

    Of a step's size alone: so a row's bits do not depend on what the other rows chose.
    """
    if pairs <= PAIRS_ALONE * experts:
        return 1 if SUMS_ARE_FAST else 4
    if pairs <= FEW_PAIRS * experts:
        return 8
    return 32 if pairs <= 16 * experts else 64


def feed_in_tiles(
    x: Float32[Array, "rows embed"],
    pairs: Pairs,
    weights: ExpertWeights,
    gate: Gate,
    tile: int,
    project: ProjectTile,
) -> Float32[Array, "pairs_and_tile embed"]:
    """What experts make of the pairs, by `tile` of one expert at a time; a last tile is filled with whatever follows.

    There are as many tiles as experts have pairs for: an expert that none chose costs nothing. `tile` rows follow the
    pairs, and what no expert computes is 0.
    """
    tiles = -(-pairs.sizes // tile)
    ends, first_pairs = jnp.cumsum(tiles), jnp.cumsum(pairs.sizes) - pairs.sizes
    rows = jnp.pad(pairs.rows, (0, tile))

    def feed(number: jax.Array, fed: jax.Array) -> jax.Array:
        expert = (ends <= number).sum(dtype=jnp.int32)
        start = first_pairs[expert] + (number - ends[expert] + tiles[expert]) * tile
        given = x[lax.dynamic_slice_in_dim(rows, start, tile)]
        gated = gate(
            add_bias(project(given, weights.gate, expert), weights.gate_bias, expert),
            add_bias(project(given, weights.up, expert), weights.up_bias, expert),
        )
        made = add_bias(project(gated, weights.down, expert), weights.down_bias, expert)
        # What is past the expert's last pair is written again by the next tile.
        written: jax.Array = lax.dynamic_update_slice(fed, made, (start, jnp.zeros_like(start)))
        return written

    fed: jax.Array = lax.fori_loop(0, ends[-1], feed, jnp.zeros((rows.size, x.shape[1]), jnp.float32))
    return fed


def add_bias(
    product: Float32[Array, "rows out"], bias: Float[Array, "experts out"] | None, expert: Int32[Array, "*rows"]
) -> Float32[Array, "rows out"]:
    """The product with an expert's weight, and its bias; `expert`: of all rows, or of each."""
    return product if bias is None else product + bias[expert].astype(jnp.float32)


def project_on_cpu(
    x: Float32[Array, "rows in"], weight: Weight, expert: Int32[Array, ""]
) -> Float32[Array, "rows out"]:
    """`products.project` with the weight of one expert, which is not copied as a whole."""
    values = weight.values if isinstance(weight, QuantizedWeight) else weight
    _, out, inside = values.shape

    def multiply(x: jax.Array) -> jax.Array:
        if x.shape[0] == 1:
            return contract_one(x[0], values, expert)[None]
        return contract_in_blocks(x, values.reshape(-1, inside), expert * out, out)

    if not isinstance(weight, QuantizedWeight):
        narrow = x.astype(weight.dtype)
        # A part has to be copied, and widened it costs no more to copy. The numbers that meet are the same.
        widens = WIDENS_BFLOAT16 and weight.dtype == jnp.bfloat16 and x.shape[0] > 1
        return multiply(narrow.astype(jnp.float32) if widens else narrow)
    if weight.matmul_dtype in INTEGERS:
        return multiply_rounded(x, weight.matmul_dtype, multiply) * weight.scale[expert]
    return multiply(x.astype(weight.matmul_dtype)) * weight.scale[expert]


def project_one(x: Float32[Array, "rows in"], weight: Weight, expert: Int32[Array, ""]) -> Float32[Array, "rows out"]:
    """The same on other devices, whose compilers take the expert, and widen it, inside the product."""
    if not isinstance(weight, QuantizedWeight):
        return contract(x.astype(weight.dtype), weight[expert])
    narrow = x.astype(weight.matmul_dtype)
    return contract(narrow, widen(weight.values[expert], narrow.dtype)) * weight.scale[expert]


def feed_in_sums(
    x: Float32[Array, "rows embed"], pairs: Pairs, weights: ExpertWeights, gate: Gate
) -> Float32[Array, "pairs embed"]:
    """Each pair's products as sums, in which a GPU reads the weights where they lie: as often as they are chosen."""
    expert = expert_of_pair(pairs)

    def sums(given: jax.Array, weights: jax.Array) -> jax.Array:
        wide = widen(weights[expert], jnp.float32)
        return (wide * given.astype(jnp.float32)[:, None]).sum(2)

    def project(given: jax.Array, weight: Weight) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            return sums(given.astype(weight.matmul_dtype), weight.values) * weight.scale[expert]
        return sums(given.astype(weight.dtype), weight)

    given = x[pairs.rows]
    gated = gate(
        add_bias(project(given, weights.gate), weights.gate_bias, expert),
        add_bias(project(given, weights.up), weights.up_bias, expert),
    )
    return add_bias(project(gated, weights.down), weights.down_bias, expert)


def expert_of_pair(pairs: Pairs) -> Int32[Array, " pairs"]:
    """The expert of each pair; of padding, which has none, any."""
    ends = jnp.cumsum(pairs.sizes)
    of_pair = (ends[None] <= jnp.arange(pairs.rows.size)[:, None]).sum(1, dtype=jnp.int32)
    return jnp.minimum(of_pair, ends.size - 1)


def bfloat16_arrays(weights: ExpertWeights) -> list[jax.Array]:
    """Gate, up and down where all are bfloat16, which grouped products take; else none."""
    matrices = weights.matrices
    arrays = [each for each in matrices if not isinstance(each, QuantizedWeight) and each.dtype == jnp.bfloat16]
    return arrays if len(arrays) == len(matrices) else []


def feed_by_kernel(
    x: Float32[Array, "rows embed"],
    pairs: Pairs,
    weights: ExpertWeights,
    gate: Gate,
    multiply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Float32[Array, "pairs embed"]:
    """What experts make of the pairs, by a grouped product of weights that are `bfloat16_arrays`.

    What belongs to no expert may be anything.
    """
    given, expert = x[pairs.rows], expert_of_pair(pairs)

    def project(given: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        product = multiply(given.astype(jnp.bfloat16), weight, pairs.sizes).astype(jnp.float32)
        return add_bias(product, bias, expert)

    of_gate, of_up, of_down = bfloat16_arrays(weights)
    gated = gate(project(given, of_gate, weights.gate_bias), project(given, of_up, weights.up_bias))
    return project(gated, of_down, weights.down_bias)


def multiply_on_tpu(
    x: Float[Array, "pairs in"], weights: Float[Array, "experts out in"], sizes: Int32[Array, " experts"]
) -> Float32[Array, "pairs out"]:
    """JAX's grouped product for TPUs."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # none for other devices

    _, out, inside = weights.shape
    pairs = x.shape[0]
    rows = min(TPU_ROWS, -(-pairs // SUBLANES) * SUBLANES)
    padded = jnp.pad(x, ((0, -pairs % rows), (0, 0)))
    tiling = rows, part_of(inside, TPU_INSIDE), part_of(out, TPU_OUT)
    product: jax.Array = gmm(padded, weights, sizes, jnp.float32, tiling, transpose_rhs=True)
    return product[:pairs]


def part_of(size: int, most: int) -> int:
    """The largest part of an axis, at most `most`, that divides it into whole lanes; else as much as it has."""
    lanes = math.gcd(size, most)
    whole = (part for part in range(most, 0, -LANES) if size % part == 0)
    return next(whole, lanes if lanes >= LANES else min(size, most))


def fits_hopper(arrays: list[jax.Array]) -> bool:
    """Whether `multiply_on_hopper` takes these `bfloat16_arrays`."""
    return bool(arrays) and all(array.shape[2] % HOPPER_BLOCK == 0 for array in arrays)


def multiply_on_hopper(
    x: Float[Array, "pairs in"], weights: Float[Array, "experts out in"], sizes: Int32[Array, " experts"]
) -> Float[Array, "pairs out"]:
    """JAX's grouped product for H100 and H200; it rounds to the type of `x`."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # none for other devices, nor in JAX 0.10

    product: jax.Array = ragged_dot(
        x,
        weights,
        group_sizes=sizes,
        block_m=HOPPER_BLOCK,
        block_n=HOPPER_OUT,
        block_k=HOPPER_BLOCK,
        max_concurrent_steps=4,
        grid_block_n=1,
        transpose_rhs=True,
    )
    return product
