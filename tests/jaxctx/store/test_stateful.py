"""Stateful tests: random operations against the oracle, with few names, short histories, small packs and restarts."""

from __future__ import annotations

import pytest

from .stateful.operations import random_steps, run_steps


@pytest.mark.parametrize("seed", range(10))
def test_random_operations_in_memory(seed):
    run_steps("memory://steps", random_steps(seed, 300))


@pytest.mark.parametrize("seed", range(2))
def test_random_operations_in_a_directory(seed, tmp_path):
    run_steps(f"{tmp_path}/store", random_steps(1000 + seed, 200))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2000, 2100))
def test_long_sequences(seed):
    run_steps("memory://steps", random_steps(seed, 5000))
