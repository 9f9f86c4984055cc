"""The soft cap of scores in the kernels for NVIDIA GPUs: two instructions of the special function unit for a score.

    cap * tanh(s / cap) = 2 * cap / (1 + exp(-2 * s / cap)) - cap

The last term is the same for all scores, so that softmax leaves nothing of it, and kernels leave it out. Neither JAX's
tanh nor its division would do: with approximate arithmetic tanh is `tanh.approx`, which is off by 2**-11 of itself, at
a cap of 50 by 0.024 of a score and so by 2.4 % of a weight; a division is some ten instructions and a call. The square
of a reciprocal square root is off by 2**-21.9, 3e-5 of such a score.

Called by `mosaic_hopper` and `mosaic_mma`, with scores that are not yet masked.
"""

from math import e, log2

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32


def capped(
    score: Float32[Array, "64 64"], unit: float, soft_cap: float | None
) -> tuple[Float32[Array, "64 64"], float]:
    """Scores with a soft cap, all of them higher by the cap, and their unit: in base 2 they are the product of both.

    `unit`: what `score` is to be multiplied by, to be in base 2. None as a cap: both as they are.
    """
    if soft_cap is None:
        return score, unit
    root = lax.rsqrt(jnp.exp2(score * (-2 * unit / soft_cap)) + 1.0)
    return root * root, 2 * soft_cap * log2(e)
