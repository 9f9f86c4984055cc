"""The services of a router (role `router`): one address for the engines of other processes.

Sessions run on the router itself (`service/sessions.py`). Every other call goes as it came to the engine that is its
place: engines come and go, and a context or a snapshot is on one of them.

    engines.py           the engines, least loaded first; one RPC asked of each
    placement.py         where contexts are, and which ids are in use right now
    forwarding.py        a call goes to the engines in turn, until one knows what it is about
    planning.py          what a prompt would take on each engine; the place of a context's first fill
    migration.py         contexts of an engine that leaves go on at others
    registration.py      engines register and leave
    watch.py             the changes of the contexts on all engines, as one stream
    listing.py           pages of what all engines have
    context_service.py, snapshot_service.py, model_service.py
                         the services themselves: one method an RPC

A context or snapshot is asked for at the engine where it was last, if that is remembered, then at the others, the least
loaded first: NotFound says that nothing was done. While an engine that may come back does not answer, that becomes
Unavailable (ENGINE_LOST). A new context is made on the least loaded engine. Its prompt is not known then: if its first
fill comes next, all engines are asked what they would have to do (Plan), and the context is made anew where most of the
prompt is cached.
"""
