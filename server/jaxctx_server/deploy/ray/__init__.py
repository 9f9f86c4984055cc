"""Engines of a router on a running Ray cluster: as many as the load asks for, and new ones for those that die.

    autoscaling.py  how many engines there should be, out of their load; plain Python
    actor.py        the Ray actor: one process of an engine on its node
    fleet.py        the engines that were requested, and the state of each
    supervisor.py   `jaxctx-serve ray`: compares load and fleet every second, until a signal

Each engine is a process of `jaxctx-serve --role engine`. A Ray actor starts it on its node, and it ends with the actor.
Ray decides which node that is, and reports when an actor or a node is gone; another engine is requested then. Ray, its
nodes and the router are never started or stopped here, and no engine is sent any work: engines register with the router
by themselves. If the supervisor dies, its engines do too, and their work waits at the router.

Paths (of a model, a cluster key, a compilation cache) are those of the nodes, and have to be the same on all of them.
"""
