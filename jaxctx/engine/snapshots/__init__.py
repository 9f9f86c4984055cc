"""Snapshots and publications of one engine: contexts that are saved, opened, listed and shared.

    service.py            `SnapshotService`: the calls of the Engine interface, on the caller's event loop
    save.py, open.py      the two long ones: saving a context, and opening or restoring one
    store_calls.py        blocking calls of the store, made from an event loop
    snapshot_contexts.py  `SnapshotContexts`: the step thread's part, contexts that snapshots hold or that are opened
    publications.py       `Publications`: prefixes that contexts of all tenants may share
    info.py               what is reported of a snapshot and of a publication

Called by `engine.engine`. What is stored, and how, is decided by `jaxctx.store`; which pages move when, by the step
thread.
"""
