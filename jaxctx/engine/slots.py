"""Slots: what sampling must know of a sequence's past before its first step, and how it travels to the device.

`SlotHistory.pack` writes it on the host, an int32 vector for each call of the compiled load, `load_packed` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.model.sampling import SlotState, load_slot

LOAD_CHUNK = 1024  # tokens of one load
MAX_BIAS = 1024  # logit_bias entries of a request
MAX_STOPS = 128  # stop token ids of a request, end-of-sequence ids included

_SPLIT = (3, LOAD_CHUNK, MAX_BIAS, MAX_BIAS, MAX_STOPS)
PACKED_WORDS = sum(_SPLIT)


@dataclass(frozen=True, slots=True)
class SlotHistory:
    """What penalties, bias and min_tokens of a sequence depend on."""

    prompt: np.ndarray  # int32, at least one token
    output: np.ndarray  # int32, sampled before it was preempted
    bias: Mapping[int, float]
    stops: Sequence[int]

    def pack(self, slot: int) -> Iterator[np.ndarray]:
        """int32 `[PACKED_WORDS]` each, to be loaded in this order: as many as its tokens need."""
        first = True
        for tokens, as_output in ((self.prompt, False), (self.output, True)):
            for start in range(0, len(tokens), LOAD_CHUNK):
                yield self._pack(slot, tokens[start : start + LOAD_CHUNK], as_output=as_output, first=first)
                first = False

    def _pack(self, slot: int, tokens: np.ndarray, *, as_output: bool, first: bool) -> np.ndarray:
        """slot, as_output, reset | tokens | bias ids | bias bits | stop ids; ids padded with -1."""
        packed = np.full(PACKED_WORDS, -1, np.int32)
        head, ids, bias_ids, bias_bits, stop_ids = np.split(packed, np.cumsum(_SPLIT)[:-1])
        head[:] = slot, as_output, first
        ids[: len(tokens)] = tokens
        if first:
            bias_ids[: len(self.bias)] = list(self.bias.keys())
            bias_bits[: len(self.bias)] = np.array(list(self.bias.values()), np.float32).view(np.int32)
            stop_ids[: len(self.stops)] = self.stops
        return packed


def load_packed(state: SlotState, packed: jax.Array) -> SlotState:
    """The device side of `SlotHistory.pack`."""
    head, ids, bias_ids, bias_bits, stop_ids = jnp.split(packed, np.cumsum(_SPLIT)[:-1])
    bias = jax.lax.bitcast_convert_type(bias_bits, jnp.float32)
    return load_slot(state, head[0], ids, head[1] != 0, head[2] != 0, bias_ids, bias, stop_ids)
