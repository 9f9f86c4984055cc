"""Options of the rows that a step samples, as they travel to the device: one array of words with the rest of a batch.

row_words ──▶ a row of the step's metadata ──▶ SamplingBatch
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

OPTIONS = {
    "temperature": "<f4",
    "top_p": "<f4",
    "min_p": "<f4",
    "repetition_penalty": "<f4",
    "presence_penalty": "<f4",
    "frequency_penalty": "<f4",
    "seed": "<u8",
    "top_k": "<i4",
    "position": "<i4",
    "suppress": "?",
    "biased": "?",
    "logprobs": "?",
    "constrained": "?",
}
ROW = np.dtype([*OPTIONS.items()])
"""One row on the host; what each option means is said in `SamplingBatch`."""
ROW_WORDS = ROW.itemsize // 4  # int32


class SamplingBatch(NamedTuple):
    """Options of the sampled rows on the device. Neutral means off; padding rows are neutral.

    An option is taken out of the words wherever it is read. Were it taken out once, XLA would store it for each branch
    that reads it: a kernel for each option, which every step runs and which takes as long to compile as any other.
    """

    words: Int32[Array, "rows 11"]  # as `row_words` makes them

    @property
    def temperature(self) -> Float32[Array, " rows"]:
        """0: greedy."""
        return self._float("temperature")

    @property
    def top_p(self) -> Float32[Array, " rows"]:
        """1: off."""
        return self._float("top_p")

    @property
    def min_p(self) -> Float32[Array, " rows"]:
        """0: off."""
        return self._float("min_p")

    @property
    def repetition_penalty(self) -> Float32[Array, " rows"]:
        """Over prompt and output; 1: off."""
        return self._float("repetition_penalty")

    @property
    def presence_penalty(self) -> Float32[Array, " rows"]:
        """Over the output; 0: off."""
        return self._float("presence_penalty")

    @property
    def frequency_penalty(self) -> Float32[Array, " rows"]:
        """Over the output; 0: off."""
        return self._float("frequency_penalty")

    @property
    def seed(self) -> UInt32[Array, "rows 2"]:
        """The lower half first."""
        first = _word("seed")
        return lax.bitcast_convert_type(self.words[:, first : first + 2], jnp.uint32)

    @property
    def top_k(self) -> Int32[Array, " rows"]:
        """0: off."""
        return self.words[:, _word("top_k")]

    @property
    def position(self) -> Int32[Array, " rows"]:
        """Of the token being sampled, in its sequence."""
        return self.words[:, _word("position")]

    @property
    def suppress(self) -> Bool[Array, " rows"]:
        """`min_tokens` is not reached: the slot's stop tokens cannot be drawn."""
        return self._flag("suppress")

    @property
    def biased(self) -> Bool[Array, " rows"]:
        """The slot's logit bias applies; without it the slot's bias may be a former owner's."""
        return self._flag("biased")

    @property
    def logprobs(self) -> Bool[Array, " rows"]:
        """The caller will read logprobs; where no row does, they are zeros."""
        return self._flag("logprobs")

    @property
    def constrained(self) -> Bool[Array, " rows"]:
        """Only the slot's allowed tokens can be drawn; without it they may be anything."""
        return self._flag("constrained")

    def _float(self, option: str) -> Float32[Array, " rows"]:
        bits: jax.Array = self.words[:, _word(option)]
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _flag(self, option: str) -> Bool[Array, " rows"]:
        return self.words[:, _word(option)] & (1 << 8 * (_offset(option) % 4)) != 0


def _offset(option: str) -> int:
    """Where an option is in a row, in bytes."""
    fields: Any = ROW.fields
    offset: int = fields[option][1]
    return offset


def _word(option: str) -> int:
    """The word in which an option is, or begins."""
    return _offset(option) // 4


def row_words(
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int = 0,
    top_k: int = 0,
    position: int = 0,
    suppress: bool = False,
    biased: bool = False,
    logprobs: bool = False,
    constrained: bool = False,
) -> np.ndarray:
    """The options of one row on the host, as int32 `[ROW_WORDS]`.

    The defaults are neutral. `seed` has 64 bits; a `top_k` beyond the vocabulary means all of it.
    """
    row = np.zeros(1, ROW)
    row["temperature"] = temperature
    row["top_p"] = top_p
    row["min_p"] = min_p
    row["repetition_penalty"] = repetition_penalty
    row["presence_penalty"] = presence_penalty
    row["frequency_penalty"] = frequency_penalty
    row["seed"] = seed
    row["top_k"] = min(top_k, 2**31 - 1)
    row["position"] = position
    row["suppress"] = suppress
    row["biased"] = biased
    row["logprobs"] = logprobs
    row["constrained"] = constrained
    return row.view(np.int32)
