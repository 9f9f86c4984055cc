"""Products with a weight, and the values that parameters are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32

from jaxctx.model.config import AdapterSlots
from jaxctx.model.products import (
    Int4Weight,
    LowRank,
    Matrix,
    QuantizedWeight,
    project_and_sum,
    project_each_part,
)
from jaxctx.model.sharding import RULES
from jaxctx_kernels.int4_weights import ProductKernel

Axes = tuple[str, ...]  # logical axis names of a parameter, see `sharding`
Create = Callable[[tuple[int, ...], str], "jax.Array | jax.ShapeDtypeStruct | QuantizedWeight | Int4Weight"]
"""Makes the value of a parameter from its shape and kind: "matrix", "embedding", "bias" (zeros), "scale" (ones) or
"adapter" (zeros).

Only a matrix may be a `QuantizedWeight`, or an `Int4Weight` if it has two axes; an "embedding", a head
or a router never is.
"""
PARTS = "parts"
"""The first axis of what is beside a weight of 4 bits: scales, and zeros."""

AdapterColumns = Bool[Array, "rows columns"]
"""Which columns of `lora_a` a row keeps: those of its own adapter's slot, see `AdapterSlots`."""


class Linear(nnx.Module):
    """`x @ weight.T + bias`, in float32. `weight` `[out, in]`; `weight_scale` `[out]` where that has 8 bits.

    Of 4 bits they are `words` and `scales` of `Int4Weight`, whose outputs are last.

    With slots for adapters a row also gets `x @ lora_a.T @ lora_b.T` over the columns of its adapter: `lora_a`
    `[columns, in]`, `lora_b` `[out, columns]`. Other columns add exact zeros, so that adapters share a step.
    """

    def __init__(
        self,
        create: Create,
        out: tuple[int, str],
        inside: tuple[int, str],
        *,
        bias: bool,
        kind: str = "matrix",
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.product_kernel: ProductKernel | None
        self.shape, self.axes = (out[0], inside[0]), (out[1], inside[1])
        self.set_weight(create(self.shape, kind))
        self.bias = nnx.Param(create((out[0],), "bias"), axes=(out[1],)) if bias else None
        columns = None if adapters is None else (adapters.columns, "adapters")
        self.lora_a = None if columns is None else _adapter_param(create, columns, inside)
        self.lora_b = None if columns is None else _adapter_param(create, out, columns)

    def set_weight(self, weight: "Matrix | jax.ShapeDtypeStruct") -> None:
        """Take this weight, `[out, in]`, in place of the one before."""
        axes: Axes = self.axes
        scale_axes: Axes = self.axes[:1]
        values: Any = weight
        scale: Any = None
        self.matmul_dtype, self.product_kernel = "", None
        if isinstance(weight, QuantizedWeight):
            values, scale, self.matmul_dtype = weight.values, weight.scale, weight.matmul_dtype
        elif isinstance(weight, Int4Weight):
            values, scale, self.product_kernel = weight.words, weight.scales, weight.kernel
            axes, scale_axes = self.axes[::-1], (PARTS, *self.axes[::-1])
        self.weight: nnx.Param[jax.Array] = nnx.Param(values, axes=axes)
        self.weight_scale: nnx.Param[jax.Array] | None = None if scale is None else nnx.Param(scale, axes=scale_axes)

    def __call__(
        self, x: Float[Array, "rows in"], columns: AdapterColumns | None = None, mesh: Mesh | None = None
    ) -> Float32[Array, "rows out"]:
        """The product. `columns`: those of each row's adapter; None: no row has one.

        `mesh`: what outputs are split over, see `project_each_part`.
        """
        product = project_each_part(x, self._read_weight(), mesh, RULES[self.axes[0]])
        low_rank = self._low_rank(columns)
        return self._add_bias(product if low_rank is None else product + low_rank.project(x))

    def sum_over(
        self, mesh: Mesh | None, x: Float[Array, "rows in"], columns: AdapterColumns | None = None
    ) -> Float32[Array, "rows out"]:
        """The same where `in` is split over `mesh`, see `project_and_sum`."""
        return self._add_bias(project_and_sum(x, self._read_weight(), mesh, self._low_rank(columns)))

    def _low_rank(self, columns: AdapterColumns | None) -> LowRank | None:
        if self.lora_a is None or self.lora_b is None or columns is None:
            return None
        return LowRank(self.lora_a[...], self.lora_b[...], columns)

    def _read_weight(self) -> Matrix:
        weight: jax.Array = self.weight[...]
        if self.weight_scale is None:
            return weight
        if self.product_kernel is not None:
            return Int4Weight(weight, self.weight_scale[...], self.product_kernel)
        return QuantizedWeight(weight, self.weight_scale[...], self.matmul_dtype)

    def _add_bias(self, y: Float32[Array, "rows out"]) -> Float32[Array, "rows out"]:
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)


def _adapter_param(create: Create, rows: tuple[int, str], columns: tuple[int, str]) -> "nnx.Param[jax.Array]":
    value: Any = create((rows[0], columns[0]), "adapter")
    return nnx.Param(value, axes=(rows[1], columns[1]))
