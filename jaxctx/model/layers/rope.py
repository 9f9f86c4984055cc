"""Rotary position embedding: frequencies once per kind of layer, angles in the step from each row's position.

Su et al., RoFormer (2021), in the half-split layout of Hugging Face checkpoints: element i is rotated together with
element i + half, half of the elements that rotate.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxctx.model.config import RopeConfig, RopeScaling

Frequencies = npt.NDArray[np.float32]
RopeCosSin = tuple[Float32[Array, "rows half"], Float32[Array, "rows half"]]
"""Cosines and sines of the rotation of each row, `[rows, half]`: half of the elements of a head that rotate."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Radians per token of each pair of elements of a head that rotate: float32 `[rotated / 2]`.

    Computed in float32 and in this order of operations on purpose: at position 100,000 the last bit of a frequency is
    visible in the logits, and this is what the checkpoint was trained with.
    """
    rotated = head_dim if rope.rotated is None else rope.rotated
    exponents = np.arange(0, rotated, 2).astype(np.float32) / np.float32(rotated)
    wavelengths: Frequencies = np.power(np.float32(rope.theta), exponents)  # in tokens per radian
    frequencies: Frequencies = np.float32(1.0) / wavelengths
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    match scaling.kind:
        case "dynamic":
            return frequencies
        case "linear":
            return np.divide(frequencies, np.float32(scaling.factor), dtype=np.float32)
        case "longrope":
            factors = scaling.long_factors if scaling.takes_long_factors else scaling.short_factors
            return np.float32(1.0) / (np.array(factors, np.float32) * wavelengths)
        case "llama3":
            # Short wavelengths stay, long ones are divided by `factor`, between them a linear blend.
            turns = scaling.original_max_positions * frequencies / np.float32(2 * math.pi)  # in the trained context
            low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            stretched = frequencies / np.float32(scaling.factor)
        case "yarn":
            keep = 1 - _yarn_ramp(scaling, rope.theta, rotated)
            stretched = np.float32(1.0) / (np.float32(scaling.factor) * wavelengths)
    blend: Frequencies = (keep * frequencies + (1 - keep) * stretched).astype(np.float32)
    return blend


def _yarn_ramp(scaling: RopeScaling, theta: float, rotated: int) -> Frequencies:
    """From 0 for a frequency of `beta_fast` turns within the original positions, to 1 for one of `beta_slow`.

    Peng et al., YaRN (2023). The ramp is linear in the number of the frequency.
    """

    def number_of(turns: float) -> float:
        longest = scaling.original_max_positions / (turns * 2 * math.pi)
        return rotated * math.log(longest) / (2 * math.log(theta))

    first, last = number_of(scaling.beta_fast), number_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = 0.001 if first == last else last - first
    ramp = (np.arange(rotated // 2).astype(np.float32) - np.float32(first)) / np.float32(width)
    clipped: Frequencies = np.clip(ramp, 0.0, 1.0)
    return clipped


def cos_sin(rope: RopeConfig, head_dim: int, positions: Int32[Array, " rows"]) -> RopeCosSin:
    """Cosines and sines of the rows' angles, shared by all heads and layers of a step."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rope.attention_factor == 1.0 else (cos * rope.attention_factor, sin * rope.attention_factor)


def rotate(
    x: Float[Array, "rows heads head_dim"], cos: Float32[Array, "rows half"], sin: Float32[Array, "rows half"]
) -> Float32[Array, "rows heads head_dim"]:
    """Rotate each pair (i, i + half) of every head by its row's angle; float32 in and out.

    What is behind the 2 * half first elements of a head stays as it is.
    """
    half = cos.shape[-1]
    x = x.astype(jnp.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    parts = [first * cos - second * sin, second * cos + first * sin, rest]
    rotated: jax.Array = lax.platform_dependent(*parts, cpu=side_by_side_on_cpu, default=side_by_side)
    return rotated


def side_by_side(*parts: Float32[Array, "rows heads part"]) -> Float32[Array, "rows heads head_dim"]:
    """The parts of every head together; those without elements are left out."""
    return jnp.concatenate([part for part in parts if part.shape[-1]], axis=-1)


def side_by_side_on_cpu(*parts: Float32[Array, "rows heads part"]) -> Float32[Array, "rows heads head_dim"]:
    """The same as a sum of parts among zeros.

    XLA:CPU computes that in one loop, in half the time. For `side_by_side` it stores each part first, and compiles a
    loop that puts them together anew for each layer.
    """
    width, start = sum(part.shape[-1] for part in parts), 0
    placed = jnp.float32(0)
    for part in parts:
        end = start + part.shape[-1]
        placed += jnp.pad(part, ((0, 0), (0, 0), (start, width - end)))
        start = end
    return placed
