"""Options of sampled rows: packed on the host, read on the device."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxctx.model.sampling_options import OPTIONS, ROW_WORDS, SamplingBatch, row_words

NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_k": 0,
    "position": 0,
    "suppress": False,
    "biased": False,
    "logprobs": False,
    "constrained": False,
}
OTHERS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "top_k": 12,
    "position": 77,
    "suppress": True,
    "biased": True,
    "logprobs": True,
    "constrained": True,
}


def check(batch: SamplingBatch, row: int, want: dict[str, Any]) -> None:
    """Each option of the row as it is read."""
    for name, value in want.items():
        read = getattr(batch, name)
        assert read.shape == (len(batch.words),)
        assert read.dtype == {float: jnp.float32, int: jnp.int32, bool: jnp.bool_}[type(value)]
        np.testing.assert_allclose(read[row], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_is_read_as_it_was_packed_and_changes_no_other(name: str) -> None:
    words = row_words(**{name: OTHERS[name]})
    assert (words.shape, words.dtype) == ((ROW_WORDS,), np.int32)
    batch = SamplingBatch(jnp.asarray(np.stack([row_words(), words])))
    check(batch, 0, NEUTRAL)
    check(batch, 1, {**NEUTRAL, name: OTHERS[name]})
    assert batch.seed.tolist() == [[0, 0], [0, 0]]


def test_all_options_together() -> None:
    batch = SamplingBatch(jnp.asarray(row_words(seed=0xDEADBEEF_00C0FFEE, **OTHERS)[None]))
    check(batch, 0, OTHERS)
    assert batch.seed[0].tolist() == [0x00C0FFEE, 0xDEADBEEF]
    assert {*OTHERS, "seed"} == {*OPTIONS}


def test_a_top_k_beyond_any_vocabulary_is_one_that_fits() -> None:
    assert SamplingBatch(jnp.asarray(row_words(top_k=2**40)[None])).top_k.tolist() == [2**31 - 1]
