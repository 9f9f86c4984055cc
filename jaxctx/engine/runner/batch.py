"""Batch: what one step computes, and how it is written into the step's inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxctx.cache.attention_overrides import decode_mark
from jaxctx.engine.core.forward_pass import Sampler, needs_logits
from jaxctx.engine.core.request import Request
from jaxctx.engine.runner.step import StepInputs
from jaxctx_kernels import Segment


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A sequence's rows in one step."""

    sequence: Request
    epoch: int
    first_row: int
    rows: int
    position: int
    asked: Sequence[int]  # indices in the context of the rows that are sampled, or that a pass asks about
    place: int  # of the first of these among the step's
    drafts: Sequence[int] = ()  # tokens of its last rows, which are guesses


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's worth of work."""

    parts: Sequence[ScheduledRequest]
    rows: int
    outputs: int = 0  # of unusual rows, which are of one part: how many outputs the step must have, at least 1

    @property
    def wants_logits(self) -> bool:
        """Whether whole distributions are to be told."""
        asked = (part.sequence.passing.outputs.get(index) for part in self.parts for index in part.asked)
        return any(output is not None and needs_logits(output) for output in asked)


def write_batch(batch: Batch, views: StepInputs, page_size: int) -> list[Segment]:
    """Put all of it into the step's inputs, the plan apart; returns what the parts look at."""
    segments = [_write_part(part, views, page_size) for part in batch.parts]
    if batch.outputs:
        (part,) = batch.parts
        write_marks(views, part.position, part.rows, part.sequence.context.marks)
    return segments


def _write_part(part: ScheduledRequest, views: StepInputs, page_size: int) -> Segment:
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
    if part.position >= context.seq_len:  # else its KV is there already
        views.kv_slots[rows] = table[positions // page_size] * page_size + positions % page_size
    output = sequence.output
    samplers = sequence.passing.samplers if output is None else dict.fromkeys(part.asked, output.sampler)
    write_outputs(views, part.position - part.first_row, part.asked, samplers, part.place)
    if output is not None and part.asked and not part.drafts:  # else only the host knows which token is its last one
        views.slots[part.place] = sequence.slot
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


def write_outputs(
    views: StepInputs, first: int, asked: Sequence[int], samplers: Mapping[int, Sampler], place: int = 0
) -> None:
    """Ask about the tokens at the indices `asked`, in this order, from `place` on; `first` is the index of row 0.

    Tokens are drawn by their `samplers`, by index; others are greedy. Without a slot there are no penalties and bias.
    """
    for here, index in enumerate(asked, place):
        views.sample_rows[here] = index - first
        if index in samplers:
            samplers[index].write(views.sampling[here], position=index + 1)
