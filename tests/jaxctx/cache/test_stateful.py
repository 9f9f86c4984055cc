"""Stateful tests: random operations against the oracle, in tiny pools and tiers, so that running out is normal."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .stateful.harness import Setup
from .stateful.operations import OPERATIONS, TIERS, random_steps, run_seed, run_steps

BYTES = st.integers(0, 255)
STEPS = st.lists(st.tuples(st.sampled_from([*OPERATIONS]), BYTES, BYTES), max_size=40)
OPERATIONS_PLAYED = 200_000  # `stateful.campaign` plays as many as it is told
EACH = 5_000  # operations of one harness


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("pages", [1, 3, 8, 20])
@pytest.mark.parametrize(("host", "disk"), sorted({*TIERS}))
def test_random_operations(host, disk, pages, page_size):
    run_steps(Setup(pages, page_size, host, disk), random_steps(pages + host, 300))


# Sequences that failed once, found by the campaign: (setup, operations).
FOUND = {
    "the fetch of a way's first page drove its second one off the disk, and another way was on the device": (
        Setup(13, 2, 1, 3),
        """
        create,87,231 fork,253,171 fork,229,57 reserve,168,104 compute,107,148 create,44,244 rewind,157,213
        fill,106,172 publish,142,176 suspend,221,140 commit,114,249 fill,148,158 touch,117,98 close,109,46
        grow,235,241 touch,88,182 create,244,209 create,177,171 fill,97,75 fill,125,85 reserve,85,84 fill,35,170
        close,45,178 match,250,75 append,107,185 fill,90,124 create,89,232 fill,246,244 fill,98,218 fill,21,219
        fill,84,135
        """,
    ),
    "a page that came back made another one commit, which was held back": (
        Setup(20, 2, 8, 8),
        """
        create,213,4 create,74,145 create,192,61 fork,150,35 fork,169,48 create,164,162 create,255,242 save,34,113
        save,119,180 revive,184,48 create,164,225 close,165,184 create,0,32 create,182,15 create,2,181 create,63,77
        create,91,81 touch,208,227 publish,248,171 reserve,230,202 create,122,156 close,35,144 fork,57,150
        create,96,79 create,99,140 create,23,79 close,80,218 close,205,180 fork,97,127 fork,174,48 reserve,145,14
        touch,145,28 create,129,240 close,51,134 create,224,14 save,158,27 revive,31,245 create,27,67 create,69,22
        fill,179,145 save,179,49 create,181,168 reserve,113,229 close,138,63 fill,168,166 create,77,59
        suspend,146,52 match,16,6 create,4,174 fill,77,250 touch,101,138 touch,234,198 create,87,104 create,219,33
        close,161,255 touch,179,103 suspend,149,119 create,192,128 create,148,144 fork,186,51 touch,249,18
        create,200,50 revive,208,233 create,130,82 save,121,242 close,91,238 create,41,115 revive,134,166
        suspend,120,226 create,3,94 suspend,237,185 touch,135,21 fork,39,238 create,134,126 close,198,192
        touch,115,25 fill,93,160 fill,42,215 create,229,18 fork,148,53 create,88,162 fork,89,161 create,156,106
        fill,153,2 create,91,28 save,71,74 fork,12,35 create,24,25 rewind,241,195 create,182,103 suspend,93,7
        append,235,221 fill,130,139 close,20,176 scribble,170,185 close,158,222 compute,24,95 close,73,154
        publish,114,59 create,109,186 fork,196,212 create,240,128 fill,129,30 keep,140,19 close,209,193 fill,16,49
        revive,163,159 reserve,30,94 create,120,86 touch,19,26 suspend,24,133 close,145,56 match,93,208 suspend,80,3
        publish,131,73 create,53,137 fill,194,16 fill,239,104 fill,185,83 fill,74,95 create,77,78 fill,110,41
        fill,97,118 fill,145,30 fork,120,201 close,212,130 close,234,7 truncate,125,229 suspend,178,76 fork,127,180
        touch,20,0 reserve,62,189 suspend,78,40 fill,200,199 touch,201,64 rewind,201,213 create,70,171 create,14,94
        close,117,58 revive,37,102 fill,248,231 fill,178,77 clear,159,28 close,127,131 keep,145,4 publish,27,190
        fill,120,191 fill,161,19 restore,187,28
        """,
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_failures_of_the_campaign_stay_fixed(found):
    setup, operations = FOUND[found]
    steps = [operation.split(",") for operation in operations.split()]
    run_steps(setup, [(name, int(a), int(b)) for name, a, b in steps])


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_two_hundred_thousand_operations():
    seeds = range(OPERATIONS_PLAYED // EACH)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        failures = [*filter(None, processes.map(run_seed, seeds, [EACH] * len(seeds), chunksize=4))]
    assert not failures, failures[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS, pages=st.integers(1, 9), page_size=st.sampled_from([1, 2, 16]), tiers=st.sampled_from(sorted({*TIERS}))
)
def test_any_operations(steps, pages, page_size, tiers):
    run_steps(Setup(pages, page_size, *tiers), steps)
