"""The step: one ragged batch through model and sampling, as one function of arrays.

Everything a step needs to know travels in one packed int32 vector (one host-to-device copy takes 9 µs, eight take 290).
The KV arrays and the per-slot state are donated and updated in place. A row's token is either a number from the host
or "what slot s sampled last", which is still on the device: step n+1 is dispatched before the host has seen step n.

A *pass* is a step whose rows have masks and whose logits are returned whole; a row's mask has a bit for every index of
a context. Other steps carry neither.

    packed:  tokens[T] positions[T] kv_slots[T] | sample_rows[S] slots[S] sampling[S, ROW_WORDS] | mask[T, M] | plan
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import ROW_WORDS, TOP_LOGPROBS, SlotState, sample, unpack_rows
from jaxctx_kernels import PlanShape, attend, unpack, visible_sum, write_rows

OUTPUT_WIDTH = 2 + 2 * TOP_LOGPROBS


class DeviceState(NamedTuple):
    """What stays on the device between steps, beside the KV arrays. The last slot is scratch for padding."""

    last_token: jax.Array  # int32 [slots + 1]
    slots: SlotState


class LayerPool(NamedTuple):
    """One layer's page array. `v` is empty for a model that stores one number per token."""

    k: jax.Array  # [kv_heads, pages, page_size, head_dim]
    v: jax.Array


@dataclass(frozen=True, slots=True)
class StepShape:
    """The static side of a step: one compiled function per value."""

    rows: int
    samples: int
    plan: PlanShape
    mask_words: int = 0  # of a row's mask; 0: no pass

    @property
    def size(self) -> int:
        """int32s of the packed vector."""
        return (3 + self.mask_words) * self.rows + (2 + ROW_WORDS) * self.samples + self.plan.size()


class StepInputs(NamedTuple):
    """The packed vector taken apart: views for the host (numpy, to write) and for the device (to read) alike."""

    tokens: Any  # [rows]; below zero: what slot (-1 - token) sampled last
    positions: Any  # [rows]
    kv_slots: Any  # [rows] page * page_size + offset; 0 is scratch
    sample_rows: Any  # [samples]
    slots: Any  # [samples]
    sampling: Any  # [samples, ROW_WORDS], as `row_words` makes them
    mask: Any  # [rows, mask_words]; bit i % 32 of word i / 32: whether the row sees index i, if its plan lets it
    plan: Any  # [plan.size()]


def split(packed: Any, shape: StepShape) -> StepInputs:
    """Views into `packed`, in the order that the module docstring shows."""
    words = (shape.samples * ROW_WORDS, shape.rows * shape.mask_words, shape.plan.size())
    sizes = (shape.rows,) * 3 + (shape.samples,) * 2 + words
    ends = np.cumsum(sizes)
    parts = [packed[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    parts[5] = parts[5].reshape(shape.samples, ROW_WORDS)
    parts[6] = parts[6].reshape(shape.rows, shape.mask_words)
    return StepInputs(*parts)


class PagedKV:
    """`KVAccess` over the page arrays for one trace; holds the arrays as they are updated layer by layer."""

    def __init__(self, pools: Sequence[LayerPool], inputs: StepInputs, shape: StepShape) -> None:
        self.pools = list(pools)
        self._kv_slots: jax.Array = inputs.kv_slots
        self._plan = unpack(shape.plan, inputs.plan)
        self._shape = shape.plan
        self._mask = unpack_mask(inputs.mask) if shape.mask_words else None

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """See `KVAccess.attend`."""
        pool = self.pools[layer]
        pool = LayerPool(write_rows(pool.k, k, self._kv_slots), write_rows(pool.v, v, self._kv_slots))
        self.pools[layer] = pool
        return attend(q, pool.k, pool.v, self._plan, shape=self._shape, mask=self._mask)

    def visible_sum(self, layer: int, values: jax.Array) -> jax.Array:
        """See `KVAccess.visible_sum`."""
        pool = self.pools[layer]
        pool = pool._replace(k=write_rows(pool.k, values[:, None, None], self._kv_slots))
        self.pools[layer] = pool
        return visible_sum(pool.k, self._plan, shape=self._shape, mask=self._mask)


def unpack_mask(words: Int32[Array, "rows words"]) -> Bool[Array, "rows indices"]:
    """The bits of a mask, lowest first."""
    bits = words[:, :, None] >> jnp.arange(32) & 1
    return (bits != 0).reshape(words.shape[0], -1)


StepResult = tuple[tuple[LayerPool, ...], DeviceState, jax.Array, jax.Array | None]
StepFunction = Callable[[Params, tuple[LayerPool, ...], DeviceState, jax.Array], StepResult]


def make_step(model: Model, shape: StepShape) -> StepFunction:
    """The step for one shape, to be jitted with arguments 1 and 2 donated.

    Returns the pools, the state and int32 `[samples, OUTPUT_WIDTH]`: token, logprob bits, top ids, top logprob bits;
    of a pass also float32 logits `[samples, vocab]`.
    """

    def step(params: Params, pools: tuple[LayerPool, ...], state: DeviceState, packed: jax.Array) -> StepResult:
        inputs = split(packed, shape)
        from_slot = state.last_token[jnp.maximum(-1 - inputs.tokens, 0)]
        tokens = jnp.where(inputs.tokens < 0, from_slot, inputs.tokens)
        kv = PagedKV(pools, inputs, shape)
        hidden = model.hidden(params, tokens, inputs.positions, kv)
        logits = model.logits(params, hidden[inputs.sample_rows])
        drawn, slots = sample(logits, unpack_rows(inputs.sampling), inputs.slots, state.slots)
        last_token = state.last_token.at[inputs.slots].set(drawn.tokens)
        as_bits = [
            drawn.tokens[:, None],
            jax.lax.bitcast_convert_type(drawn.logprobs, jnp.int32)[:, None],
            drawn.top_ids,
            jax.lax.bitcast_convert_type(drawn.top_logprobs, jnp.int32),
        ]
        told = logits if shape.mask_words else None
        return tuple(kv.pools), DeviceState(last_token, slots), jnp.concatenate(as_bits, axis=1), told

    return step


class StepOutput(NamedTuple):
    """A step's results on the host, one row per sampled row."""

    tokens: np.ndarray  # int32 [samples]
    logprobs: np.ndarray  # float32 [samples]
    top_ids: np.ndarray  # int32 [samples, TOP_LOGPROBS]
    top_logprobs: np.ndarray  # float32 [samples, TOP_LOGPROBS]


def read_output(packed: np.ndarray) -> StepOutput:
    """Take apart what the step returned."""
    logprobs = np.ascontiguousarray(packed[:, 1]).view(np.float32)
    top_logprobs = np.ascontiguousarray(packed[:, 2 + TOP_LOGPROBS :]).view(np.float32)
    return StepOutput(packed[:, 0], logprobs, packed[:, 2 : 2 + TOP_LOGPROBS], top_logprobs)
