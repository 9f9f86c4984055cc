"""Batch: what one step computes, and how it is written into the step's inputs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxctx.engine.sequence import Sequence
from jaxctx.engine.step import StepInputs
from jaxctx_kernels import Segment


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's rows in one step."""

    sequence: Sequence
    epoch: int
    first_row: int
    rows: int
    position: int
    read_only: bool
    sample: int  # index among the step's sampled rows, or -1
    outputs: Seq[int] = ()  # indices in the context of the rows that a pass asks about


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's worth of work."""

    parts: Seq[Part]
    rows: int
    samples: int
    unusual: bool = False  # one part, whose rows have positions and masks of their own


def write_part(part: Part, views: StepInputs, page_size: int) -> Segment:
    """Put a part's rows into the step's inputs; returns what they look at."""
    sequence, context = part.sequence, part.sequence.context
    rows = slice(part.first_row, part.first_row + part.rows)
    positions = np.arange(part.position, part.position + part.rows, dtype=np.int32)
    known = min(part.position, context.length), min(part.position + part.rows, context.length)
    tokens = context.tokens(*known)
    views.tokens[rows] = -1 - sequence.slot  # for a token that is still on the device
    views.tokens[rows.start : rows.start + len(tokens)] = tokens
    views.positions[rows] = positions
    table = context.page_table()
    if not part.read_only:
        views.kv_slots[rows] = table[positions // page_size] * page_size + positions % page_size
    if part.sample >= 0:
        assert sequence.sampler is not None
        assert sequence.request is not None
        views.sample_rows[part.sample] = rows.stop - 1
        views.slots[part.sample] = sequence.slot
        drawn = sequence.max_tokens - sequence.remaining - 1  # samples before this one
        suppress = drawn < sequence.request.min_tokens
        sequence.sampler.write(views.sampling[part.sample], position=part.position + part.rows, suppress=suppress)
    return Segment(part.first_row, part.rows, part.position, table)
