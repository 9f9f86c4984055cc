"""Seeds of draws that belong together, of one that was asked for."""

import hashlib

SEED_BITS = 63


def derive_seed(seed: int, index: int) -> int:
    """The seed of draw `index` of several from `seed`, 0 to 2**63 - 1: `seed` itself for the first.

    A hash of both, so that neighbouring seeds share none: with `seed + index`, five outputs of seed 42 and five of 43
    would have four in common.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
