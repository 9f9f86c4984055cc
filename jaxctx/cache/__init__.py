"""Cache: pages, the prefix index and contexts. Bookkeeping in plain Python and numpy.

Never imports JAX, never touches a device array, never waits, owned by one thread. What must happen on the device (a page
to copy) is returned as data; the engine carries it out before the next step. Called by `engine` only.

    pages.py     PagePool: which slot of the page array is free, held or cached
    prefix.py    PrefixIndex: committed pages by chained hash, and the lineage nodes that contexts share
    contexts.py  ContextCache: the front of the room: contexts, forks, growth, commit, rewind, suspension, reservations
"""
