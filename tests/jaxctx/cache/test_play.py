"""Random play against the oracle: tiny pools, so that running out is normal."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .world import OPERATIONS, World, constant_digest, random_steps

BYTES = st.integers(0, 255)
STEPS = st.lists(st.tuples(st.sampled_from([*OPERATIONS]), BYTES, BYTES), max_size=40)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("pages", [1, 3, 8, 20])
def test_random_play(page_size, pages):
    World(pages, page_size).run(random_steps(pages, 500))


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_random_play_under_hash_collisions(page_size):
    World(12, page_size, constant_digest).run(random_steps(page_size, 500))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1000))
def test_long_random_play(seed):
    page_size, pages = (1, 2, 3, 16)[seed % 4], (1, 2, 5, 8, 13, 30)[seed % 6]
    digest = {"digest": constant_digest} if seed % 5 == 0 else {}
    World(pages, page_size, **digest).run(random_steps(seed, 5000))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, pages=st.integers(1, 9), page_size=st.sampled_from([1, 2, 16]))
def test_any_play(steps, pages, page_size):
    World(pages, page_size).run(steps)
