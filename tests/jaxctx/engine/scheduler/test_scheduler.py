"""What the scheduler decides, read from `SchedulerOutput`: rows, samples, slots and events, without a device."""

import math

import pytest

from jaxctx.engine.core.forward_pass import CustomMaskForward
from jaxctx.engine.scheduler.deadlines import MIN_WAIT_S
from jaxctx.engine.scheduler.drafts import Drafts, Proposal
from jaxctx.engine.scheduler.scheduler_output import RequestFailed, RequestFinished
from jaxctx.errors import ResourceExhausted
from jaxctx.types import ContextState, ForwardOutputParams


def rows_of(batch):
    return [(each.request, each.first_row, each.rows, each.position) for each in batch.scheduled]


def test_nothing_to_do_is_no_batch_and_no_event(harness) -> None:
    decided = harness.schedule()
    assert decided.batch is None
    assert (*decided.events, *decided.slots_to_load) == ()
    assert harness.scheduler.num_in_flight == 0


def test_a_prompt_is_computed_in_chunks_of_what_a_step_holds(harness) -> None:
    fill = harness.fill(list(range(20)))
    assert harness.scheduler.submit(fill) == ()
    assert rows_of(harness.step()) == [(fill, 0, 16, 0)]
    last = harness.step()
    assert rows_of(last) == [(fill, 0, 4, 16)]
    assert not last.scheduled[0].output_positions  # a fill samples nothing
    assert fill.context.seq_len == fill.prompt_end == 20


def test_decoding_rows_come_before_prompt_chunks(harness) -> None:
    decoding, fill = harness.generation([1, 2], 8), harness.fill(list(range(100, 130)))
    harness.scheduler.submit(decoding)
    harness.step()
    harness.scheduler.submit(fill)
    batch = harness.schedule().batch
    assert rows_of(batch) == [(decoding, 0, 1, 2), (fill, 1, 15, 0)]
    assert list(batch.scheduled[0].output_positions) == [2]


def test_samples_are_numbered_through_the_step(harness) -> None:
    requests = [harness.generation([k, k, k], 4) for k in range(3)]
    for request in requests:
        harness.scheduler.submit(request)
    batch = harness.schedule().batch
    assert [each.sample_offset for each in batch.scheduled] == [0, 1, 2]
    assert [list(each.output_positions) for each in batch.scheduled] == [[2], [2], [2]]


def test_steps_are_made_ahead_of_results_up_to_the_last_sample(harness) -> None:
    request = harness.generation([1, 2, 3], 2)
    harness.scheduler.submit(request)
    assert harness.schedule().batch is not None
    assert harness.schedule().batch is not None  # its token is still on the device
    assert harness.schedule().batch is None  # both samples were sent
    assert harness.scheduler.num_in_flight == 2


def test_results_of_a_request_that_ended_are_not_wanted(harness) -> None:
    ended, stays = harness.fill([1, 2, 3]), harness.fill([4, 5, 6])
    for request in (ended, stays):
        harness.scheduler.submit(request)
    batch = harness.schedule().batch
    harness.scheduler.end(ended)
    assert [each.request for each in harness.scheduler.process_output(batch)] == [stays]
    assert ended.context.seq_len == 0
    assert harness.scheduler.writer_of(ended.context) is None


def test_only_requests_with_history_load_their_slot(harness) -> None:
    plain, penalised = harness.generation([1, 2], 4), harness.generation([3, 4], 4, frequency_penalty=0.5)
    for request in (plain, penalised):
        harness.scheduler.submit(request)
    assert harness.schedule().slots_to_load == [penalised]
    assert harness.schedule().slots_to_load == ()


def test_custom_mask_rows_have_steps_of_their_own(harness) -> None:
    request = harness.fill([1, 2, 3, 4, 5, 6])
    request.forward = CustomMaskForward(0, {index: ForwardOutputParams(index=index, top=1) for index in (3, 4, 5)})
    harness.scheduler.submit(request)
    standard, first, second = harness.step(), harness.step(), harness.step()
    assert rows_of(standard) == [(request, 0, 3, 0)]
    assert (standard.outputs, standard.wants_logits) == (0, False)
    assert rows_of(first) == [(request, 0, 2, 3)]  # one compiled forward has two outputs here
    assert (first.outputs, first.wants_logits, first.scheduled[0].output_positions) == (2, True, [3, 4])
    assert rows_of(second) == [(request, 0, 1, 5)]


def test_a_reader_that_is_behind_pauses_its_request_only(harness) -> None:
    slow, fast = harness.generation([1, 2], 8), harness.generation([3, 4], 8)
    for request in (slow, fast):
        harness.scheduler.submit(request)
    harness.step()
    slow.reply.behind = True
    assert [each.request for each in harness.step().scheduled] == [fast]
    slow.reply.behind = False
    assert [each.request for each in harness.step().scheduled] == [slow, fast]


def test_a_reader_that_catches_up_while_a_step_is_made_waits_for_the_next_one(harness, monkeypatch) -> None:
    """Guesses took the rows that were left."""
    slow, fast = harness.generation([1, 2], 8), harness.generation([3, 4], 8)
    for request in (slow, fast):
        harness.scheduler.submit(request)
    harness.step()
    slow.reply.behind = True
    propose = harness.scheduler._propose_drafts

    def catch_up(running):
        found = propose(running)
        slow.reply.behind = False
        return found

    monkeypatch.setattr(harness.scheduler, "_propose_drafts", catch_up)
    assert [each.request for each in harness.step().scheduled] == [fast]
    assert [each.request for each in harness.step().scheduled] == [slow, fast]


def custom(harness, tokens):
    """A fill all of whose rows have outputs."""
    request = harness.fill(tokens)
    asked = {index: ForwardOutputParams(index=index, top=1) for index in range(len(tokens))}
    request.forward = CustomMaskForward(0, asked)
    return request


def test_requests_with_custom_mask_rows_take_turns(harness) -> None:
    requests = [custom(harness, [first, 2, 3, 4]) for first in (1, 5, 9)]
    for request in requests:
        harness.scheduler.submit(request)
    assert [harness.step().scheduled[0].request for _ in range(6)] == requests * 2


def test_rows_with_guesses_get_their_turn_beside_custom_mask_rows(make_scheduler, monkeypatch) -> None:
    """They wait until no step is in flight, which never comes while custom-mask steps go on."""
    harness = make_scheduler(pages=64)
    decoding, forward = harness.generation([1, 2], 8), custom(harness, list(range(40)))
    for request in (decoding, forward):
        harness.scheduler.submit(request)

    def guess(running):
        ready = [each for each in running if each is decoding and each.is_decoding and each.next_standard_rows(1)]
        return Proposal({request: Drafts([7]) for request in ready}, {})

    monkeypatch.setattr(harness.scheduler, "_propose_drafts", guess)
    sent, order = [], []
    for _ in range(12):
        while harness.scheduler.num_in_flight < 2 and (batch := harness.schedule().batch) is not None:
            sent.append(batch)
        batch = sent.pop(0)
        order.append(batch.scheduled[0].request)
        for scheduled in harness.scheduler.process_output(batch):
            if scheduled.request is decoding:
                harness.cache.append(decoding.context, [65])
                harness.scheduler.update_acceptance(scheduled, 0)
    assert order.count(decoding) >= 4
    assert order.count(forward) >= 4


@pytest.mark.parametrize("suspended", [False, True])
def test_counts_of_a_fill_that_was_preempted_while_its_pages_came_back(make_scheduler, suspended) -> None:
    harness = make_scheduler(pages=64, host_pages=32)
    request = harness.fill(list(range(40)))
    context, blocks = request.context, harness.cache.block_manager
    harness.cache.grow(context, 40)
    harness.cache.mark_computed(context, 40)
    harness.cache.suspend(context)
    blocks.evict(blocks.index.cached)
    harness.scheduler.submit(request)
    arrived = iter([True] * 3)
    harness.scheduler.schedule(lambda slot: next(arrived, False))
    assert (request.restored_tokens, request.computed_tokens) == (12, None)
    harness.scheduler._active.preempt(request)
    if suspended:
        harness.cache.suspend(context)
        blocks.evict(blocks.index.cached)
    harness.schedule()
    assert (request.resident_tokens, request.restored_tokens, request.computed_tokens) == (0, 39, 1)
    stats = harness.scheduler.stats()
    assert (stats.tokens_queried, stats.tokens_cached, stats.tokens_restored) == (40, 0, 39)


def test_an_opening_whose_pages_are_all_there_finishes_without_a_row(harness) -> None:
    harness.context(list(range(8)), computed=True)
    opening = harness.fill(list(range(8)), compute_to=8)
    harness.scheduler.submit(opening)
    decided = harness.schedule()
    assert decided.batch is None
    (finished,) = decided.events
    assert isinstance(finished, RequestFinished)
    assert finished.request is opening
    assert (finished.context.state, finished.context.seq_len) == (ContextState.IDLE, 8)
    assert opening.ended
    assert opening.resident_tokens == 8


def test_what_never_fits_is_refused_and_nothing_has_changed(harness) -> None:
    with pytest.raises(ResourceExhausted) as error:
        harness.scheduler.submit(harness.generation([1] * 10, 60))
    assert error.value.reason == "NEVER_FITS"
    assert len(harness.scheduler.requests()) == 0


def test_a_full_queue_is_an_event_for_the_tenant_that_fills_it(harness) -> None:
    greedy = [harness.fill([k], tenant="greedy") for k in range(4)]
    for request in greedy:
        assert harness.scheduler.submit(request) == ()
    with pytest.raises(ResourceExhausted) as error:
        harness.scheduler.submit(harness.fill([9], tenant="greedy"))
    assert error.value.reason == "QUEUE_FULL"
    (event,) = harness.scheduler.submit(harness.fill([9], tenant="other"))
    assert isinstance(event, RequestFailed)
    assert (event.request, event.error.reason) == (greedy[-1], "QUEUE_FULL")
    assert harness.scheduler.waiting == 4


def test_a_request_that_is_too_late_fails_by_an_event_of_the_review(harness) -> None:
    late = harness.generation([1, 2], 8, timeout_s=5.0)
    blocker = [harness.generation([k], 8) for k in range(3, 7)]
    for request in blocker:
        harness.scheduler.submit(request)
    harness.schedule()
    for _ in range(20):
        harness.scheduler.step_costs.observe(harness.now, 0.1, decoding=4, tokens=4, prompt_rows=0)
    harness.scheduler.submit(late)
    assert harness.scheduler.review(harness.now) == ()  # it need not be asked yet
    harness.now += 4.9
    (event,) = harness.scheduler.review(harness.now)
    assert (event.request, event.error.reason) == (late, "DEADLINE_UNREACHABLE")


def test_accepted_drafts_take_the_request_on(make_scheduler) -> None:
    harness = make_scheduler()
    request = harness.generation([1, 2, 3], 6)
    harness.scheduler.submit(request)
    batch = harness.step()
    harness.scheduler.update_acceptance(batch.scheduled[0], 0)
    assert (request.next_position, request.dispatch_end) == (3, 4)
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.tokens_computed) == (1, 0, 3)


def test_steps_and_lookups_of_prompts_are_counted(harness) -> None:
    for _ in range(2):
        request = harness.fill([1] * 9)
        harness.scheduler.submit(request)
        batch = harness.schedule().batch
        harness.now += 0.25
        harness.scheduler.process_output(batch)
        harness.scheduler.end(request)
    stats = harness.scheduler.stats()
    assert (stats.tokens_queried, stats.tokens_cached) == (18, 8)  # two pages, of the second one
    assert stats.step_seconds == 0.5


def test_the_time_until_something_is_due(harness) -> None:
    """The next deadline, or the next time at which a waiting request is checked again, unless it runs."""
    assert harness.scheduler.next_due(0.0) == math.inf
    soon, later = harness.generation([1], 4, timeout_s=5.0), harness.generation([2], 4, timeout_s=8.0)
    for request in (soon, later):
        harness.scheduler.submit(request)
    assert harness.scheduler.next_due(1.0) == 4.0
    harness.scheduler._active.review_at(later, 2.0)
    assert harness.scheduler.next_due(1.0) == 1.0
    assert harness.scheduler.next_due(3.0) == MIN_WAIT_S
    assert harness.scheduler.overdue(4.9) == []
    assert harness.scheduler.overdue(5.0) == [soon]
    harness.scheduler.end(soon)
    harness.schedule()
    assert later.runs
    assert harness.scheduler.review(6.0) == ()
    assert harness.scheduler.next_due(6.0) == 2.0
