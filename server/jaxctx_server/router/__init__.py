"""The services of a router (role `router`): one address for the engines of other processes.

Sessions run on the router itself (`service/sessions.py`). Every other call is forwarded unchanged to an engine.
Engines register and leave, and each context or snapshot is on one of them.

    engines.py           the engines, least loaded first; one RPC to each of them
    placement.py         the engines of contexts, and the ids that are in use now
    forwarding.py        a call goes to one engine after the other, until one has its context or snapshot
    planning.py          the cost of a prompt on each engine, and the engine for a context's first fill
    migration.py         moves the contexts of an engine that leaves to other engines
    leftovers.py         copies of contexts that moves left behind, until they are closed
    registration.py      engines register and leave
    watch.py             the changes of the contexts on all engines, as one stream
    listing.py           pages of what all engines have
    context_service.py, snapshot_service.py, model_service.py
                         the services themselves: one method an RPC

A call for a context or snapshot goes first to the engine where it was last, if that is remembered, then to the others,
the least loaded first, as long as they answer NotFound. If all do, the answer is NotFound; while an engine that may
come back does not answer, it is Unavailable (ENGINE_LOST), and so it is for a context that is remembered on a process
which was not among them. A new context is made on the least loaded engine, before its prompt is known. If its first
fill comes next, all engines are asked for a Plan, and the context is created again on the engine that has most of the
prompt cached.
"""
