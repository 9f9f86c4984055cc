"""Pages that come back from host memory for admitted requests, and where a request begins to compute."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.engine.core.forward_pass import CustomMaskForward
from jaxctx.engine.core.request import Request
from jaxctx.engine.scheduler.active_requests import ActiveRequests
from jaxctx.engine.scheduler.restore import MAX_PAGES_WHEN_IDLE, PageRestoration
from jaxctx.engine.scheduler.scheduler_output import RequestFinished
from jaxctx.errors import DataLoss
from jaxctx.types import ContextState, ForwardOutputParams

PAGE_SIZE = 4
MOVING_PAGES = 2


class RestorationHarness:
    """A PageRestoration over a cache with host memory, and requests whose pages are there."""

    def __init__(self, scheduler_harness: Any) -> None:
        self.harness = scheduler_harness
        self.cache = scheduler_harness.cache
        self.blocks = self.cache.block_manager
        self.active = ActiveRequests(self.cache, self.blocks, slots=4, model_id="model")
        self.restoration = PageRestoration(self.active, self.cache, self.blocks, scheduler_harness.config)

    def request_in_host_memory(self, tokens: list[int], **fields: Any) -> Request:
        """A fill that starts: the pages of its tokens are in host memory, and pages for all of them are promised."""
        request = self.harness.fill(tokens, **fields)
        self.cache.grow(request.context, len(tokens))
        self.cache.mark_computed(request.context, len(tokens))
        self.cache.suspend(request.context)
        self.blocks.evict(self.blocks.index.cached)
        return self.start(request)

    def start(self, request: Request) -> Request:
        """Admit a request as `Admission` does."""
        self.active.add(request)
        self.cache.match(request.context, request.lookup_end)
        request.reserved_pages = self.blocks.pages_for(request.worst_case_tokens)
        request.pending_tokens = request.prefill_end - request.context.seq_len
        self.active.start(request)
        return request

    def restore(self, *, idle: bool = True, ready: Any = lambda slot: True) -> None:
        self.restoration.restore(idle, ready)


@pytest.fixture
def harness(make_scheduler) -> RestorationHarness:
    return RestorationHarness(
        make_scheduler(pages=64, host_pages=32, max_context_tokens=128, moving_pages=MOVING_PAGES)
    )


def test_an_idle_device_takes_all_pages_back_at_once(harness) -> None:
    request = harness.request_in_host_memory(list(range(18)))
    harness.restore()
    assert request.context.seq_len == 18
    assert harness.restoration.progressed
    assert not request.restoring


def test_an_idle_device_takes_up_to_sixteen_pages_at_once(harness) -> None:
    request = harness.request_in_host_memory([number % 50 for number in range(4 * (MAX_PAGES_WHEN_IDLE + 3))])
    harness.restore()
    assert request.context.seq_len == PAGE_SIZE * MAX_PAGES_WHEN_IDLE
    assert request.restoring  # there may be more
    harness.restore()
    assert request.context.seq_len == 4 * (MAX_PAGES_WHEN_IDLE + 3)
    assert not request.restoring


def test_beside_a_step_only_some_pages_come_back(harness) -> None:
    request = harness.request_in_host_memory(list(range(20)))
    harness.restore(idle=False)
    assert (request.context.seq_len, harness.restoration.progressed) == (0, False)
    harness.restoration.step_made()
    harness.restore(idle=False)
    assert (request.context.seq_len, harness.restoration.progressed) == (PAGE_SIZE * MOVING_PAGES, True)
    harness.restore(idle=False)  # beside the same step
    assert request.context.seq_len == PAGE_SIZE * MOVING_PAGES
    harness.restoration.step_made()
    harness.restore(idle=False)
    assert request.context.seq_len == 2 * PAGE_SIZE * MOVING_PAGES
    assert request.restoring


def test_pages_of_a_step_are_shared_in_the_order_of_the_requests(harness) -> None:
    first = harness.request_in_host_memory(list(range(4)))
    second = harness.request_in_host_memory(list(range(50, 62)))
    harness.restoration.step_made()
    harness.restore(idle=False)
    assert (first.context.seq_len, second.context.seq_len) == (4, 4)
    assert not first.restoring
    assert second.restoring


def test_no_request_overtakes_one_whose_pages_are_on_their_way(harness) -> None:
    waits = harness.request_in_host_memory(list(range(8)))
    slots = {entry.host for entry in harness.restoration.next_page(waits)}
    behind = harness.request_in_host_memory(list(range(50, 58)))
    harness.restore(ready=lambda slot: slot not in slots)
    assert (waits.context.seq_len, behind.context.seq_len) == (0, 0)
    assert waits.restoring
    assert not harness.restoration.progressed
    harness.restore()
    assert (waits.context.seq_len, behind.context.seq_len) == (8, 8)


def test_a_lost_page_is_computed_again(harness) -> None:
    def lost(slot: int) -> bool:
        raise DataLoss("the file is gone")

    request = harness.request_in_host_memory(list(range(8)))
    harness.restore(ready=lost)
    assert not request.restoring
    assert request.context.seq_len == 0
    assert (request.next_position, request.dispatch_end, request.computed_tokens) == (0, 8, 8)


def test_restored_pages_are_taken_from_the_promised_ones(harness) -> None:
    request = harness.request_in_host_memory(list(range(20)))
    assert request.reserved_pages == 5
    harness.restoration.step_made()
    harness.restore(idle=False)
    assert request.reserved_pages == 3


def test_a_request_without_promised_pages_begins_to_compute(harness) -> None:
    """What came to other tiers after its admission has no pages promised."""
    request = harness.request_in_host_memory(list(range(8)))
    request.reserved_pages = 0
    harness.restore()
    assert request.context.seq_len == 0
    assert not request.restoring


def test_restored_tokens_are_counted_once(harness) -> None:
    """The last token comes back too, but is computed once more for its logits: it counts as computed."""
    request = harness.request_in_host_memory(list(range(8)))
    harness.restore()
    assert (request.restored_tokens, request.computed_tokens, request.resident_tokens) == (7, 1, 0)
    assert (harness.restoration.tokens_restored, harness.restoration.tokens_cached) == (7, 0)


def test_what_comes_back_after_a_preemption_is_not_counted_again(harness) -> None:
    request = harness.request_in_host_memory(list(range(8)))
    request.computed_tokens = 8
    harness.restore()
    assert request.context.seq_len == 8
    assert (request.restored_tokens, harness.restoration.tokens_restored) == (0, 0)
    assert request.computed_tokens == 8


def test_a_prompt_that_nothing_holds_is_computed_from_its_first_token(harness) -> None:
    request = harness.start(harness.harness.fill(list(range(6))))
    harness.restore()
    assert not request.restoring
    assert not harness.restoration.progressed
    assert (request.next_position, request.prompt_end, request.dispatch_end) == (0, 6, 6)
    assert (request.computed_tokens, request.restored_tokens, harness.restoration.tokens_cached) == (6, 0, 0)


def test_tokens_found_on_the_device_are_counted_as_cached(harness) -> None:
    harness.harness.context(list(range(8)), computed=True)
    request = harness.harness.fill([*range(8), 90, 91])
    harness.active.add(request)
    request.pending_tokens = request.prefill_end
    harness.cache.match(request.context, request.lookup_end)
    harness.active.start(request)
    harness.restore()
    assert (request.next_position, request.dispatch_end, request.computed_tokens) == (8, 10, 2)
    assert (request.resident_tokens, harness.restoration.tokens_cached) == (8, 8)


def test_pages_for_the_rest_of_the_output_stay_promised(harness) -> None:
    """Six tokens of the prompt and nine samples, of which the last one needs no KV: four pages."""
    request = harness.start(harness.harness.generation(list(range(6)), 9))
    request.reserved_pages = 0
    harness.restoration.begin(request)
    assert request.reserved_pages == 4
    assert request.samples_left == 9


def test_an_opening_that_has_all_its_pages_is_finished(harness) -> None:
    request = harness.request_in_host_memory(list(range(8)), compute_to=8)
    harness.restore()
    (finished,) = harness.active.take_events()
    assert isinstance(finished, RequestFinished)
    assert (finished.request, finished.context.state) == (request, ContextState.IDLE)
    assert request.ended
    assert harness.restoration.progressed
    assert (request.restored_tokens, request.computed_tokens) == (8, 0)


def test_an_opening_computes_no_further_than_its_tokens_with_kv(harness) -> None:
    request = harness.start(harness.harness.fill(list(range(10)), compute_to=6))
    harness.restore()
    assert (request.next_position, request.dispatch_end) == (0, 6)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_only_sampling_that_needs_earlier_tokens_loads_the_slot(harness, penalty: float) -> None:
    request = harness.start(harness.harness.generation([1, 2], 4, presence_penalty=penalty))
    harness.restore()
    assert list(harness.active.take_slots_to_load()) == ([request] if penalty else [])


def test_rows_with_outputs_or_overrides_go_into_custom_mask_forwards(harness) -> None:
    forward = CustomMaskForward(start=2, outputs={3: ForwardOutputParams(index=1, top=1)})
    request = harness.harness.fill([1, 2], forward=forward)
    harness.cache.append(request.context, [3, 4, 5], [b"", b"", b"mark"])
    harness.start(request)
    harness.restore()
    assert request.custom_mask_rows == {3, 4}


def test_tokens_of_a_forward_call_are_always_computed(harness) -> None:
    """Of two pages in host memory, the second is of tokens that the call asks about."""
    forward = CustomMaskForward(start=4, outputs={5: ForwardOutputParams(index=1, top=1)})
    request = harness.request_in_host_memory(list(range(8)), forward=forward)
    harness.restore()
    assert (request.context.seq_len, request.next_position, request.dispatch_end) == (4, 4, 8)
