"""The step's inputs and outputs: the packed vector, its views on host and device, masks, and what a step returns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.engine.runner.step import OUTPUT, StepInputs, StepShape, read_output, unpack_inputs, unpack_mask
from jaxctx.model.sampling import ROW_WORDS, TOP_LOGPROBS
from jaxctx_kernels import metadata_shape


def step_shape(rows: int = 16, samples: int = 4, mask_words: int = 0) -> StepShape:
    return StepShape(rows, samples, metadata_shape(rows, 16, 256, 33, "reference"), mask_words)


SHAPES = [step_shape(), step_shape(rows=1, samples=1), step_shape(rows=4, samples=2, mask_words=3)]
WITH_ADAPTERS = replace(step_shape(), has_adapters=True)


@pytest.mark.parametrize("shape", [*SHAPES, WITH_ADAPTERS], ids=str)
def test_the_views_take_every_word_of_the_vector_once_and_in_order(shape: StepShape) -> None:
    packed = np.arange(shape.size, dtype=np.int32)
    views = unpack_inputs(packed, shape)
    np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in views]), packed)
    assert views._fields == StepInputs._fields
    assert {name: view.shape for name, view in views._asdict().items()} == {
        "tokens": (shape.rows,),
        "positions": (shape.rows,),
        "kv_slots": (shape.rows,),
        "adapters": (shape.rows if shape.has_adapters else 0,),
        "sample_rows": (shape.samples,),
        "slots": (shape.samples,),
        "sampling": (shape.samples, ROW_WORDS),
        "mask": (shape.rows, shape.mask_words),
        "metadata": (shape.metadata.size(),),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_host_writes_into_a_view_the_device_reads(shape: StepShape) -> None:
    packed = np.zeros(shape.size, np.int32)
    views, source = unpack_inputs(packed, shape), np.random.default_rng(1)
    for view in views:
        view[...] = source.integers(-9, 9, view.shape)
    on_device = jax.jit(lambda vector: tuple(unpack_inputs(vector, shape)))(packed)
    for name, written, read in zip(StepInputs._fields, views, on_device, strict=True):
        np.testing.assert_array_equal(read, written, err_msg=name)


def test_only_a_step_with_masks_is_called_a_custom_mask_step() -> None:
    assert [str(shape) for shape in SHAPES] == ["step of 16 rows", "step of 1 rows", "custom-mask step of 4 rows"]


def test_a_mask_has_a_bit_for_each_index_the_lowest_first() -> None:
    seen = np.random.default_rng(2).random((5, 96)) < 0.5
    seen[0], seen[1] = False, True
    words = np.packbits(seen, axis=1, bitorder="little").view("<i4")
    assert words.shape == (5, 3)
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(words)), seen)


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
