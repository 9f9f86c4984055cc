"""Products with a weight, and the values that parameters are made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxctx.model.products import QuantizedWeight, project, project_and_sum

Axes = tuple[str, ...]  # logical axis names of a parameter, see `sharding`
Create = Callable[[tuple[int, ...], str], "jax.Array | jax.ShapeDtypeStruct | QuantizedWeight"]
"""Makes the value of a parameter from its shape and kind: "matrix", "embedding", "bias" (zeros) or "scale" (ones).

Only a matrix may be a `QuantizedWeight`; an "embedding", a head or a router never is.
"""


class Linear(nnx.Module):
    """`x @ weight.T + bias`, in float32. `weight` `[out, in]`; `weight_scale` `[out]` where that has 8 bits."""

    def __init__(
        self, create: Create, out: tuple[int, str], inside: tuple[int, str], *, bias: bool, kind: str = "matrix"
    ) -> None:
        self.shape, self.axes = (out[0], inside[0]), (out[1], inside[1])
        self.set_weight(create(self.shape, kind))
        self.bias = nnx.Param(create((out[0],), "bias"), axes=(out[1],)) if bias else None

    def set_weight(self, weight: "jax.Array | jax.ShapeDtypeStruct | QuantizedWeight") -> None:
        """Take this weight, `[out, in]`, in place of the one before."""
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        self.weight = nnx.Param(weight if quantized is None else quantized.values, axes=self.axes)
        self.weight_scale = None if quantized is None else nnx.Param(quantized.scale, axes=self.axes[:1])
        self.matmul_dtype = "" if quantized is None else quantized.matmul_dtype

    def __call__(self, x: Float[Array, "rows in"]) -> Float32[Array, "rows out"]:
        return self._add_bias(project(x, self._read_weight()))

    def sum_over(self, mesh: Mesh | None, x: Float[Array, "rows in"]) -> Float32[Array, "rows out"]:
        """The same where `in` is split over `mesh`, see `project_and_sum`."""
        return self._add_bias(project_and_sum(x, self._read_weight(), mesh))

    def _read_weight(self) -> "jax.Array | QuantizedWeight":
        weight: jax.Array = self.weight[...]
        if self.weight_scale is None:
            return weight
        return QuantizedWeight(weight, self.weight_scale[...], self.matmul_dtype)

    def _add_bias(self, y: Float32[Array, "rows out"]) -> Float32[Array, "rows out"]:
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)
