"""Sequences of tokens."""

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the front."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared much faster than one token after the other
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
