"""The progress of one request: which rows come next, and what it says of itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import ContextCache, Identity
from jaxctx.engine.core.request import NO_SLOT, Request
from jaxctx.engine.interface import Caller


class Reply:
    behind = False

    def backpressured(self) -> bool:
        return self.behind


@pytest.fixture
def request_of_ten() -> Request:
    """A fill of ten tokens, admitted with nothing computed."""
    cache = ContextCache(BlockManager(8, 4), lambda: 0.0, lambda: "c")
    context = cache.create(Identity("", "model"))
    cache.append(context, list(range(10)))
    reply: Any = Reply()
    request = Request(context, Caller("tenant"), reply)
    request.slot, request.dispatch_end, request.prompt_end = 0, 10, 10
    return request


def test_rows_are_standard_without_overrides(request_of_ten: Request) -> None:
    assert request_of_ten.next_standard_rows(4) == 4
    assert request_of_ten.next_standard_rows(99) == 10
    assert request_of_ten.next_custom_mask_rows(99) == 0


def test_standard_rows_and_custom_mask_rows_take_turns(request_of_ten: Request) -> None:
    request_of_ten.custom_mask_rows = {3, 4, 7}
    rows = []
    while request_of_ten.rows_ready:
        standard, custom = request_of_ten.next_standard_rows(99), request_of_ten.next_custom_mask_rows(99)
        assert bool(standard) != bool(custom)
        rows.append((standard, custom))
        request_of_ten.next_position += standard + custom
    assert rows == [(3, 0), (0, 2), (2, 0), (0, 1), (2, 0)]


def test_rows_behind_the_next_one_that_are_standard(request_of_ten: Request) -> None:
    """Drafts may stand there."""
    assert request_of_ten.standard_rows_behind(5) == 5
    request_of_ten.custom_mask_rows = {3, 4}
    assert [request_of_ten.standard_rows_behind(limit) for limit in (0, 2, 3, 9)] == [0, 2, 2, 2]
    request_of_ten.next_position = 2
    assert request_of_ten.standard_rows_behind(9) == 0
    request_of_ten.next_position = 4
    assert request_of_ten.standard_rows_behind(9) == 9


def test_with_a_format_no_row_goes_ahead_of_the_token_that_the_host_knows(request_of_ten: Request) -> None:
    output: Any = SimpleNamespace(matcher=object(), next_mask=object(), awaits_mask=False)
    request_of_ten.output = output
    request_of_ten.next_position, request_of_ten.dispatch_end = 10, 11  # the token behind them is on the device
    assert request_of_ten.next_standard_rows(99) == 0
    request_of_ten.custom_mask_rows = {10}
    assert request_of_ten.next_custom_mask_rows(99) == 0
    output.matcher = None
    assert request_of_ten.next_custom_mask_rows(99) == 1
    request_of_ten.custom_mask_rows = frozenset()
    assert request_of_ten.next_standard_rows(99) == 1


def test_it_must_wait_for_its_mask_or_its_reader(request_of_ten: Request) -> None:
    assert not request_of_ten.must_wait
    output: Any = SimpleNamespace(awaits_mask=True)
    request_of_ten.output = output
    assert request_of_ten.must_wait
    output.awaits_mask = False
    assert not request_of_ten.must_wait
    request_of_ten.reply.behind = True  # type: ignore[attr-defined]
    assert request_of_ten.must_wait


def test_it_owns_its_prefix_while_it_computes_its_prompt(request_of_ten: Request) -> None:
    follower = Request(request_of_ten.context, Caller(), request_of_ten.reply, prefix_owner=request_of_ten)
    assert request_of_ten.is_computing_prompt
    assert follower.is_passed_over
    request_of_ten.slot = -1
    assert not request_of_ten.is_computing_prompt
    assert not follower.is_passed_over
    request_of_ten.reply.behind = True  # type: ignore[attr-defined]
    assert follower.is_passed_over


def test_never_ran_until_it_was_admitted_or_ended(request_of_ten: Request) -> None:
    request_of_ten.slot = NO_SLOT
    assert request_of_ten.never_ran
    request_of_ten.slot = 0  # it restores pages, before it is known what is left to compute
    assert not request_of_ten.never_ran
    request_of_ten.slot, request_of_ten.run_number = NO_SLOT, 1  # and was preempted
    assert not request_of_ten.never_ran
    request_of_ten.run_number, request_of_ten.ended = 0, True
    assert not request_of_ten.never_ran


def test_pending_tokens_are_resident_restored_or_computed(request_of_ten: Request) -> None:
    assert request_of_ten.resident_tokens == 0  # not known before it is admitted
    request_of_ten.pending_tokens, request_of_ten.restored_tokens, request_of_ten.computed_tokens = 10, 4, 2
    assert request_of_ten.resident_tokens == 4
