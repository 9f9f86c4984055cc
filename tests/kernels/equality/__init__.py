"""Equality with float64 over the whole product of kernels, types, page sizes, head dims, groups and trees.

    product     what there is to check, by name: combinations, and which of them a run takes
    trees       batches of contexts: shared prefixes, chunks, token trees under a mask, lone rows, padding
    checks      one combination: attention and pages, a write, a move of pages
    campaign    the command `scripts/equality`: runs all or a seeded fraction, and goes on where it was stopped

Nothing here says how fast a kernel is, or that it compiles for its chip. Tests run a slice of the product.
"""
