"""Cache: pages, the prefix index and contexts. Bookkeeping in plain Python and numpy.

The package never imports JAX, never touches a device array and never waits. One thread owns it. What must happen on
the device (a page to copy, a page to load) is returned as data; the engine carries it out before its next step. Only
the engine calls this package.

    context_cache.py        ContextCache: every operation on contexts; the entry point of the package
    page_control.py         truncate, rewind, take_back, reserve, commit, release
    context_table.py        ContextTable: contexts by tenant and id, in order of use, with their lifetimes
    context.py              Context: the state of one token sequence and its page table
    block_manager.py        BlockManager: page pool, prefix index and tiers together
    page_pool.py            PagePool: which slots of the page array are free
    prefix_index.py         PrefixIndex: committed pages as a tree, found by their tokens
    tiers.py                Tiers: copies of pages in host memory and on disk, and the moves that make them
    overrides.py            Overrides: those of attention, and switches of adapters; part of a page's identity
    attention_overrides.py  positions and masks of tokens that were not computed in the default way
    page_numbers.py         PageNumbers: the page numbers that tenants see
    audit.py                comparisons and counts that need a walk over contexts

    ContextCache ──▶ ContextTable
         │
         ▼
    BlockManager ──▶ PagePool, PrefixIndex, Tiers
"""
