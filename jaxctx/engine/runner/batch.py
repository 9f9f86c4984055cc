"""How a batch is written into the inputs of a step."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from jaxctx.cache.attention_overrides import decode_override
from jaxctx.engine.core.forward_pass import Sampler
from jaxctx.engine.runner.step import StepInputs
from jaxctx.engine.scheduler.scheduler_output import Batch, ScheduledRequest
from jaxctx_kernels import Segment

NO_ADAPTERS: Mapping[str, int] = {}


def write_batch(
    batch: Batch, views: StepInputs, page_size: int, adapter_slots: Mapping[str, int] = NO_ADAPTERS
) -> list[Segment]:
    """Write a batch into the step's inputs, all but the attention metadata.

    `adapter_slots`: content hash of an adapter → its slot.
    Returns what that is built from: which pages the rows of each request attend to.
    """
    segments = [_write_request(scheduled, views, page_size) for scheduled in batch.scheduled]
    for scheduled in batch.scheduled:
        write_adapters(views.adapters, scheduled, adapter_slots)
    if batch.outputs:  # a custom-mask step has the rows of one request
        (scheduled,) = batch.scheduled
        overrides = scheduled.request.context.attention_overrides
        write_attention_overrides(views, scheduled.position, scheduled.rows, overrides)
        write_index_positions(views, overrides)
    return segments


def write_adapters(adapters: Int32[np.ndarray, " rows"], scheduled: ScheduledRequest, slots: Mapping[str, int]) -> None:
    """Write the slot of each row's adapter, that of its token's index; rows without one stay 0."""
    context, begin = scheduled.request.context, scheduled.first_row
    first_index = scheduled.position - begin  # of row 0
    stop = begin + scheduled.rows
    for switch in reversed(context.adapter_switches):  # the last one has the rows of most steps
        if stop == begin:
            return
        first = max(switch.start - first_index, begin)
        if first < stop:
            if switch.adapter_revision:
                adapters[first:stop] = slots[switch.adapter_revision]
            stop = first
    if context.identity.adapter:
        adapters[begin:stop] = slots[context.identity.adapter]


def _write_request(scheduled: ScheduledRequest, views: StepInputs, page_size: int) -> Segment:
    """The rows and the samples of one request."""
    request = scheduled.request
    context = request.context
    table = context.page_table()
    _write_tokens(scheduled, views)
    _write_positions(scheduled, views, table, page_size)
    output = request.output
    if output is None:  # a fill has no samplers; a forward pass may have one for each of its outputs
        samplers = request.forward.samplers
    else:
        samplers = dict.fromkeys(scheduled.output_positions, output.sampler)
    first_index = scheduled.position - scheduled.first_row
    write_samples(views, first_index, scheduled.output_positions, samplers, scheduled.sample_offset)
    if output is not None and scheduled.output_positions and not scheduled.drafts:
        # The next step may begin with this sample before the host has seen it. Behind drafts it may not: only the host
        # knows which of the samples is the last one that counts.
        views.slots[scheduled.sample_offset] = request.slot
    return Segment(scheduled.first_row, scheduled.rows, scheduled.position, table)


def _write_tokens(scheduled: ScheduledRequest, views: StepInputs) -> None:
    """The tokens that the context has, then "what the slot sampled last", or the drafts."""
    request, context = scheduled.request, scheduled.request.context
    first, stop = scheduled.first_row, scheduled.first_row + scheduled.rows
    known_start = min(scheduled.position, context.length)
    known_stop = min(scheduled.position + scheduled.rows, context.length)
    tokens = context.tokens(known_start, known_stop)
    views.tokens[first:stop] = -1 - request.slot  # for a token that is still on the device
    views.tokens[first : first + len(tokens)] = tokens
    views.tokens[stop - len(scheduled.drafts) : stop] = scheduled.drafts


def _write_positions(scheduled: ScheduledRequest, views: StepInputs, table: np.ndarray, page_size: int) -> None:
    """Where the rows stand in the context, and where their keys and values go; `table` is int32 `[pages]`."""
    rows = slice(scheduled.first_row, scheduled.first_row + scheduled.rows)
    positions = np.arange(scheduled.position, scheduled.position + scheduled.rows, dtype=np.int32)
    views.positions[rows] = positions
    if scheduled.position >= scheduled.request.context.seq_len:  # else their KV is there: it goes to the scratch page
        views.kv_slots[rows] = table[positions // page_size] * page_size + positions % page_size


def write_attention_overrides(views: StepInputs, first_index: int, rows: int, overrides: Mapping[int, bytes]) -> None:
    """Give rows `0 .. rows - 1` their own positions and masks.

    Row 0 has the index `first_index` in its context; `overrides` are encoded and by index, see
    `cache.attention_overrides`. A row that has none keeps the position of its index and sees everything before it.
    """
    for row in range(rows):
        encoded = overrides.get(first_index + row)
        if not encoded:
            continue
        views.positions[row], ranges = decode_override(encoded)
        if ranges:
            views.mask[row] = _mask_words(ranges, views.mask.shape[1])


def write_index_positions(views: StepInputs, overrides: Mapping[int, bytes]) -> None:
    """Write the position of every index of a context, if masks are narrowed by windows; `overrides` as above."""
    if not views.index_positions.size:
        return
    for index, encoded in overrides.items():
        if encoded:
            views.index_positions[index], _ = decode_override(encoded)


def _mask_words(ranges: Iterable[tuple[int, int]], words: int) -> np.ndarray:
    """int32 `[words]` with a bit set for every index that lies in one of the ranges `[start, stop)`."""
    seen = np.zeros(32 * words, np.bool_)
    for start, stop in ranges:
        seen[start:stop] = True
    return np.packbits(seen, bitorder="little").view("<i4")


def write_samples(
    views: StepInputs,
    first_index: int,
    output_positions: Sequence[int],
    samplers: Mapping[int, Sampler],
    sample_offset: int = 0,
) -> None:
    """Sample behind the tokens at `output_positions`, indices in the context, in this order.

    `first_index` is the index of row 0; the samples stand from `sample_offset` on among the step's. Tokens are drawn by
    their `samplers`, by index; others are greedy. Without a slot there are no penalties and no bias.
    """
    for sample, index in enumerate(output_positions, sample_offset):
        views.sample_rows[sample] = index - first_index
        if index in samplers:
            samplers[index].write(views.sampling[sample], position=index + 1)
