"""Snapshots: ids beside a request, versions that are not named, and labels that are not sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxctx import types
from jaxctx.convert import snapshots
from jaxctx.v1 import snapshot_pb2, snapshot_service_pb2
from tests.jaxctx.convert.examples import example_of

UPDATE = types.RetentionUpdate(labels={"a": "b"})


def test_ids_stand_beside_an_update() -> None:
    of_version = snapshots.update_snapshot_request_to_proto(UPDATE, name="n", version=3)
    assert (of_version.name, of_version.version) == ("n", 3)
    assert snapshots.update_snapshot_request_from_proto(of_version) == UPDATE
    of_publication = snapshots.update_publication_request_to_proto(UPDATE, publication_id="p")
    assert of_publication.publication_id == "p"
    assert snapshots.update_publication_request_from_proto(of_publication) == UPDATE
    assert snapshots.publish_request_to_proto(UPDATE, context_id="c").context_id == "c"


def test_an_update_without_a_version_is_of_the_latest() -> None:
    assert not snapshots.update_snapshot_request_to_proto(UPDATE, name="n").HasField("version")


def test_an_update_of_the_time_to_live_to_for_ever_is_sent() -> None:
    update = types.RetentionUpdate(ttl=types.Ttl())
    for sent, received in (
        (snapshots.update_snapshot_request_to_proto(update), snapshots.update_snapshot_request_from_proto),
        (snapshots.update_publication_request_to_proto(update), snapshots.update_publication_request_from_proto),
        (snapshots.publish_request_to_proto(update), snapshots.publish_request_from_proto),
    ):
        assert sent.HasField("ttl")
        assert received(sent) == update  # type: ignore[operator]


@pytest.mark.parametrize("labels", [None, {}])
def test_a_publication_without_labels_has_none(labels: dict[str, str] | None) -> None:
    sent = snapshots.publish_request_to_proto(types.RetentionUpdate(labels=labels), context_id="c")
    assert snapshots.publish_request_from_proto(sent) == types.RetentionUpdate()


def test_labels_of_a_new_publication_are_sent() -> None:
    sent = snapshots.publish_request_to_proto(UPDATE)
    assert dict(sent.labels) == {"a": "b"}
    assert snapshots.publish_request_from_proto(sent) == UPDATE


def test_a_save_that_overwrites_version_zero_is_not_one_that_overwrites_nothing() -> None:
    nothing = snapshots.save_request_to_proto(types.SaveRequest(context_id="c", name="n"))
    assert not nothing.HasField("overwrite_version")
    assert snapshots.save_request_from_proto(nothing).overwrite_version is None
    zero = snapshot_service_pb2.SaveRequest(overwrite_version=0)
    assert snapshots.save_request_from_proto(zero).overwrite_version == 0


@pytest.mark.parametrize("name", ["version", "context_id", "pin_s"])
def test_what_an_open_request_may_lack_is_unset_and_none(name: str) -> None:
    request = replace(example_of(types.OpenRequest), **{name: None})
    sent = snapshots.open_request_to_proto(request)
    assert not sent.HasField("pin_for" if name == "pin_s" else name)  # type: ignore[arg-type]
    assert snapshots.open_request_from_proto(sent) == request


def test_a_take_is_of_the_latest_version() -> None:
    request = example_of(types.OpenRequest)
    sent = snapshots.take_request_to_proto(request)
    assert snapshots.take_request_from_proto(sent) == replace(request, version=None)


def test_open_and_take_have_a_message_each() -> None:
    result = example_of(types.FillResult)
    assert isinstance(snapshots.open_response_to_proto(result), snapshot_service_pb2.OpenResponse)
    assert isinstance(snapshots.take_response_to_proto(result), snapshot_service_pb2.TakeResponse)


def test_what_never_expires_has_no_expiry() -> None:
    snapshot = replace(example_of(types.Snapshot), expiry=None)
    publication = replace(example_of(types.Publication), expiry=None)
    assert not snapshots.snapshot_to_proto(snapshot).HasField("expiry")
    assert snapshots.snapshot_from_proto(snapshots.snapshot_to_proto(snapshot)) == snapshot
    assert not snapshots.publication_to_proto(publication).HasField("expiry")
    assert snapshots.publication_from_proto(snapshots.publication_to_proto(publication)) == publication


def test_numbers_of_a_snapshot_do_not_get_mixed_up() -> None:
    message = snapshot_pb2.Snapshot(version=1, tokens=2, seq_len=3, pages=4, size_bytes=5, parent_version=6)
    snapshot = snapshots.snapshot_from_proto(message)
    numbers = (
        snapshot.version,
        snapshot.tokens,
        snapshot.seq_len,
        snapshot.pages,
        snapshot.size_bytes,
        snapshot.parent_version,
    )
    assert numbers == (1, 2, 3, 4, 5, 6)
