"""Norms by the root mean square."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxctx.model.layers.linear import Create


class RMSNorm(nnx.Module):
    """Divide by the root mean square over the last axis, then scale; float32."""

    def __init__(self, create: Create, size: int, axis: str, epsilon: float, *, adds_one: bool = False) -> None:
        """`axis`: the logical name of the last axis. `adds_one`: the scale is 1 + the weight."""
        # What is near 1 either way is made so: a weight that 1 is added to is near 0.
        self.weight = nnx.Param(create((size,), "bias" if adds_one else "scale"), axes=(axis,))
        self.epsilon = epsilon
        self.adds_one = adds_one

    def __call__(self, x: Float[Array, "*rows size"]) -> Float32[Array, "*rows size"]:
        x = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        scale: jax.Array = self.weight[...].astype(jnp.float32)
        return x * inverse * (1 + scale if self.adds_one else scale)
