"""What multiplies weights of 4 bits: the kernel of a device, if its products are right there; else they become wide.

    select_product ──▶ no kernel ─────────────────────────────────────▶ Int4Device(None, why)
          └──▶ a kernel ──▶ two small products compared with exact ones ──▶ Int4Device(kernel), or None and why

Weights are read after that: what is loaded follows from the answer. It is remembered as that of attention's kernel is:
a kernel that ends the process does so twice at most, and one that never ends once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxctx.engine.runner.check.remembered import CheckMemory, key_of_device
from jaxctx.engine.runner.check.time_limit import NeverEnds, within_limit
from jaxctx.model.sharding import GROUP, KV
from jaxctx.model.weights.int4 import Int4Device
from jaxctx_kernels.int4_weights import CHUNK, ProductKernel, multiply, pack, select_product

FORMS = ((128, True), (32, False))  # inputs of a group, and whether there are zeros: kernels compute these differently
ROWS, OUT = 20, 256
IN = 66 * CHUNK  # so that kernels go through several chunks, and a TPU's through several blocks of them
TOLERANCE = 2**-8  # of the largest output, which rounding weights to bfloat16 stays below


class Trial(NamedTuple):
    """How a kernel is compared on this machine's device: what earlier starts found, and seconds for each product."""

    memory: CheckMemory
    limit_s: float


def choose_int4(place: "jax.Device | Mesh", trial: Trial | None) -> Int4Device:
    """What a device, or those of a mesh, do with weights of 4 bits.

    `trial` None: the device is not this machine's, and cannot compute: a kernel is taken for right. Raises NeverEnds.
    """
    is_mesh = isinstance(place, Mesh)
    device: Any = place.devices.flat[0] if isinstance(place, Mesh) else place
    sizes = (place.shape[KV], place.shape[GROUP]) if is_mesh else (1, 1)
    kernel, why = select_product(device)
    if kernel is not None and trial is not None:
        why = compare(kernel, trial, key_of_device(f"4 bits, {kernel}", device))
    return Int4Device(None if why else kernel, why, *sizes)


def compare(kernel: ProductKernel, trial: Trial, key: str) -> str:
    """What is wrong with the products of a kernel, now or at an earlier start; empty: nothing. Raises NeverEnds."""
    memory = trial.memory
    if memory.passed_before(key) is not None:
        return ""
    if memory.crashes(key):
        return f"their product ended this process, twice; to try it again, delete {memory.file(key)}"
    if memory.case_without_end(key) is not None:
        return f"their product never ends; to try it again, delete {memory.file(key)}"
    memory.begin(key)

    def wrong(tell: Any) -> str:
        for group, has_zeros in FORMS:
            tell(f"a product of groups of {group}")
            why = why_wrong(kernel, group, has_zeros)
            if why:
                return why
        return ""

    try:
        why = within_limit(trial.limit_s, wrong)
    except NeverEnds as error:
        memory.never_ends(key, error.case)
        is_remembered = memory.case_without_end(key) is not None
        what_now = "the next start makes weights wide" if is_remembered else "start with --weights-dtype bfloat16"
        raise NeverEnds(error.case, error.limit_s, what_now, of="weights of 4 bits") from None
    except BaseException:  # no verdict: out of memory, or interrupted
        memory.forget(key)
        raise
    if why:
        memory.forget(key)
    else:
        memory.passed(key, "equal")
    return why


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
