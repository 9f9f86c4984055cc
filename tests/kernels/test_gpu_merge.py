"""Partial results merged, in JAX's GPU interpreter, against log-sum-exp in float64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if jax.__version_info__ < (0, 12):
    pytest.skip("the GPU interpreter of JAX 0.12 or newer is needed", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxctx_kernels.gpu_merge import MAX_SCORE, MERGED_COLUMNS, WEIGHT_SUM, merge_partials
from jaxctx_kernels.gpu_schedule import SIDE, TileConfig

Generator = np.random.Generator


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Interpret kernels."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


@pytest.mark.parametrize(("parts", "ways"), [(1, 2), (2, 1), (1, 1)])
def test_equals_log_sum_exp(rng: Generator, parts: int, ways: int) -> None:
    """Tiles of no, one and several slots. Partial results of no tile are NaN; a row that saw nothing becomes zeros."""
    slots = np.array([[0, 3], [0, 0], [4, 5]], np.int32)
    config = TileConfig(group=4, rows=16, parts=parts, ways=ways, tiles=len(slots), units=4)
    partials = 6 * parts * ways
    outputs = rng.normal(size=(1, partials, SIDE, MERGED_COLUMNS))
    statistics = np.empty((1, partials, 2, SIDE))
    statistics[:, :, MAX_SCORE] = rng.uniform(-40, 40, (1, partials, SIDE))
    statistics[:, :, WEIGHT_SUM] = rng.uniform(0.5, 9, (1, partials, SIDE))
    unused = [n for n in range(partials) if n // (parts * ways) in (3, 5)]
    outputs[:, unused] = statistics[:, unused] = np.nan
    statistics[:, : 3 * parts * ways, WEIGHT_SUM, 7] = outputs[:, : 3 * parts * ways, 7] = 0
    merged = merge_partials(
        jnp.asarray(outputs, jnp.float32), jnp.asarray(statistics, jnp.float32), jnp.asarray(slots), config
    )
    got = np.asarray(merged, np.float64)
    assert got.shape == (1, config.products, SIDE, MERGED_COLUMNS)
    for tile, (begin, end) in enumerate(slots):
        for part in range(parts):
            number = np.arange(begin * parts * ways, end * parts * ways)
            mine = number if parts == 1 else number[number % parts == part]
            weight = np.exp2(statistics[0, mine, MAX_SCORE])
            total = (weight * statistics[0, mine, WEIGHT_SUM]).sum(0)[:, None]
            want = (weight[:, :, None] * outputs[0, mine]).sum(0) / np.where(total == 0, 1, total)
            np.testing.assert_allclose(got[0, tile * parts + part], want, rtol=1e-4, atol=1e-5)
