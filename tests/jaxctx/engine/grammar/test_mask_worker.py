"""The worker of masks: results in order, each output's error its own, tenants apart."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from jaxctx.engine.grammar.mask_worker import MaskWorker, MatcherStep, NextMask
from jaxctx.engine.grammar.matcher import OutputMatcher
from jaxctx.errors import Internal, ResourceExhausted


class Scripted:
    """A matcher that notes its tokens, and fails when it is told to."""

    def __init__(self, error: BaseException | None = None, gate: threading.Event | None = None) -> None:
        self.tokens: list[int] = []
        self.error = error
        self.gate = gate

    def take(self, token: int) -> None:
        self.tokens.append(token)
        if self.gate is not None:
            self.gate.wait(5)

    def mask(self) -> np.ndarray:
        if self.error is not None:
            raise self.error
        return np.array(self.tokens, np.int32)


def step(matcher: Scripted, token: int) -> MatcherStep:
    return MatcherStep(cast(OutputMatcher, matcher), token)


@pytest.fixture
def worker() -> Iterator[MaskWorker]:
    made = MaskWorker()
    yield made
    made.close()


def test_masks_come_in_order_and_each_failure_is_its_own(worker: MaskWorker) -> None:
    done: queue.Queue[Sequence[NextMask]] = queue.Queue()
    limit = ResourceExhausted("too much", reason="GRAMMAR_LIMIT")
    matchers = [Scripted(), Scripted(limit), Scripted(BaseException("a panic")), Scripted()]
    worker.submit("", [step(matcher, token) for token, matcher in enumerate(matchers)], done.put)
    first, second, third, fourth = done.get(timeout=5)
    assert isinstance(first, np.ndarray)
    assert isinstance(fourth, np.ndarray)
    assert (first.tolist(), fourth.tolist()) == ([0], [3])
    assert second is limit
    assert isinstance(third, Internal)


def test_a_tenant_whose_masks_take_long_holds_up_no_other(worker: MaskWorker) -> None:
    done: queue.Queue[str] = queue.Queue()
    gate = threading.Event()
    for _ in range(10):
        worker.submit("slow", [step(Scripted(gate=gate), 1)], lambda _: done.put("slow"))
    worker.submit("quick", [step(Scripted(), 1)], lambda _: done.put("quick"))
    assert done.get(timeout=5) == "quick"
    gate.set()
    assert [done.get(timeout=5) for _ in range(10)] == ["slow"] * 10
