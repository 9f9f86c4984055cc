"""The kernel for NVIDIA GPUs since Ampere in JAX's GPU interpreter, against dense float64 attention.

The interpreter does not know `mma`: here it is a product of float32, which no test can tell from a tensor core's.
What only hardware shows is not tested: speed, and what the interpreter leaves out (registers, layouts in memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx_kernels import KVPages, Segment, metadata_shape, unpack_metadata

if jax.__version_info__ < (0, 12):
    pytest.skip("the GPU interpreter of JAX 0.12 or newer is needed", allow_module_level=True)

from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import primitives
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxctx_kernels import mosaic_mma

from .builders import dequantized, filled_pages, packed_metadata, zero_pages

Generator = np.random.Generator


def multiply(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    product: jax.Array = acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return product


mlir.register_lowering(primitives.mma_p, mlir.lower_fun(multiply, multiple_results=False), platform="cpu")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret kernels, on a device so small that units cross tiles and tiles have several units."""
    monkeypatch.setattr(mosaic_mma, "UNITS", 4)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def numbers(rng: Generator, scale: float, *shape: int) -> np.ndarray:
    return np.array(jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16), np.float64)


class Case:
    """A batch with its keys, values and queries, all that no row sees poisoned; `run` is one compiled program."""

    def __init__(self, rows: int, page_size: int, dim: int, group: int, kv_heads: int, dtype: str) -> None:
        self.pool_pages = 60
        self.shape = metadata_shape(rows, page_size, self.pool_pages * page_size, self.pool_pages, "mma")
        self.dim, self.group, self.kv_heads, self.dtype = dim, group, kv_heads, dtype
        self.run = jax.jit(self.attend)

    def attend(self, q: jax.Array, k: KVPages, v: KVPages, packed: jax.Array) -> jax.Array:
        return mosaic_mma.attend(q, k, v, unpack_metadata(self.shape, packed), shape=self.shape)

    def check(self, rng: Generator, segments: list[Segment], visible: Callable, dense: Callable) -> None:
        """A token more or less among n changes a row's output by about n**-0.5 of it, bfloat16 weights by 0.002."""
        rows, size = self.shape.rows, self.shape.page_size
        k, v = numbers(rng, rng.choice([1, 4]), 2, self.kv_heads, self.pool_pages, size, self.dim)
        q = numbers(rng, 1, rows, self.kv_heads * self.group, self.dim)
        seen = visible(segments, size, self.pool_pages)
        k[:, ~seen] = v[:, ~seen] = np.nan
        mine = np.concatenate([np.zeros(0, np.int64), *(np.arange(s.rows) + s.first_row for s in segments)])
        q[np.setdiff1d(np.arange(rows), mine)] = np.nan
        pools = filled_pages(k, self.dtype), filled_pages(v, self.dtype)
        got = np.asarray(self.run(jnp.asarray(q, jnp.bfloat16), *pools, packed_metadata(segments, self.shape)))
        want = dense(q, *map(dequantized, pools), segments, size)
        wrong = np.linalg.norm(got - want, axis=-1)
        assert (wrong <= 0.005 * np.linalg.norm(want, axis=-1)).all(), wrong.max()


@pytest.mark.parametrize(
    ("case", "dtype", "batches"),
    [
        ((50, 16, 64, 4, 1), "bfloat16", ["three_levels", "chunks_and_decode", "nothing"]),
        ((50, 16, 80, 3, 1), "float8_e4m3fn", ["chunks_and_decode"]),
        ((24, 64, 96, 1, 2), "int8", ["one_prefix"]),
    ],
)
def test_equals_dense_attention(
    rng: Generator,
    grow: Callable,
    visible: Callable,
    dense: Callable,
    case: tuple[int, ...],
    dtype: str,
    batches: list[str],
) -> None:
    """Numbers of 8 bits are compared as they are kept, with their scales."""
    of_case = Case(*case, dtype=dtype)
    for kind in batches:
        print(kind)
        of_case.check(rng, grow(kind, case[0], case[1], 60).segments, visible, dense)
