"""A batch, written into a step's inputs: tokens, positions, KV slots, samples, overrides of attention."""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxctx.cache.attention_overrides import encode_override
from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import Context, ContextCache, Identity
from jaxctx.engine.core.forward_pass import NO_FORWARD, Sampler
from jaxctx.engine.runner.batch import write_adapters, write_attention_overrides, write_batch, write_samples
from jaxctx.engine.runner.step import StepInputs, StepShape, unpack_inputs
from jaxctx.engine.scheduler.scheduler_output import Batch, ScheduledRequest
from jaxctx.model.sampling_options import row_words
from jaxctx.types import GenerateRequest, SamplingParams
from jaxctx_kernels import metadata_shape

PAGE_SIZE = 4
NOBODY = 9  # the slot of nobody
GREEDY = GenerateRequest(context_id="", sampling=SamplingParams(temperature=0.0))


def make_views(rows: int = 16, samples: int = 4, mask_words: int = 0) -> StepInputs:
    """Inputs of a step that does nothing, as `ModelRunner.make_step_inputs` makes them."""
    shape = StepShape(rows, samples, (metadata_shape(rows, PAGE_SIZE, 64, 33, "reference"),), mask_words)
    views = unpack_inputs(np.zeros(shape.size, np.int32), shape)
    views.slots[:] = NOBODY
    views.sampling[:] = row_words()
    views.mask[:] = -1
    return views


@pytest.fixture
def cache() -> ContextCache:
    ids = iter(range(100))
    return ContextCache(BlockManager(pages=32, page_size=PAGE_SIZE), lambda: 0.0, lambda: f"c{next(ids)}")


def make_context(cache: ContextCache, computed: int, buffered: int = 0, pages_for: int = 0) -> Context:
    """A context of tokens 100, 101, … with pages for `pages_for` tokens beyond the computed ones."""
    context = cache.create(Identity("", "model", salt=str(len(cache.context_table))))
    cache.append(context, list(range(100, 100 + computed)))
    cache.grow(context, computed)
    cache.mark_computed(context, computed)
    cache.append(context, list(range(100 + computed, 100 + computed + buffered)))
    cache.grow(context, pages_for)
    return context


def schedule(context: Context, *, output: Any = None, slot: int = -1, forward: Any = NO_FORWARD, **place: Any) -> Any:
    """A request with its rows in the step; `place` has the fields of `ScheduledRequest`."""
    request: Any = SimpleNamespace(context=context, slot=slot, output=output, forward=forward)
    return ScheduledRequest(request, 0, **place)


def generation(seed: int) -> Any:
    return SimpleNamespace(sampler=Sampler(GREEDY, seed))


def kv_slots(context: Context, positions: range) -> list[int]:
    table = context.page_table()
    return [int(table[position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE for position in positions]


def test_a_mixed_batch(cache: ContextCache) -> None:
    """A decoding row, a row with two drafts, and a chunk of a prompt whose last token is sampled."""
    decoding = make_context(cache, computed=6, pages_for=1)
    drafting = make_context(cache, computed=9, buffered=1, pages_for=3)
    filling = make_context(cache, computed=4, buffered=5, pages_for=5)
    samplers = [generation(seed) for seed in (5, 6, 7)]
    batch = Batch(
        [
            schedule(
                decoding,
                output=samplers[0],
                slot=2,
                first_row=0,
                rows=1,
                position=6,
                output_positions=range(6, 7),
                sample_offset=0,
            ),
            schedule(
                drafting,
                output=samplers[1],
                slot=3,
                first_row=1,
                rows=3,
                position=9,
                output_positions=range(9, 12),
                sample_offset=1,
                drafts=[41, 42],
            ),
            schedule(
                filling,
                output=samplers[2],
                slot=0,
                first_row=4,
                rows=5,
                position=4,
                output_positions=range(8, 9),
                sample_offset=4,
            ),
        ],
        rows=9,
    )
    views = make_views(rows=16, samples=8)
    segments = write_batch(batch, views, PAGE_SIZE)

    # The first request's token is still on the device: it is what slot 2 sampled last.
    assert views.tokens[:9].tolist() == [-1 - 2, 109, 41, 42, 104, 105, 106, 107, 108]
    assert views.positions[:9].tolist() == [6, 9, 10, 11, 4, 5, 6, 7, 8]
    assert views.kv_slots[:9].tolist() == [
        *kv_slots(decoding, range(6, 7)),
        *kv_slots(drafting, range(9, 12)),
        *kv_slots(filling, range(4, 9)),
    ]
    assert views.sample_rows[:5].tolist() == [0, 1, 2, 3, 8]
    # Behind drafts only the host knows which sample counts: no slot remembers it.
    assert views.slots[:5].tolist() == [2, NOBODY, NOBODY, NOBODY, 0]
    for sample, (output, position) in enumerate(
        [(samplers[0], 7), (samplers[1], 10), (samplers[1], 11), (samplers[1], 12), (samplers[2], 9)]
    ):
        expected = np.zeros_like(views.sampling[0])
        output.sampler.write(expected, position=position)
        np.testing.assert_array_equal(views.sampling[sample], expected)
    # The rest is padding.
    assert not views.tokens[9:].any()
    assert not views.kv_slots[9:].any()
    assert (views.slots[5:] == NOBODY).all()

    placed = [(segment.first_row, segment.rows, segment.position) for segment in segments]
    assert placed == [(0, 1, 6), (1, 3, 9), (4, 5, 4)]
    for segment, context in zip(segments, (decoding, drafting, filling), strict=True):
        np.testing.assert_array_equal(segment.pages, context.page_table())


def test_a_fill_has_no_samples_and_no_slot(cache: ContextCache) -> None:
    context = make_context(cache, computed=0, buffered=6, pages_for=6)
    views = make_views()
    write_batch(
        Batch([schedule(context, first_row=0, rows=6, position=0, output_positions=(), sample_offset=0)], 6),
        views,
        PAGE_SIZE,
    )
    assert views.tokens[:6].tolist() == list(range(100, 106))
    assert views.kv_slots[:6].tolist() == kv_slots(context, range(6))
    assert not views.sample_rows.any()
    assert (views.slots == NOBODY).all()


def test_a_token_whose_kv_is_there_is_computed_again_into_the_scratch_page(cache: ContextCache) -> None:
    """The last token of a prompt that was found in the cache: others may share its page, which must not change."""
    context = make_context(cache, computed=8)
    views = make_views()
    scheduled = schedule(
        context,
        output=generation(1),
        slot=1,
        first_row=0,
        rows=1,
        position=7,
        output_positions=range(7, 8),
        sample_offset=0,
    )
    write_batch(Batch([scheduled], 1), views, PAGE_SIZE)
    assert (views.tokens[0], views.positions[0], views.kv_slots[0]) == (107, 7, 0)


def test_a_custom_mask_step_has_the_overrides_and_the_samplers_of_its_request(cache: ContextCache) -> None:
    context = cache.create(Identity("", "model"))
    overrides = [encode_override(0, 0), encode_override(1, 30), encode_override(2, 2, [(0, 1), (2, 3)])]
    cache.append(context, [50, 51, 52], overrides)
    cache.grow(context, 3)
    forward = SimpleNamespace(samplers={2: Sampler(GREEDY, 8)})
    views = make_views(rows=4, samples=4, mask_words=2)
    scheduled = schedule(
        context, forward=forward, first_row=0, rows=3, position=0, output_positions=[1, 2], sample_offset=0
    )
    write_batch(Batch([scheduled], 3, outputs=2), views, PAGE_SIZE)
    assert views.positions[:3].tolist() == [0, 30, 2]
    assert views.mask[:3].tolist() == [[-1, -1], [-1, -1], [0b101, 0]]
    assert views.sample_rows[:2].tolist() == [1, 2]
    np.testing.assert_array_equal(views.sampling[0], row_words())  # greedy, as nobody asked for a sample
    expected = row_words()
    forward.samplers[2].write(expected, position=3)
    np.testing.assert_array_equal(views.sampling[1], expected)
    assert (views.slots == NOBODY).all()


def test_overrides_are_by_index_and_the_first_row_may_be_any() -> None:
    views = make_views(rows=4, mask_words=2)
    views.positions[:] = 40, 41, 42, 43
    causal = array("i", [41, 0, 42]).tobytes()
    write_attention_overrides(
        views, 40, 3, {41: causal, 42: encode_override(42, 7, [(31, 34)]), 43: encode_override(43, 1)}
    )
    assert views.positions.tolist() == [40, 41, 7, 43]  # the last row is not one of the three
    seen = np.unpackbits(views.mask.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert seen[0].all()
    assert np.flatnonzero(seen[1]).tolist() == list(range(42))
    assert np.flatnonzero(seen[2]).tolist() == [31, 32, 33]
    assert seen[3].all()


def test_each_row_has_the_adapter_of_its_index(cache: ContextCache) -> None:
    slots = {"one": 1, "two": 2}
    context = cache.create(Identity("", "model", adapter="one"))
    for adapter, length in (("one", 3), ("", 4), ("two", 6), ("one", 7)):
        cache.append(context, [100] * (length - context.length))
        cache.switch_adapter(context, adapter, adapter)  # [0, 4) is "one", as the switch at 3 goes on with it
    of_indices = [1, 1, 1, 1, 0, 0, 2, 1, 1, 1]  # the last two are drafts, or a token that is not known yet
    for position in range(10):
        for stop in range(position + 1, 11):
            adapters = np.zeros(16, np.int32)
            rows = stop - position
            place = {"output_positions": (), "sample_offset": 0}
            write_adapters(adapters, schedule(context, first_row=4, rows=rows, position=position, **place), slots)
            assert adapters.tolist() == [0] * 4 + of_indices[position:stop] + [0] * (12 - rows)


def test_samples_stand_in_the_order_that_they_were_asked_for() -> None:
    views = make_views(rows=8, samples=6)
    samplers = {21: Sampler(GREEDY, 1), 24: Sampler(GREEDY, 2)}
    write_samples(views, 20, [21, 22, 24], samplers, sample_offset=2)
    assert views.sample_rows.tolist() == [0, 0, 1, 2, 4, 0]
    for sample in (0, 1, 3, 5):
        np.testing.assert_array_equal(views.sampling[sample], row_words())
    for sample, index in ((2, 21), (4, 24)):
        expected = np.zeros_like(views.sampling[0])
        samplers[index].write(expected, position=index + 1)
        np.testing.assert_array_equal(views.sampling[sample], expected)
