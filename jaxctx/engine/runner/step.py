"""The step: one ragged batch through model and sampling, as one function of arrays.

Everything a step needs to know travels in one packed int32 vector (one host-to-device copy takes 9 µs, eight take 290).
The KV arrays and the per-slot state are donated and updated in place. A row's token is either a number from the host
or "what slot s sampled last", which is still on the device: step n+1 is dispatched before the host has seen step n.

A *custom-mask step* is one whose rows have masks and whose logits are returned whole; a row's mask has one bit for
every index of a context. Other steps carry neither.

    packed:  tokens[T] positions[T] kv_slots[T] | sample_rows[S] slots[S] sampling[S, ROW_WORDS] | mask[T, M] | metadata

Of a model with slots for adapters, `adapters[T]` stands behind `kv_slots`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxctx_kernels as kernels
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import ROW_WORDS, TOP_LOGPROBS, Sampled, SlotState, sample, unpack_bits, unpack_rows
from jaxctx.model.sharding import EVERY_DEVICE, KV

_FORMATS = ["<i4", "<f4", f"{TOP_LOGPROBS}<i4", f"{TOP_LOGPROBS}<f4"]
OUTPUT = np.dtype({"names": Sampled._fields, "formats": _FORMATS})
"""What a step returns for each sampled row."""


class KVCache(NamedTuple):
    """Page arrays of one layer; or of all layers, the pages of each layer after those of the layer before."""

    k: kernels.KVPages  # [kv_heads, pages, page_size, head_dim]; with scales where 8 bits are stored
    v: kernels.KVPages


Pools: TypeAlias = tuple[KVCache, ...]
"""The KV cache of the whole model: one `KVCache` for each layer, or a single one that holds all layers."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The static side of a step. One function is compiled for each value."""

    rows: int
    samples: int
    metadata: kernels.MetadataShape
    mask_words: int = 0  # int32 words of a row's mask; 0: rows have no masks
    has_adapters: bool = False  # whether the model has slots for adapters

    def __str__(self) -> str:
        return f"{'custom-mask step' if self.mask_words else 'step'} of {self.rows} rows"

    @property
    def size(self) -> int:
        """int32s of the packed vector."""
        row_words = 3 + self.has_adapters + self.mask_words  # token, position, KV slot, adapter
        sample_words = 2 + ROW_WORDS  # row, slot
        return row_words * self.rows + sample_words * self.samples + self.metadata.size()


class StepInputs(NamedTuple):
    """The packed vector taken apart: views for the host (numpy, to write) and for the device (to read) alike."""

    tokens: Any  # [rows]; below zero: what slot (-1 - token) sampled last
    positions: Any  # [rows]
    kv_slots: Any  # [rows]: page * page_size + offset; 0 is in the scratch page
    adapters: Any  # [rows]: the slot of the row's adapter, 0: none; [0] where the model has no slots for adapters
    sample_rows: Any  # [samples]: the row that each sample is drawn from
    slots: Any  # [samples]: the slot that remembers the sampled token
    sampling: Any  # [samples, ROW_WORDS], as `row_words` makes them
    mask: Any  # [rows, mask_words]; bit i % 32 of word i / 32: whether the row sees index i, if the metadata lets it
    metadata: Any  # [metadata.size()]


def unpack_inputs(packed: Any, shape: StepShape) -> StepInputs:
    """Views into `packed`, int32 `[shape.size]`, in the order that the module docstring shows."""
    rows, samples = shape.rows, shape.samples
    sizes = (
        rows,  # tokens
        rows,  # positions
        rows,  # kv_slots
        rows * shape.has_adapters,  # adapters
        samples,  # sample_rows
        samples,  # slots
        samples * ROW_WORDS,  # sampling
        rows * shape.mask_words,  # mask
        shape.metadata.size(),
    )
    parts = [packed[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    tokens, positions, kv_slots, adapters, sample_rows, slots, sampling, mask, metadata = parts
    return StepInputs(
        tokens=tokens,
        positions=positions,
        kv_slots=kv_slots,
        adapters=adapters,
        sample_rows=sample_rows,
        slots=slots,
        sampling=sampling.reshape(samples, ROW_WORDS),
        mask=mask.reshape(rows, shape.mask_words),
        metadata=metadata,
    )


def unpack_mask(words: jax.Array) -> jax.Array:
    """Bool `[rows, 32 * mask_words]` of int32 `[rows, mask_words]`: whether a row sees an index."""
    return unpack_bits(words)


class PagedAttention:
    """The `AttentionBackend` over the page arrays for one trace.

    It holds the arrays as they are updated layer by layer. `looped`, see `AttentionBackend`, is set where one
    `KVCache` holds the pages of all layers.
    """

    def __init__(
        self, pools: Pools, layers: int, inputs: StepInputs, shape: StepShape, mesh: Mesh | None = None
    ) -> None:
        """`mesh`: parameters and pools are split over it."""
        self.pools = tuple(pools)
        self.mesh = mesh
        self.looped = len(pools) < layers
        self.kv_slots: jax.Array = inputs.kv_slots
        self.metadata = kernels.unpack_metadata(shape.metadata, inputs.metadata)
        self.metadata_shape = shape.metadata
        self.mask = unpack_mask(inputs.mask) if shape.mask_words else None
        self._write_and_attend = _attention(shape.metadata, mesh)

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Write the rows' k and v into the layer's pages, then attend. For shapes see `AttentionBackend`."""
        kv_slots, metadata, index = self.kv_slots, self.metadata, layer
        if self.looped:  # all layers share one array: address the pages of this one
            first_page, index = layer * self.metadata_shape.pool_pages, 0
            kv_slots = kv_slots + first_page * self.metadata_shape.page_size
            metadata = metadata._replace(pages=metadata.pages + first_page)
        attended, cache = self._write_and_attend(q, k, v, self.pools[index], kv_slots, metadata, self.mask)
        self.pools = (*self.pools[:index], cache, *self.pools[index + 1 :])
        return attended


Attended: TypeAlias = tuple[jax.Array, KVCache]


def _attention(shape: kernels.MetadataShape, mesh: Mesh | None) -> Callable[..., Attended]:
    """`write_and_attend` for this shape, without it.

    XLA cannot split a kernel over a mesh. So each device writes and attends with its own heads: no head needs another
    one, and all have the same slots and metadata. Devices along "group" have other query heads of the same KV heads.
    """
    local = partial(write_and_attend, shape=shape)
    if mesh is None:
        return local
    heads, kv_heads = PartitionSpec(None, EVERY_DEVICE), PartitionSpec(None, KV)  # the second axis, of rows
    cache, replicated = PartitionSpec(KV), PartitionSpec()
    read = (heads, kv_heads, kv_heads, cache, replicated, replicated, replicated)
    sharded: Callable[..., Attended] = jax.shard_map(
        local, mesh=mesh, in_specs=read, out_specs=(heads, cache), check_vma=False
    )
    return sharded


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: KVCache,
    kv_slots: jax.Array,
    metadata: kernels.AttentionMetadata,
    mask: jax.Array | None,
    *,
    shape: kernels.MetadataShape,
) -> Attended:
    """Write k and v into one layer's pages, then attend: float32 `[rows, heads, head_dim]`, and the pages."""
    cache = KVCache(*kernels.write_rows(cache.k, cache.v, k, v, kv_slots, kernel=shape.kernel))
    return kernels.attend(q, cache.k, cache.v, metadata, mask, shape=shape), cache


StepResult = tuple[Pools, SlotState, jax.Array, jax.Array | None]


def step(
    model: Model,
    shape: StepShape,
    mesh: Mesh | None,
    params: Params,
    pools: Pools,
    state: SlotState,
    packed: jax.Array,
) -> StepResult:
    """Run one step; `packed` is int32 `[shape.size]`.

    Returns the pools, the state and the bits of OUTPUT, int32 `[samples, words]`; of a custom-mask step also its logits
    `[samples, vocab_size]` in float32.
    """
    inputs = unpack_inputs(packed, shape)
    from_slot = state.last_token[jnp.maximum(-1 - inputs.tokens, 0)]
    tokens = jnp.where(inputs.tokens < 0, from_slot, inputs.tokens)
    kv = PagedAttention(pools, model.kv.layers, inputs, shape, mesh)
    hidden = model.hidden(params, tokens, inputs.positions, kv, inputs.adapters if shape.has_adapters else None)
    logits = model.logits(params, hidden[inputs.sample_rows])
    sampled, state = sample(logits, unpack_rows(inputs.sampling), inputs.slots, state, mesh)
    as_bits = [jax.lax.bitcast_convert_type(each, jnp.int32).reshape(shape.samples, -1) for each in sampled]
    return kv.pools, state, jnp.concatenate(as_bits, axis=1), logits if shape.mask_words else None


def make_step(
    model: Model, shape: StepShape, mesh: Mesh | None = None
) -> Callable[[Params, Pools, SlotState, jax.Array], StepResult]:
    """`step` for one shape, to be jitted with arguments 1 and 2 donated.

    `mesh`: parameters, pools and vocabulary are split over it.
    """
    return partial(step, model, shape, mesh)


def read_output(packed: np.ndarray) -> Sampled:
    """What the step returned, int32 `[samples, words]`, on the host: numpy arrays with one row per sample."""
    rows = np.ascontiguousarray(packed).view(OUTPUT)[:, 0]  # a device's strides may be others than the host's
    return Sampled._make(rows[name] for name in Sampled._fields)
