"""Batch: what one step computes, and how it is written into the step's inputs."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxctx.cache.marks import decode_mark
from jaxctx.engine.passes import Sampler, needs_logits
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
    drafts: Seq[int] = ()  # tokens of its last rows, which are guesses; these rows are sampled too
    outputs: Seq[int] = ()  # indices in the context of the rows that a pass asks about


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's worth of work."""

    parts: Seq[Part]
    rows: int
    outputs: int = 0  # of unusual rows, which are of one part: how many outputs the step must have, at least 1

    @property
    def wants_logits(self) -> bool:
        """Whether whole distributions are to be told."""
        asked = ((part.sequence.passing, index) for part in self.parts for index in part.outputs)
        return any(passing is not None and needs_logits(passing.outputs[index]) for passing, index in asked)


def write_batch(batch: Batch, views: StepInputs, page_size: int) -> list[Segment]:
    """Put all of it into the step's inputs, the plan apart; returns what the parts look at."""
    segments = [_write_part(part, views, page_size) for part in batch.parts]
    if batch.outputs:
        part, context = batch.parts[0], batch.parts[0].sequence.context
        write_marks(views, part.position, part.rows, context.marks)
        if part.sequence.passing is not None:
            write_outputs(views, part.position, part.outputs, part.sequence.passing.samplers)
    return segments


def _write_part(part: Part, views: StepInputs, page_size: int) -> Segment:
    sequence, context = part.sequence, part.sequence.context
    rows = slice(part.first_row, part.first_row + part.rows)
    positions = np.arange(part.position, part.position + part.rows, dtype=np.int32)
    known = min(part.position, context.length), min(part.position + part.rows, context.length)
    tokens = context.tokens(*known)
    views.tokens[rows] = -1 - sequence.slot  # for a token that is still on the device
    views.tokens[rows.start : rows.start + len(tokens)] = tokens
    views.tokens[rows.stop - len(part.drafts) : rows.stop] = part.drafts
    views.positions[rows] = positions
    table = context.page_table()
    if not part.read_only:
        views.kv_slots[rows] = table[positions // page_size] * page_size + positions % page_size
    if part.sample >= 0:
        output = sequence.output
        assert output is not None
        if not part.drafts:  # else only the host knows which of its tokens is the last one
            views.slots[part.sample] = sequence.slot
        drawn = output.max_tokens - sequence.remaining - 1  # samples before this one
        suppress = drawn < output.request.min_tokens
        for place, row in enumerate(range(rows.stop - 1 - len(part.drafts), rows.stop), part.sample):
            views.sample_rows[place] = row
            position = part.position + row + 1 - rows.start
            output.sampler.write(views.sampling[place], position=position, suppress=suppress)
    return Segment(part.first_row, part.rows, part.position, table)


def write_marks(views: StepInputs, first: int, rows: int, marks: Mapping[int, bytes]) -> None:
    """Give rows `0 .. rows - 1`, of the indices from `first` on, the positions and masks of `marks`, by index."""
    for row in range(rows):
        if not (encoded := marks.get(first + row)):
            continue
        views.positions[row], ranges = decode_mark(encoded)
        if ranges:
            seen = np.zeros(32 * views.mask.shape[1], np.bool_)
            for start, stop in ranges:
                seen[start:stop] = True
            views.mask[row] = np.packbits(seen, bitorder="little").view("<i4")


def write_outputs(views: StepInputs, first: int, outputs: Seq[int], samplers: Mapping[int, Sampler]) -> None:
    """Ask about the tokens at the indices `outputs`, in this order; `first` is that of row 0.

    Tokens are drawn by their `samplers`, by index, in nobody's slot: without penalties and bias. Others are greedy.
    """
    for place, index in enumerate(outputs):
        views.sample_rows[place] = index - first
        if index in samplers:
            samplers[index].write(views.sampling[place], position=index + 1, suppress=False)
