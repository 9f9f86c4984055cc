"""Seeds of several random draws that belong together, derived from one seed."""

import hashlib

SEED_BITS = 63


def derive_seed(seed: int, index: int) -> int:
    """The seed of the draw number `index`, from a `seed` of 0 to 2**63 - 1; the first draw has `seed` itself.

    A hash of both, so that neighbouring seeds have none in common: with `seed + index`, five outputs of seed 42 and
    five of 43 would share four.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
