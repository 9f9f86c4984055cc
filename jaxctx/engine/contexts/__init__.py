"""Contexts of one engine: operations that compute nothing, lifetime and pins, quotas, and change notifications.

    operations.py  `ContextOperations`: create, fork, truncate, rewind, reserve, commit, release, inspect, list, plan, …
    lifecycle.py   `ContextLifecycle`: time to live, pins, and notification of changes
    quotas.py      `Quotas`: what one tenant may have, and what its pinned contexts are charged
    watch.py       `Watch`: one reader of the changes of a tenant's contexts
    info.py        what is reported of a context

Called by `engine.core` and `engine.snapshots`, on the step thread. It never touches the device: page copies are moves
of the cache, which the engine carries out between steps.
"""
