"""The step's inputs and outputs: the packed vector, its views on host and device, masks, and what a step returns."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner.step import (
    OUTPUT,
    StepInputs,
    StepShape,
    layer_masks,
    read_output,
    unpack_inputs,
    unpack_mask,
    write_metadata,
)
from jaxctx.model.sampling import TOP_LOGPROBS
from jaxctx.model.sampling_options import ROW_WORDS
from jaxctx_kernels import Segment, metadata_shape, unpack_metadata


def step_shape(
    rows: int = 16, samples: int = 4, mask_words: int = 0, windows: tuple[int | None, ...] = (None,)
) -> StepShape:
    metadata = tuple(
        metadata_shape(rows, 16, 256, 33, "reference", window=None if mask_words else window) for window in windows
    )
    mask_windows = windows if mask_words and windows != (None,) else ()
    return StepShape(rows, samples, metadata, mask_words, mask_windows)


SHAPES = [
    step_shape(),
    step_shape(rows=1, samples=1),
    step_shape(rows=4, samples=2, mask_words=3),
    step_shape(windows=(20, None)),
    step_shape(rows=4, mask_words=3, windows=(None, 20, 7)),
]
WITH_ADAPTERS = replace(step_shape(), has_adapters=True)


@pytest.mark.parametrize("shape", [*SHAPES, WITH_ADAPTERS], ids=str)
def test_the_views_take_every_word_of_the_vector_once_and_in_order(shape: StepShape) -> None:
    packed = np.arange(shape.size, dtype=np.int32)
    views = unpack_inputs(packed, shape)
    every = [*views[:-1], *views.metadata]
    np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in every]), packed)
    assert views._fields == StepInputs._fields
    assert [view.shape for view in views.metadata] == [(kind.size(),) for kind in shape.metadata]
    assert {name: view.shape for name, view in zip(StepInputs._fields[:-1], views[:-1], strict=True)} == {
        "tokens": (shape.rows,),
        "positions": (shape.rows,),
        "kv_slots": (shape.rows,),
        "adapters": (shape.rows if shape.has_adapters else 0,),
        "sample_rows": (shape.samples,),
        "slots": (shape.samples,),
        "sampling": (shape.samples, ROW_WORDS),
        "mask": (shape.rows, shape.mask_words),
        "index_positions": (32 * shape.mask_words if shape.mask_windows else 0,),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_host_writes_into_a_view_the_device_reads(shape: StepShape) -> None:
    packed = np.zeros(shape.size, np.int32)
    views, source = unpack_inputs(packed, shape), np.random.default_rng(1)
    for view in (*views[:-1], *views.metadata):
        view[...] = source.integers(-9, 9, view.shape)
    on_device = jax.jit(lambda vector: tuple(unpack_inputs(vector, shape)))(packed)
    for name, written, read in zip(StepInputs._fields, views, on_device, strict=True):
        jax.tree.map(partial(np.testing.assert_array_equal, err_msg=name), read, written)


def test_only_a_step_with_masks_is_called_a_custom_mask_step() -> None:
    names = ["step of 16 rows", "step of 1 rows", "custom-mask step of 4 rows"]
    assert [str(shape) for shape in SHAPES[:3]] == names


def test_a_mask_has_a_bit_for_each_index_the_lowest_first() -> None:
    seen = np.random.default_rng(2).random((5, 96)) < 0.5
    seen[0], seen[1] = False, True
    words = np.packbits(seen, axis=1, bitorder="little").view("<i4")
    assert words.shape == (5, 3)
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(words)), seen)


class TestMetadataOfEachKind:
    """What `write_metadata` lists for layers of different windows: 4 rows at 100 … 103 of seven pages of 16 tokens."""

    segment = Segment(0, 4, 100, np.arange(1, 8, dtype=np.int32))

    def pages(self, shape: StepShape, views: StepInputs) -> list[list[int]]:
        """Pages that each kind lists, but 0."""
        write_metadata([self.segment], shape, views)
        listed = []
        for kind, packed in zip(shape.metadata, views.metadata, strict=True):
            pages = unpack_metadata(kind, packed).pages
            listed.append(pages[pages > 0].tolist())
        return listed

    def test_in_a_step_without_masks_by_the_place_of_rows(self) -> None:
        shape = step_shape(windows=(None, 20, 6))
        views = unpack_inputs(np.zeros(shape.size, np.int32), shape)
        assert self.pages(shape, views) == [[1, 2, 3, 4, 5, 6, 7], [6, 7], [6, 7]]

    def test_under_masks_by_positions(self) -> None:
        """The lowest row stands at 40; a token of the third page is just outside of its window, and just within."""
        shape = step_shape(mask_words=4, windows=(None, 20))
        views = unpack_inputs(np.zeros(shape.size, np.int32), shape)
        views.positions[:4] = [60, 40, 41, 100]
        views.index_positions[:] = np.arange(128)
        views.index_positions[16:100] = 5
        views.index_positions[100:104] = views.positions[:4]
        assert self.pages(shape, views)[1] == [7]
        views.index_positions[45] = 20
        assert self.pages(shape, views)[1] == [7]
        views.index_positions[45] = 21
        assert self.pages(shape, views) == [[1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]

    def test_masks_are_narrowed_by_the_distance_of_positions(self) -> None:
        shape = step_shape(rows=2, mask_words=1, windows=(3, None))
        views = unpack_inputs(np.zeros(shape.size, np.int32), shape)
        views.mask[0], views.mask[1] = -1, 0b1011
        views.positions[:] = [5, 4]
        views.index_positions[:] = [2, 3, 9, 4, 5] + [0] * 27
        narrowed, whole = (
            np.asarray(mask) for mask in layer_masks(views._replace(mask=jnp.asarray(views.mask)), shape)
        )
        assert np.flatnonzero(narrowed[0]).tolist() == [1, 2, 3, 4]
        assert np.flatnonzero(narrowed[1]).tolist() == [0, 1, 3]
        np.testing.assert_array_equal(whole, unpack_mask(jnp.asarray(views.mask)))


def test_the_bits_of_an_output_are_numbers_again_on_the_host() -> None:
    rows, source = np.zeros(3, OUTPUT), np.random.default_rng(3)
    rows["tokens"] = [7, -1, 151_000]
    rows["logprobs"] = [-0.5, -np.inf, np.nan]
    rows["top_ids"] = source.integers(0, 1000, (3, TOP_LOGPROBS))
    rows["top_logprobs"] = source.normal(size=(3, TOP_LOGPROBS))
    bits = rows.view(np.int32).reshape(3, -1)
    strided = np.asfortranarray(bits)  # as an array of a device may lie
    for given in (bits, strided):
        output = read_output(given)
        for name, field in output._asdict().items():
            np.testing.assert_array_equal(field, rows[name])
