"""What multiplies weights of 4 bits: the kernel of a device, if its products are right there; else they become wide.

    select_product ──▶ no kernel ─────────────────────────────────────▶ Int4Device(None, why)
          └──▶ a kernel ──▶ two small products compared with exact ones ──▶ Int4Device(kernel), or None and why

Weights are read after that: what is loaded follows from the answer.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxctx.model.sharding import GROUP, KV
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_kernels.int4_weights import CHUNK, ProductKernel, multiply, pack, select_product

FORMS = ((128, True), (32, False))  # inputs of a group, and whether there are zeros: kernels compute these differently
ROWS, OUT = 20, 256
IN = 66 * CHUNK  # so that kernels go through several chunks, and a TPU's through several blocks of them
TOLERANCE = 2**-8  # of the largest output, which rounding weights to bfloat16 stays below


def choose_int4(place: "jax.Device | Mesh", *, is_there: bool) -> Int4Device:
    """What a device, or those of a mesh, do with weights of 4 bits.

    `is_there`: it is this machine's, and can compute; else a kernel is taken for right.
    """
    is_mesh = isinstance(place, Mesh)
    device: Any = place.devices.flat[0] if isinstance(place, Mesh) else place
    sizes = (place.shape[KV], place.shape[GROUP]) if is_mesh else (1, 1)
    kernel, why = select_product(device)
    if kernel is not None and is_there:
        why = next(filter(None, (why_wrong(kernel, *form) for form in FORMS)), "")
    return Int4Device(None if why else kernel, why, *sizes)


def why_wrong(kernel: ProductKernel, group: int, has_zeros: bool) -> str:
    """What is wrong with a small product on this process's first device; empty: nothing."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (OUT, IN), dtype=np.uint8)
    scale = random.uniform(0.5, 1, (IN // group, OUT)).astype(np.float32)
    zero = random.integers(0, 16, scale.shape).astype(np.float32) if has_zeros else np.full_like(scale, 8)
    scales = np.stack([scale, zero] if has_zeros else [scale])
    x = np.asarray(jnp.asarray(random.normal(size=(ROWS, IN)), jnp.bfloat16).astype(jnp.float32))
    wide = (codes.T.reshape(-1, group, OUT) - zero[:, None]) * scale[:, None]
    exact = x.astype(np.float64) @ wide.reshape(IN, OUT)
    try:
        operands = jax.device_put((x, pack(codes), scales), jax.local_devices()[0])
        found = np.asarray(jax.jit(partial(multiply, kernel=kernel))(*operands))
    except Exception as error:  # compilers raise what they like
        return f"their product does not run here: {type(error).__name__}: {' '.join(str(error).split()):.200}"
    off = np.abs(found - exact).max() / np.abs(exact).max()
    return "" if off <= TOLERANCE else f"their product is wrong here, by {off:.2g} of the largest number"  # NaN too
