"""Rotary position embedding: frequencies once per kind of layer, angles in the step from each row's position.

Su et al., RoFormer (2021), in the half-split layout of Hugging Face checkpoints: element i is rotated together with
element i + head_dim / 2.
"""

import math

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Float32, Int32

from jaxctx.model.config import RopeConfig

Frequencies = npt.NDArray[np.float32]
RopeCosSin = tuple[Float32[Array, "rows half"], Float32[Array, "rows half"]]
"""Cosines and sines of the rotation of each row, `[rows, head_dim / 2]`."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Radians per token of each pair of elements of a head: float32 `[head_dim / 2]`.

    Computed in float32 and in this order of operations on purpose: at position 100,000 the last bit of a frequency is
    visible in the logits, and this is what the checkpoint was trained with.
    """
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    frequencies: Frequencies = np.float32(1.0) / np.power(np.float32(rope.theta), exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return np.divide(frequencies, np.float32(scaling.factor), dtype=np.float32)
    # Llama 3.1: short wavelengths stay, long ones are divided by `factor`, between them a linear blend.
    rotations = scaling.original_max_positions * frequencies / np.float32(2 * math.pi)  # within the trained context
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    blend: Frequencies = (keep * frequencies + (1 - keep) * frequencies / np.float32(scaling.factor)).astype(np.float32)
    return blend


def cos_sin(frequencies: Frequencies, positions: Int32[Array, " rows"]) -> RopeCosSin:
    """Cosines and sines of the rows' angles, shared by all heads and layers of a step."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "rows heads head_dim"], cos: Float32[Array, "rows half"], sin: Float32[Array, "rows half"]
) -> Float32[Array, "rows heads head_dim"]:
    """Rotate each pair (i, i + head_dim / 2) of every head by its row's angle; float32 in and out."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
