"""What of a kept context a prompt can use."""

from __future__ import annotations

import pytest

from jaxctx_server.http.contextcache.report import CREATED, appended, compared, unusable


@pytest.mark.parametrize(
    ("stored", "prompt", "header"),
    [
        ([1, 2, 3], [1, 2, 3, 4], "hit; stored=3; reused=3; missed=0"),
        ([1, 2, 3], [1, 2], "hit; stored=3; reused=2; missed=0"),
        ([1, 2, 3], [1, 2, 3], "hit; stored=3; reused=3; missed=0"),
        ([1, 2, 3], [1, 9, 3, 4], "partial; reason=prompt_changed; stored=3; reused=1; missed=2; first-difference=1"),
        ([1, 2, 3], [1, 9], "partial; reason=prompt_changed; stored=3; reused=1; missed=1; first-difference=1"),
        ([1, 2, 3], [9], "miss; reason=prompt_changed; stored=3; reused=0; missed=1; first-difference=0"),
    ],
)
def test_a_prompt_is_compared(stored: list[int], prompt: list[int], header: str) -> None:
    assert compared(stored, prompt).header() == header


def test_others() -> None:
    assert CREATED.header() == "created"
    assert appended(5).header() == "hit; stored=5; reused=5; missed=0"
    assert unusable("salt_changed", 5, 3).header() == "miss; reason=salt_changed; stored=5; reused=0; missed=3"


def test_pages_that_were_lost() -> None:
    lost = appended(5).with_recomputed(4, "evicted")
    assert (lost.status, lost.reason, lost.recomputed_tokens) == ("partial", "evicted", 4)
    assert compared([1, 2], [1, 3]).with_recomputed(1, "evicted").reason == "prompt_changed"
    assert appended(5).with_recomputed(0, "evicted") == appended(5)
