"""The feed-forward block of a sparse layer: a router, and experts of which each row takes a few."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from jaxctx.model.config import Experts, ModelConfig
from jaxctx.model.expert_products import ExpertWeights, feed_experts
from jaxctx.model.layers.feed_forward import FeedForward, clamped_gate, plain_gate
from jaxctx.model.layers.linear import Create, Linear
from jaxctx.model.products import QuantizedWeight, Weight, type_between_devices
from jaxctx.model.sharding import EVERY_DEVICE, partition_spec
from jaxctx_kernels import KernelName


class ExpertLinears(nnx.Module):
    """A matrix for each expert. `weight` `[experts, out, in]`; `weight_scale` `[experts, out]` where it has 8 bits;
    `bias` `[experts, out]`.
    """

    def __init__(
        self, create: Create, experts: int, out: tuple[int, str], inside: tuple[int, str], *, bias: bool
    ) -> None:
        self.shape, self.axes = (experts, out[0], inside[0]), ("experts", out[1], inside[1])
        self.set_weight(create(self.shape, "matrix"))
        self.bias = nnx.Param(create((experts, out[0]), "bias"), axes=self.axes[:2]) if bias else None

    def set_weight(self, weight: Any) -> None:
        """Take this weight, `[experts, out, in]`, in place of the one before."""
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        self.weight = nnx.Param(weight if quantized is None else quantized.values, axes=self.axes)
        self.weight_scale = None if quantized is None else nnx.Param(quantized.scale, axes=self.axes[:2])
        self.matmul_dtype = "" if quantized is None else quantized.matmul_dtype

    def read(self) -> Weight:
        """The weight of all experts."""
        weight: jax.Array = self.weight[...]
        if self.weight_scale is None:
            return weight
        return QuantizedWeight(weight, self.weight_scale[...], self.matmul_dtype)

    def split(self) -> Any:
        """How a mesh splits what `read` gives: the same with a `PartitionSpec` in place of each array."""
        weight: Any = partition_spec(self.axes)
        scale: Any = partition_spec(self.axes[:2])
        return weight if self.weight_scale is None else QuantizedWeight(weight, scale, self.matmul_dtype)

    def read_bias(self) -> jax.Array | None:
        """The biases of all experts; None: they have none."""
        return None if self.bias is None else self.bias[...]


class ExpertBlocks(nnx.Module):
    """The experts of a layer, each a gated feed-forward block."""

    def __init__(self, create: Create, config: ModelConfig, experts: Experts) -> None:
        embed, ffn = (config.width, "embed"), (experts.ffn, "ffn")
        linears = partial(ExpertLinears, create, experts.count, bias=experts.has_bias)
        self.gate_proj = linears(ffn, embed)
        self.up_proj = linears(ffn, embed)
        self.down_proj = linears(embed, ffn)
        self.activation, self.clamped_gate = config.activation, experts.clamped_gate

    def __call__(
        self,
        x: Float32[Array, "rows embed"],
        chosen: Int32[Array, "rows per_token"],
        scores: Float32[Array, "rows per_token"],
        mesh: Mesh | None,
        padding: Bool[Array, " rows"] | None,
        kernel: KernelName,
    ) -> Float32[Array, "rows embed"]:
        """See `expert_products.feed_experts`. On a mesh each device has a part of every expert, as of dense layers."""
        linears = self.gate_proj, self.up_proj, self.down_proj
        gate_weight, up_weight, down_weight = (linear.read() for linear in linears)
        biases = [linear.read_bias() for linear in linears]
        weights = ExpertWeights(gate_weight, up_weight, down_weight, *biases)
        if self.clamped_gate is None:
            gate = partial(plain_gate, self.activation)
        else:
            gate = partial(clamped_gate, self.clamped_gate)
        if mesh is None or mesh.size == 1:
            return feed_experts(x, chosen, scores, weights, gate, padding, kernel)
        sent = type_between_devices(weights.down)

        def part(
            x: jax.Array, chosen: jax.Array, scores: jax.Array, padding: jax.Array | None, weights: ExpertWeights
        ) -> jax.Array:
            if weights.down_bias is not None:  # of the sum over devices, and so of one of them
                is_first = lax.axis_index(EVERY_DEVICE) == 0
                weights = weights._replace(down_bias=jnp.where(is_first, weights.down_bias, 0))
            fed = feed_experts(x, chosen, scores, weights, gate, padding, kernel)
            summed: jax.Array = lax.psum(fed.astype(sent), EVERY_DEVICE)
            return summed.astype(jnp.float32)

        whole = PartitionSpec()
        split: Any = [linear.split() for linear in linears]
        split += [
            None if bias is None else partition_spec(linear.axes[:2])
            for linear, bias in zip(linears, biases, strict=True)
        ]
        in_specs = (whole, whole, whole, whole, ExpertWeights(*split))
        # As of attention: the kernels say nothing of what varies over devices.
        sharded = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=whole, check_vma=False)
        summed: jax.Array = sharded(x, chosen, scores, padding, weights)
        return summed


class SparseFeedForward(nnx.Module):
    """What a row's best experts make of it, weighted by their scores; and a shared expert, if the model has one."""

    def __init__(self, create: Create, config: ModelConfig, experts: Experts) -> None:
        embed = (config.width, "embed")
        self.gate = Linear(create, (experts.count, "experts"), embed, bias=experts.has_bias, kind="embedding")
        self.experts = ExpertBlocks(create, config, experts)
        shared = experts.shared_ffn > 0
        self.shared_expert = FeedForward(create, config, experts.shared_ffn) if shared else None
        self.shared_expert_gate = (
            Linear(create, (1, "experts"), embed, bias=False, kind="embedding") if shared else None
        )
        self.per_token = experts.per_token
        self.normalised = experts.normalised

    def __call__(
        self,
        x: Float32[Array, "rows embed"],
        mesh: Mesh | None,
        padding: Bool[Array, " rows"] | None,
        kernel: KernelName,
    ) -> Float32[Array, "rows embed"]:
        """`padding`: rows that nothing reads, for which no expert is asked. `kernel`: see `feed_experts`."""
        chosen, scores = self.route(x)
        fed = self.experts(x, chosen, scores, mesh, padding, kernel)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return fed
        return fed + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x, mesh)

    def route(
        self, x: Float32[Array, "rows embed"]
    ) -> tuple[Int32[Array, "rows per_token"], Float32[Array, "rows per_token"]]:
        """The experts of each row, best first, and their scores. Of experts with equal scores the first is taken."""
        scores, chosen = lax.top_k(jax.nn.softmax(self.gate(x), axis=-1), self.per_token)
        return chosen, scores / scores.sum(-1, keepdims=True) if self.normalised else scores
