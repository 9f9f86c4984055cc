"""Answers of forward passes: what is told of a row, by its logits."""

import math

import numpy as np
import pytest

from jaxctx.engine.core.forward_pass import forward_result
from jaxctx.types import ForwardOutputParams


def test_answers_equal_the_softmax_of_the_logits() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=5000).astype(np.float32) * 8
    want = [float(x) for x in logits]
    total = math.fsum(math.exp(x - max(want)) for x in want)
    logprobs = [x - max(want) - math.log(total) for x in want]
    asked = ForwardOutputParams(index=3, logprob_ids=[7, 0, 4999, 7], top=64, logits=True, entropy=True)
    got = forward_result(asked, logits, 5, 99)
    assert (got.index, got.token_id, got.seed) == (3, 5, 99)
    assert got.logprobs == pytest.approx([logprobs[i] for i in (7, 0, 4999, 7)], abs=1e-12)
    best = sorted(range(5000), key=lambda i: -want[i])[:64]
    assert [i for i, _ in got.top] == best
    assert [p for _, p in got.top] == pytest.approx([logprobs[i] for i in best], abs=1e-12)
    assert got.entropy == pytest.approx(-math.fsum(math.exp(p) * p for p in logprobs), abs=1e-12)
    assert got.logits == logits.astype("<f4").tobytes()


def test_answers_hold_what_was_asked_for_and_no_more() -> None:
    nothing = forward_result(ForwardOutputParams(index=1), None)
    assert (nothing.logprobs, nothing.top, nothing.logits, nothing.entropy) == ((), (), b"", None)
    only = forward_result(ForwardOutputParams(index=1, entropy=True), np.zeros(8, np.float32))
    assert (list(only.logprobs), list(only.top), only.logits) == ([], [], b"")
    assert only.entropy == pytest.approx(math.log(8))


def test_ties_go_to_the_lower_id_and_the_top_ends_with_the_vocabulary() -> None:
    logits = np.array([1, 2, 2, 0, 2, 1, 2, -3], np.float32)
    assert [i for i, _ in forward_result(ForwardOutputParams(index=0, top=3), logits).top] == [1, 2, 4]
    assert [i for i, _ in forward_result(ForwardOutputParams(index=0, top=64), logits).top] == [1, 2, 4, 6, 0, 5, 3, 7]


@pytest.mark.filterwarnings("error")
def test_answers_about_logits_that_are_no_numbers() -> None:
    """What is no number counts as impossible, and raw logits are told as they are."""
    inf = math.inf
    logits = np.array([0, math.nan, -inf, 0], np.float32)
    asked = ForwardOutputParams(index=0, logprob_ids=[0, 1, 2], top=4, entropy=True, logits=True)
    got = forward_result(asked, logits)
    assert got.logprobs == pytest.approx([-math.log(2), -inf, -inf])
    assert [i for i, _ in got.top] == [0, 3, 1, 2]
    assert got.entropy == pytest.approx(math.log(2))
    assert np.isnan(np.frombuffer(got.logits, "<f4")[1])
    certain = forward_result(asked, np.array([-1e30, 3, inf, 1e30], np.float32))
    assert list(certain.logprobs)[2] == pytest.approx(0)
    assert certain.entropy == 0
    void = forward_result(asked, np.full(4, math.nan, np.float32))
    assert list(void.logprobs) == [-inf] * 3
    assert void.entropy == 0
