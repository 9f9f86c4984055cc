"""What a stored response that never became complete has come to, by its labels."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.v1.snapshot_pb2 import Snapshot
from jaxctx_server.http.openai.responses import progress
from jaxctx_server.http.openai.responses.record import Conversation, StoredConversation
from jaxctx_server.http.stored import StoredState
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of

BEGUN: dict[str, Any] = {"id": "resp_1", "background": True, "status": "in_progress", "error": None, "output": []}
NOW = 1_700_000_000.0


def stored(labels: dict[str, str], resource: dict[str, Any] = BEGUN) -> StoredConversation:
    snapshot = Snapshot(name="resp_1", labels=labels)
    conversation = Conversation(instructions=None, tools=(), items=())
    return StoredConversation(StoredState(snapshot, {"resource": resource}), conversation)


@pytest.fixture
def call(backend: Backend) -> Any:
    call = call_of(backend)
    object.__setattr__(call.frontend, "wall_time", lambda: NOW)
    return call


def told(call: Any, labels: dict[str, str], resource: dict[str, Any] = BEGUN) -> tuple[str, Any]:
    response = progress.response_resource(call, stored(labels, resource))
    return response["status"], response["error"]


def test_one_that_was_ended(call: Any) -> None:
    error = {"code": "server_error", "message": "no more é" * 100}
    failed = progress.ended(BEGUN, "failed", error)
    labels = progress.ended_labels(failed, 7)
    assert all(len(text.encode()) <= 256 for text in labels.values())
    status, what = told(call, labels)
    assert (status, what["code"]) == ("failed", "server_error")
    assert error["message"].startswith(what["message"])
    assert len(what["message"]) > 100
    assert progress.last_event_of(stored(labels)) == 7
    cancelled = progress.ended_labels(progress.ended(BEGUN, "cancelled", None), 7)
    assert told(call, cancelled) == ("cancelled", None)


def test_one_that_another_server_makes(call: Any) -> None:
    assert told(call, progress.running_labels("other", NOW - 1)) == ("in_progress", None)
    assert told(call, progress.running_labels("other", NOW - progress.LEASE_S)) == ("failed", progress.INTERRUPTED)


def test_one_of_this_server_that_it_does_not_know(call: Any) -> None:
    """It ended, and that could not be stored."""
    labels = progress.running_labels(call.frontend.background_responses.server_id, NOW)
    assert told(call, labels) == ("failed", progress.INTERRUPTED)


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {progress.STATUS: "completed\ndata: x"},
        {progress.ALIVE_AT: "x"},
        {progress.ALIVE_AT: "\u0661"},
        {progress.ALIVE_AT: "9" * 200},
        {progress.STATUS: "failed", progress.LAST_EVENT: "x"},
    ],
)
def test_labels_that_its_owner_changed(call: Any, labels: dict[str, str]) -> None:
    assert told(call, labels)[0] in ("failed", "in_progress")
    assert progress.last_event_of(stored(labels)) == progress.LAST_EVENT_OF_INTERRUPTED


def test_other_responses_are_as_they_are_stored(call: Any) -> None:
    complete = {"id": "resp_1", "background": True, "status": "completed", "error": None}
    assert told(call, {progress.STATUS: "failed"}, complete) == ("completed", None)
