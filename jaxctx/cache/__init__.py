"""Cache: pages, the prefix index and contexts. Bookkeeping in plain Python and numpy.

Never imports JAX, never touches a device array, never waits, owned by one thread. What must happen on the device (a
page to copy) is returned as data; the engine carries it out before the next step. Called by `engine` only.

    pages.py     PagePool: which slots of the page array are free
    numbers.py   PageNumbers: what tenants call their pages
    prefix.py    PrefixIndex: committed pages as a tree, and the lineage nodes that contexts share
    context.py   Context: the state of one sequence, its tokens and its page table
    memory.py    Memory: pool and index as one; the moves of pages between them and contexts
    registry.py  Registry: contexts by id and by use
    contexts.py  ContextCache: the front of the room: create, fork, match, restore, grow, settle, suspend, publish
    control.py   truncate, rewind, reserve, commit, release
    tiers.py     Tiers: copies in host memory and on disk, and the moves that make them
    marks.py     how a token was computed, where that was not the usual way
    audit.py     what only walks can tell: where two contexts part, and who holds what
"""
