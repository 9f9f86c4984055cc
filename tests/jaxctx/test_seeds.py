from __future__ import annotations

import pytest

from jaxctx.seeds import derive_seed


def test_the_first_draw_has_the_seed_that_was_asked_for() -> None:
    assert [derive_seed(seed, 0) for seed in (0, 42, 2**63 - 1)] == [0, 42, 2**63 - 1]


def test_neighbouring_seeds_share_no_draw() -> None:
    drawn = [derive_seed(seed, index) for seed in range(40, 60) for index in range(100)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= each < 2**63 for each in drawn)


@pytest.mark.parametrize(
    ("seed", "index", "derived"),
    [(42, 1, 7851131482829185516), (0, 1, 7359998640416684799), (2**63 - 1, 1023, 819992086111660767)],
)
def test_derived_seeds_never_change(seed: int, index: int, derived: int) -> None:
    """Who draws outputs again by a seed of before gets the same ones."""
    assert derive_seed(seed, index) == derived
