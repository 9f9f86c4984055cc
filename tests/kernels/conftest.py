"""Fixtures of kernel tests: a random generator, and the builders that tests with it use."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
import pytest

from jaxctx_kernels import KVPages

from .builders import BATCHES, Forest, dense_attention, dequantized, visible_slots

Generator = np.random.Generator


@pytest.fixture
def rng() -> Generator:
    """Another seed every time; pytest shows it where a test fails."""
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def grow(rng: Generator) -> Callable[..., Forest]:
    """`grow(kind, rows, page_size, pool_pages)`: a batch of one of the kinds of `kinds`."""

    def grow(kind: str, rows: int, page_size: int, pool_pages: int) -> Forest:
        forest = Forest(rng, rows, page_size, pool_pages)
        BATCHES[kind](forest)
        forest.spread()
        return forest

    return grow


@pytest.fixture
def kinds() -> list[str]:
    return list(BATCHES)


@pytest.fixture
def dense() -> Callable[..., np.ndarray]:
    return dense_attention


@pytest.fixture
def exact() -> Callable[[KVPages], np.ndarray]:
    return dequantized


@pytest.fixture
def visible() -> Callable[..., np.ndarray]:
    return visible_slots
