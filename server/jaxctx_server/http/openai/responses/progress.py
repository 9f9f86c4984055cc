"""What a response that is made in the background has come to, kept as labels of its stored state.

A response is stored when it begins, without output, and again when it is complete. In between, and if it never becomes
complete, the labels of what was stored first tell where it is:

    {run by SERVER, alive at TIME} ──▶ {ended as STATUS}        it was cancelled, or it failed
                                   ──▶ (the complete response)
                                   ──▶ the server was killed: TIME is not renewed any more, and it counts as failed

To change labels needs no context, no place in a queue, and is no new work that a server which drains would refuse.
"""

from collections.abc import Mapping
from typing import Any

from jaxctx.v1.snapshot_service_pb2 import UpdateSnapshotRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.openai.responses.record import StoredConversation

Json = dict[str, Any]
RENEW_S = 10.0  # how often a running response says that it is alive
LEASE_S = 30.0  # how long it counts as alive without having said so
SERVER, ALIVE_AT, STATUS, CODE, MESSAGE, LAST_EVENT = (
    f"response-{name}" for name in ("server", "alive-at", "status", "error-code", "error-message", "last-event")
)
MAX_MESSAGE_BYTES = 250
INTERRUPTED: Json = {
    "code": "server_error",
    "message": "the server was stopped while it made this response, which is lost: ask again",
}
LAST_EVENT_OF_INTERRUPTED = 3  # behind created, queued and in_progress


def running_labels(server_id: str, now: float) -> dict[str, str]:
    """Labels of a response that runs on this server, at a time in seconds since 1970."""
    return {SERVER: server_id, ALIVE_AT: str(int(now))}


def ended_labels(resource: Json, last_event: int) -> dict[str, str]:
    """Labels of a response that was cancelled or that failed; `last_event` is the number of the last event of it."""
    labels = {STATUS: resource["status"], LAST_EVENT: str(last_event)}
    error = resource["error"]
    if error is not None:
        message = error["message"].encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
        labels |= {CODE: error["code"], MESSAGE: message}
    return labels


def change_labels(name: str, version: int, labels: Mapping[str, str]) -> UpdateSnapshotRequest:
    """The request that gives a stored state these labels."""
    return UpdateSnapshotRequest(name=name, version=version, labels=UpdateSnapshotRequest.Labels(labels=labels))


def ended(resource: Json, status: str, error: Json | None) -> Json:
    """A response that had begun, and that has ended without being complete."""
    return {**resource, "status": status, "error": error, "output": [], "usage": None}


def response_resource(call: HttpCall, stored: StoredConversation) -> Json:
    """A stored response as the API returns it now: one that is not complete runs, was ended, or was interrupted."""
    resource = stored.resource
    if not is_begun(resource):
        return resource
    running = call.frontend.background_responses.find(call.caller.tenant, stored.state.name)
    if running is not None:
        return running.resource()
    labels = stored.state.snapshot.labels
    if labels.get(STATUS) in ("cancelled", "failed"):
        error = {"code": labels[CODE], "message": labels.get(MESSAGE, "")} if CODE in labels else None
        return ended(resource, labels[STATUS], error)
    if runs_elsewhere(call, labels):
        return resource
    return ended(resource, "failed", INTERRUPTED)


def is_begun(resource: Json) -> bool:
    """Whether this is what is stored when a response begins in the background."""
    return resource.get("background") is True and resource.get("status") == "in_progress"


def runs_elsewhere(call: HttpCall, labels: Mapping[str, str]) -> bool:
    """Whether another server, which uses the same store, makes the response now."""
    if labels.get(SERVER) == call.frontend.background_responses.server_id:
        return False  # then this server would know it
    alive_at = labels.get(ALIVE_AT, "")
    return alive_at.isdecimal() and int(alive_at[:15]) + LEASE_S > call.frontend.wall_time()


def last_event_of(stored: StoredConversation) -> int:
    """The number of the last event of a response that has ended without being complete."""
    number = stored.state.snapshot.labels.get(LAST_EVENT, "")
    return int(number[:15]) if number.isdecimal() else LAST_EVENT_OF_INTERRUPTED
