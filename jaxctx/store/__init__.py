"""Snapshots at rest: named, versioned copies of contexts, in memory or durable.

The store keeps an index of all snapshots (names → versions) and, for durable ones, their pages in a TensorStore
key-value store: a local directory, S3, GCS or memory. It never sees a device array, knows nothing of requests, and
never waits for the engine; the engine calls it from I/O threads of its own.

    names/t<tenant>/n<name>   one small record of all versions; replacing it is what commits a change
            │ manifest id
            ▼
    manifests/<id>            tokens, overrides, and where each page and the attachment are, with their checksums
            │ pack, offset
            ▼
    packs/<id>                pages, one after the other; a page that several snapshots hold is stored once.
                              Or the attachment of one version: the caller's bytes, alone, so that they go with it

    store.py           SnapshotStore: the entry point
    snapshot_index.py  SnapshotIndex: versions of every name
    edits.py           how the versions of a name change
    pages.py           Pages: where pages are stored, who needs them, garbage collection
    transfer.py        SnapshotWriter, SnapshotReader: pages and attachment of one snapshot to and from the store
    records.py         what is stored, as dataclasses and as bytes
    objects.py         bytes by key, and where they are kept
"""

from jaxctx.store.records import ContextRecord, SnapshotVersion
from jaxctx.store.store import SnapshotStore
from jaxctx.store.transfer import PagesGone, SnapshotReader, SnapshotWriter

__all__ = ["ContextRecord", "PagesGone", "SnapshotReader", "SnapshotStore", "SnapshotVersion", "SnapshotWriter"]
