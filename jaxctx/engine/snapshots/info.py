"""The descriptions of snapshots and publications that callers get."""

from jaxctx.cache.context_cache import Context
from jaxctx.engine.contexts.info import expiry
from jaxctx.store import SnapshotVersion
from jaxctx.types import Publication, Snapshot, utc_datetime


def snapshot_info(version: SnapshotVersion, *, latest: bool) -> Snapshot:
    """One version of a snapshot as plain data; `latest`: its name has no later one."""
    return Snapshot(
        name=version.name,
        version=version.version,
        latest=latest,
        durable=version.durable,
        tokens=version.tokens,
        seq_len=version.seq_len,
        pages=version.pages,
        size_bytes=version.size_bytes,
        model_revision=version.model_revision,
        salt=version.salt,
        manual_commit=version.manual_commit,
        created_at=utc_datetime(version.created_at),
        expiry=expiry(version.lifetime),
        context_id=version.context_id,
        parent_version=version.parent_version,
        labels=version.labels,
        attachment_bytes=version.attachment_bytes,
        adapter=version.adapter,
        adapter_revision=version.adapter_revision,
        adapter_spans=version.adapter_spans,
    )


def publication_info(published: Context) -> Publication:
    """A publication as plain data; `published` is the context that holds its pages."""
    return Publication(
        publication_id=published.id,
        tokens=published.seq_len,
        pages=published.committed_pages,
        salt=published.identity.salt,
        created_at=utc_datetime(published.created_at),
        expiry=expiry(published.lifetime),
        labels=published.labels,
    )
