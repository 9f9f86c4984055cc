"""Products of rows with weights, as each kind of device computes them best.

Weights are stored `[out, in]`, as in the checkpoints, and contracted on their last axis. What is multiplied is narrow,
products are float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxctx.model.sharding import EVERY_DEVICE

FEW_ROWS = 64  # of a product on CPU; with more, packing the weights costs less than it saves
LANES, TERMS = 32, 32  # of one row's products on CPU: numbers of a vector, and vectors that one loop adds at most


def project(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float32[Array, "rows out"]:
    """Contract both last axes. `x` is narrowed to the weight's type, the product is not.

    A product that returns bfloat16, or a weight widened in the step, is several times slower on CPU. There the right
    operand is packed anew at every call; so few rows are made that one (1.5 times as fast in bfloat16, twice in
    float32). A row alone takes another path, good in float32 and else seven times slower, unless spelt out.
    """
    rows, x = x.shape[0], x.astype(weight.dtype)
    if rows > FEW_ROWS:
        return contract(x, weight)

    def few(x: jax.Array, weight: jax.Array) -> jax.Array:
        if rows == 1 and weight.dtype != jnp.float32:
            return contract_one(x[0], weight)[None]
        swapped: jax.Array = lax.optimization_barrier(contract(weight, x))
        return swapped.T  # without the barrier XLA swaps them back

    product: jax.Array = lax.platform_dependent(x, weight, cpu=few, default=contract)
    return product


def project_and_sum(
    x: Float[Array, "rows in"], weight: Float[Array, "out in"], mesh: Mesh | None
) -> Float32[Array, "rows out"]:
    """`project` where `in` is split over `mesh`: each device's product, and then their sum, which every device gets.

    What devices send each other has the weights' type: bfloat16 are half the bytes of the products. Each product is
    rounded to it once, and so may be each sum of two; one device alone rounds nothing.
    """
    if mesh is None or mesh.size == 1:
        return project(x, weight)

    def part(x: jax.Array, weight: jax.Array) -> jax.Array:
        product = project(x, weight).astype(weight.dtype)
        summed: jax.Array = lax.psum(product, EVERY_DEVICE)
        return summed.astype(jnp.float32)

    split, whole = PartitionSpec(None, EVERY_DEVICE), PartitionSpec()
    product: jax.Array = jax.shard_map(part, mesh=mesh, in_specs=(split, split), out_specs=whole)(x, weight)
    return product


def contract_one(x: Float[Array, " in"], weight: Float[Array, "out in"]) -> Float32[Array, " out"]:
    """One row by sums of vectors, for which XLA:CPU makes a loop that reads weights as fast as memory gives them.

    Widened or reshaped otherwise, weights or what `x` is made of would be computed apart, or in every term.
    """
    lanes = math.gcd(x.size, LANES)
    count = x.size // lanes
    parts = next(n for n in range(-(-count // TERMS), count + 1) if count % n == 0)
    x = lax.optimization_barrier(x.astype(jnp.float32))
    x, weight = (a.reshape(*a.shape[:-1], parts, -1, lanes) for a in (x, weight))
    terms = (weight[..., term, :].astype(jnp.float32) * x[..., term, :] for term in range(count // parts))
    sums: jax.Array = lax.optimization_barrier(sum(terms)).sum((1, 2))
    return sums


def contract(a: Float[Array, "m in"], b: Float[Array, "n in"]) -> Float32[Array, "m n"]:
    """Both last axes; float32 exactly."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
