"""Random play against the oracle (see conftest.py), and proof that it would notice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("pages", [1, 3, 8, 20])
def test_random_play(play, page_size, pages):
    for seed in range(2):
        play.world(pages, page_size).run(play.random_steps(1000 * pages + seed, 600))
