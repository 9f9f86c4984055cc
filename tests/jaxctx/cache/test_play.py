"""Random play against the oracle: tiny pools and tiers, so that running out is normal."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .plays import OPERATIONS, TIERS, constant_digest, play, play_seed, random_steps
from .world import Setup

BYTES = st.integers(0, 255)
STEPS = st.lists(st.tuples(st.sampled_from([*OPERATIONS]), BYTES, BYTES), max_size=40)
OPERATIONS_PLAYED = 2_000_000
EACH = 5_000  # operations of one world


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("pages", [1, 3, 8, 20])
@pytest.mark.parametrize(("host", "disk"), sorted({*TIERS}))
def test_random_play(host, disk, pages, page_size):
    play(Setup(pages, page_size, host, disk), random_steps(pages + host, 300))


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize(("host", "disk"), [(0, 0), (4, 6)])
def test_random_play_under_hash_collisions(host, disk, page_size):
    play(Setup(12, page_size, host, disk, constant_digest), random_steps(page_size, 400))


# Plays that once went wrong, found by the campaign: (world, operations).
FOUND = {
    "the fetch of a way's first page drove its second one off the disk, and another way was on the device": (
        Setup(13, 2, 1, 3, constant_digest),
        """
        create,87,231 fork,253,171 fork,229,57 reserve,168,104 compute,107,148 create,44,244 rewind,157,213
        fill,106,172 publish,142,176 suspend,221,140 commit,114,249 fill,148,158 touch,117,98 close,109,46
        grow,235,241 touch,88,182 create,244,209 create,177,171 fill,97,75 fill,125,85 reserve,85,84 fill,35,170
        close,45,178 match,250,75 append,107,185 fill,90,124 create,89,232 fill,246,244 fill,98,218 fill,21,219
        fill,84,135
        """,
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_the_campaign_found_is_mended(found):
    setup, operations = FOUND[found]
    steps = [operation.split(",") for operation in operations.split()]
    play(setup, [(name, int(a), int(b)) for name, a, b in steps])


@pytest.mark.timeout(1200)
def test_two_million_operations():
    seeds = range(OPERATIONS_PLAYED // EACH)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        failures = [*filter(None, processes.map(play_seed, seeds, [EACH] * len(seeds), chunksize=4))]
    assert not failures, failures[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS, pages=st.integers(1, 9), page_size=st.sampled_from([1, 2, 16]), tiers=st.sampled_from(sorted({*TIERS}))
)
def test_any_play(steps, pages, page_size, tiers):
    play(Setup(pages, page_size, *tiers), steps)
