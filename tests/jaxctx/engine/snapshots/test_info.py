"""What is reported of a snapshot and of a publication: every field."""

from dataclasses import fields, replace
from datetime import UTC, datetime

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import ContextCache, Identity
from jaxctx.engine.snapshots.info import publication_info, snapshot_info
from jaxctx.lifetime import FOREVER, Lifetime
from jaxctx.store import SnapshotVersion
from jaxctx.types import AdapterSpan, Expiry, Publication, Snapshot

SPANS = (
    AdapterSpan(start=0, adapter="", adapter_revision=""),
    AdapterSpan(start=7, adapter="it", adapter_revision="content"),
)
VERSION = SnapshotVersion(
    tenant="tenant",
    name="name",
    version=3,
    parent_version=2,
    durable=True,
    tokens=50,
    seq_len=48,
    pages=3,
    size_bytes=999,
    model_revision="model",
    salt="pepper",
    adapter="it",
    adapter_revision="content",
    adapter_spans=SPANS,
    manual_commit=True,
    context_id="context",
    labels={"k": "v"},
    created_at=1000.0,
    lifetime=Lifetime.begin(60.0, True, 1000.0),
    attachment_bytes=12,
)


def test_every_field_of_a_snapshot() -> None:
    told = snapshot_info(VERSION, latest=True)
    assert told == Snapshot(
        name="name",
        version=3,
        latest=True,
        durable=True,
        tokens=50,
        seq_len=48,
        pages=3,
        size_bytes=999,
        model_revision="model",
        salt="pepper",
        adapter="it",
        adapter_revision="content",
        adapter_spans=SPANS,
        manual_commit=True,
        created_at=datetime.fromtimestamp(1000, UTC),
        expiry=Expiry(at=datetime.fromtimestamp(1060, UTC), seconds=60.0, sliding=True),
        context_id="context",
        parent_version=2,
        labels={"k": "v"},
        attachment_bytes=12,
    )
    assert all(getattr(told, field.name) for field in fields(told)), "each field is told apart from its default"
    assert snapshot_info(replace(VERSION, lifetime=FOREVER), latest=False).expiry is None


def test_every_field_of_a_publication() -> None:
    cache = ContextCache(BlockManager(pages=16, page_size=4), lambda: 1000.0, lambda: "new")
    context = cache.create(Identity("tenant", "model", salt="pepper"), context_id="context")
    cache.append(context, list(range(10)))
    cache.grow(context, 10)
    cache.mark_computed(context, 10)
    published = cache.publish(context, "pub_1", tenant="hidden")
    published.labels = {"k": "v"}
    cache.set_lifetime(published, Lifetime.begin(60.0, False, 1000.0))
    assert publication_info(published) == Publication(
        publication_id="pub_1",
        tokens=8,
        pages=2,
        salt="pepper",
        created_at=datetime.fromtimestamp(1000, UTC),
        expiry=Expiry(at=datetime.fromtimestamp(1060, UTC), seconds=60.0, sliding=False),
        labels={"k": "v"},
    )
