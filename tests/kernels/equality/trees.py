"""Trees of contexts of one step: those of `builders` over few pages, lone and long rows, token trees under a mask, and
rows with a sliding window, a soft cap of scores or attention sinks.

Pages of more tokens make trees of fewer pages, so that interpreters have as little to do as shows a mistake: a prefix
that several rows share has some hundred tokens, enough to be read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxctx_kernels import Segment
from tests.kernels.builders import BATCHES, Forest, visible_slots

Generator = np.random.Generator
POOL_PAGES = {16: 144, 32: 80, 64: 44, 128: 28}  # by the tokens of a page: as many as the largest tree has, and some


@dataclass(frozen=True)
class Tree:
    """What a step attends to."""

    segments: list[Segment]
    visible: np.ndarray  # bool [pages, page_size]: the slots that some row sees
    slots: np.ndarray  # int32 [rows]: where rows' keys and values go; 0, in the scratch page, for padding
    mask: np.ndarray | None = None  # bool [rows, tokens of the pool]: what rows see besides
    window: int | None = None  # tokens that a row sees at most
    soft_cap: float | None = None
    has_sinks: bool = False


def lone_row(f: Forest) -> None:
    """One decoding row far into its context; all others are padding."""
    f.add(f.pages(0), 50, 1)


def split_rows(f: Forest) -> None:
    """Decoding rows whose contexts are cut into two short items each, of which plain JAX computes 16 at once."""
    for _ in range(9):
        f.add(f.pages(0), int(f.rng.integers(10, 16)), 1)


def prompt(f: Forest) -> None:
    """Most rows are of one prompt behind a long prefix, which another row has too."""
    prefix = f.pages(20)
    f.add(prefix, 8, f.rows - 4)
    f.add(prefix, 1, 1)


def token_trees(f: Forest) -> None:
    """Guessed tokens behind two contexts of one prefix and behind a third, and a decoding row."""
    prefix = f.pages(12)
    f.add(prefix, 3, 9)
    f.add(prefix, 1, 6)
    f.add(f.pages(0), 4, 12)
    f.add(prefix, 2, 1)


def windowed(f: Forest) -> None:
    """Rows of a shared prefix, of which some see only the end and others nothing, and a chunk far into its context."""
    prefix = f.pages(14)
    f.add(prefix, 1, 1)
    f.add(prefix, 6, 18)
    f.add(f.pages(0), 20, 7)
    f.add(prefix, 3, 1)


def windowed_prompt(f: Forest) -> None:
    """Most rows are of one prompt, of whose steps some need no mask: they are between windows' beginnings and ends."""
    f.add(f.pages(0), 28, f.rows - 4)
    f.add(f.pages(0), 3, 1)


def capped(f: Forest) -> None:
    """A few rows of each kind."""
    prefix = f.pages(9)
    f.add(prefix, 2, 1)
    f.add(prefix, 2, 6)
    f.add(f.pages(0), 4, 1)


TREES: dict[str, Callable[[Forest], None]] = {
    **BATCHES,
    **{grow.__name__: grow for grow in (lone_row, split_rows, prompt, token_trees, windowed, windowed_prompt, capped)},
    "narrow_window": windowed,
    "window_of_pages": windowed,
    "window_past_context": windowed,
    "windowed_and_capped": windowed,
    "with_sinks": capped,
    "windowed_capped_with_sinks": windowed,
}
MASKED = ("token_trees",)
CAPPED = ("capped", "windowed_and_capped", "windowed_capped_with_sinks")
SINKS = ("with_sinks", "windowed_capped_with_sinks")
WINDOWS: dict[str, Callable[[Generator, int], int]] = {  # from the tokens of a page
    "windowed": lambda rng, page_size: int(rng.integers(1, 200)),
    "windowed_prompt": lambda rng, page_size: int(rng.integers(130, 300)),
    "narrow_window": lambda rng, page_size: int(rng.integers(1, page_size)),
    "window_of_pages": lambda rng, page_size: int(rng.integers(1, 4)) * page_size,
    "window_past_context": lambda rng, page_size: int(rng.integers(600, 3000)),
    "windowed_and_capped": lambda rng, page_size: int(rng.integers(1, 200)),
    "windowed_capped_with_sinks": lambda rng, page_size: int(rng.integers(1, 200)),
}


def grow_tree(rng: Generator, name: str, rows: int, page_size: int) -> Tree:
    """A tree of this kind, its pages and rows in random places."""
    forest = Forest(rng, rows, page_size, POOL_PAGES[page_size], page_units=page_size // 16)
    TREES[name](forest)
    forest.spread()
    segments, pages = forest.segments, POOL_PAGES[page_size]
    mask = token_tree_mask(rng, segments, rows, pages * page_size) if name in MASKED else None
    window = WINDOWS[name](rng, page_size) if name in WINDOWS else None
    return Tree(
        segments=segments,
        visible=visible_slots(segments, page_size, pages, window, mask),
        slots=own_slots(segments, rows, page_size),
        mask=mask,
        window=window,
        soft_cap=float(rng.uniform(1, 30)) if name in CAPPED else None,
        has_sinks=name in SINKS,
    )


def token_tree_mask(rng: Generator, segments: list[Segment], rows: int, tokens: int) -> np.ndarray:
    """Each row of a token tree sees its context, its ancestors and itself.

    From some the beginning of the context is hidden, as by a window, and from some everything.
    """
    mask = np.ones((rows, tokens), np.bool_)
    for s in segments:
        sees = np.eye(s.rows, dtype=np.bool_)
        for node in range(1, s.rows):
            sees[node] |= sees[rng.integers(0, node)]
        of_tree = mask[s.first_row : s.first_row + s.rows]
        of_tree[:, s.position : s.position + s.rows] = sees
        for row in of_tree:
            if rng.random() < 0.3:
                row[: rng.integers(0, s.position + 1)] = False
            if s.rows > 1 and rng.random() < 0.1:
                row[:] = False
    return mask


def own_slots(segments: list[Segment], rows: int, page_size: int) -> np.ndarray:
    """int32 `[rows]`: the slot of each row's own token; 0 for padding.

    Where a row of another sequence has that slot already, which `Forest` may deal out and an engine does not, too.
    """
    slots = np.zeros(rows, np.int32)
    for s in segments:
        token = s.position + np.arange(s.rows)
        slots[s.first_row : s.first_row + s.rows] = s.pages[token // page_size] * page_size + token % page_size
    _, first = np.unique(slots, return_index=True)
    again = np.ones(rows, np.bool_)
    again[first] = False
    slots[again] = 0
    return slots
