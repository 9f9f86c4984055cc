"""The core carries out the scheduler's events, in their order, and answers everybody even when it fails."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxctx.engine.interface import Caller
from jaxctx.engine.scheduler.scheduler_output import ContextSuspended, RequestFailed
from jaxctx.errors import JaxctxError, NotFound, ResourceExhausted, Unavailable
from jaxctx.types import ContextState, CreateContextRequest
from tests.jaxctx.engine.simulated import Simulated, with_config

ME = Caller()


@dataclass
class Reply:
    results: list[Any] = field(default_factory=list)

    def set_result(self, result: Any) -> None:
        self.results.append(result)

    def set_error(self, error: JaxctxError) -> None:
        self.results.append(error)

    def backpressured(self) -> bool:
        return False


@pytest.fixture
def core() -> Any:
    return Simulated(with_config(pages=32), lambda batch, at: 0.01).core


def fill(core: Any, tokens: int) -> tuple[Any, Reply]:
    reply = Reply()
    context = core.contexts.create(ME, CreateContextRequest())
    return core.fill(ME, context.id, np.arange(tokens, dtype=np.int32), False, reply), reply


def test_a_request_refused_before_it_ran_leaves_its_context_as_it_was(core) -> None:
    request, reply = fill(core, 5)
    error = ResourceExhausted("no", reason="QUEUE_FULL")
    core.fail(request, error)
    assert reply.results == [error]
    assert request.context.length == 0
    assert not core.has_requests()


def test_a_request_that_ran_keeps_its_tokens(core) -> None:
    request, reply = fill(core, 5)
    assert core.schedule() is not None
    core.fail(request, ResourceExhausted("no", reason="OUT_OF_PAGES"))
    assert len(reply.results) == 1
    assert request.context.length == 5


def test_a_context_that_was_closed_meanwhile_is_not_resumed_though_another_has_its_id(core) -> None:
    opened = core.contexts.create(ME, CreateContextRequest(context_id="x"))
    core.contexts.close(ME, "x")
    core.contexts.create(ME, CreateContextRequest(context_id="x"))
    with pytest.raises(NotFound):
        core.resume(ME, opened, Reply())
    assert not core.has_requests()
    assert core.schedule() is None


def test_a_step_follows_at_once_where_no_guess_could_be_sent(core) -> None:
    """The draft model has no pages for anybody of the round."""
    request, _ = fill(core, 5)
    core.draft_model = SimpleNamespace(start=lambda to_draft: None)
    core.scheduler._is_drafting, core._to_draft = True, {request: 1}
    assert core.dispatch_drafts() is None
    assert core.may_dispatch_again()
    assert core.schedule() is not None


@pytest.mark.parametrize("before", [0, 5, 8])
def test_a_request_refused_after_it_was_preempted_while_its_pages_came_back_leaves_no_tokens(before: int) -> None:
    """Else who tries again appends them twice. Where they begin within a page, its other tokens are computed again."""
    core: Any = Simulated(with_config(pages=32, page_size=4), lambda batch, at: 0.01).core
    context = core.contexts.create(ME, CreateContextRequest())
    core.fill(ME, context.id, np.arange(before, dtype=np.int32), True, Reply())
    reply: Any = Reply()
    request = core.fill(ME, context.id, np.arange(100, 120, dtype=np.int32), False, reply)
    core.cache.grow(context, 16)  # as if they had come back
    core.cache.mark_computed(context, 16)
    request.run_number = 1
    assert not request.never_ran
    error = ResourceExhausted("no", reason="OUT_OF_PAGES")
    core.fail(request, error)
    assert reply.results == [error]
    assert context.tokens(0).tolist() == list(range(before))
    assert context.seq_len == before - before % 4


def pinned(core: Any, caller: Caller, tokens: np.ndarray) -> None:
    """A pinned context with KV of all tokens, whose number is a multiple of the page size."""
    context = core.contexts.create(caller, CreateContextRequest())
    core.cache.append(context, tokens)
    core.cache.grow(context, len(tokens))
    core.cache.mark_computed(context, len(tokens))
    core.lifecycle.pin(context, True)


def refused_while_its_pages_came_back(core: Any, before: int) -> tuple[Any, Reply]:
    """A fill that waits, of a context of `before` tokens and 20 in all, which shares two pages of four with another
    one; it was preempted while its other pages came back.
    """
    tokens = np.arange(100, 120, dtype=np.int32)
    pinned(core, ME, tokens[:8])
    context = core.contexts.create(ME, CreateContextRequest())
    core.fill(ME, context.id, tokens[:before], True, Reply())
    reply = Reply()
    request = core.fill(ME, context.id, tokens[before:], False, reply)
    core.cache.match(context, 8)
    request.run_number = 1
    return context, reply


def test_taking_back_a_refused_request_needs_no_page_that_another_was_promised() -> None:
    """The refused one would need a page for the two tokens that it keeps of a page that another context has too."""
    simulated = Simulated(with_config(pages=5, page_size=4, max_context_tokens=64), lambda batch, at: 0.01)
    core: Any = simulated.core
    pinned(core, Caller("other"), np.arange(4, dtype=np.int32))
    refused, reply = refused_while_its_pages_came_back(core, 6)
    admitted = core.contexts.create(ME, CreateContextRequest())
    core.fill(ME, admitted.id, np.arange(50, 58, dtype=np.int32), False, Reply())  # two pages: all that are left
    while core.has_requests():
        batch = core.schedule()
        core.cache.moves()
        assert core.scheduler.stats().pages_reserved <= core.cache.block_manager.available
        if batch is not None:
            simulated._finish_step(batch)
    assert [error.reason for error in reply.results] == ["OUT_OF_PAGES"]
    assert refused.tokens().tolist() == [100, 101, 102, 103, 104, 105]
    assert admitted.seq_len == 8


def test_a_request_is_taken_back_though_other_contexts_hold_all_pages() -> None:
    core: Any = Simulated(with_config(pages=5, page_size=4, max_context_tokens=64), lambda batch, at: 0.01).core
    pinned(core, Caller("other"), np.arange(8, dtype=np.int32))
    pinned(core, Caller("third"), np.arange(4, dtype=np.int32))
    refused, reply = refused_while_its_pages_came_back(core, 6)
    assert core.cache.block_manager.available == 0
    core.schedule()
    assert [error.reason for error in reply.results] == ["OUT_OF_PAGES"]
    assert refused.tokens().tolist() == [100, 101, 102, 103, 104, 105]


def test_events_are_carried_out_in_order(core, monkeypatch) -> None:
    request, reply = fill(core, 5)
    noted: list[object] = []
    other = core.contexts.create(ME, CreateContextRequest())
    monkeypatch.setattr(core.lifecycle, "notify_suspended", lambda context: noted.append(context))
    monkeypatch.setattr(reply, "set_error", lambda error: noted.append(error))
    core.scheduler.end(request)
    error = ResourceExhausted("late", reason="DEADLINE_UNREACHABLE")
    core._carry_out_events([ContextSuspended(other), RequestFailed(request, error)])
    assert noted == [other, error]


def test_a_request_whose_event_was_not_carried_out_gets_an_answer_when_the_engine_fails(core, monkeypatch) -> None:
    request, reply = fill(core, 5)

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    core.scheduler.end(request)
    monkeypatch.setattr(core.lifecycle, "notify_changed", fail)
    with pytest.raises(RuntimeError):
        core._carry_out_events([RequestFailed(request, ResourceExhausted("late", reason="QUEUE_FULL"))])
    core.fail_all(Unavailable("the engine stopped"))
    assert [type(result) for result in reply.results] == [Unavailable]


def test_a_finished_opening_is_described_as_it_ended_though_its_context_is_suspended_in_the_same_schedule() -> None:
    core: Any = Simulated(with_config(pages=4, page_size=4), lambda batch, at: 0.01).core
    opened = core.contexts.create(ME, CreateContextRequest())
    core.cache.append(opened, np.arange(100, 108, dtype=np.int32))
    core.cache.grow(opened, 8)
    core.cache.mark_computed(opened, 8)
    core.cache.suspend(opened)
    reply: Any = Reply()
    core.resume(ME, opened, reply)
    fill(core, 16)  # needs all pages, those of the opened context too
    core.schedule()
    assert opened.suspended
    (result,) = reply.results
    assert (result.resident, result.computed) == (8, 0)
    assert (result.context.state, result.context.seq_len) == (ContextState.IDLE, 8)
    assert result.context.version == opened.version - 1  # the suspension is the change after it
