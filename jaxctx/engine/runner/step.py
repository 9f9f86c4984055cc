"""The step: one ragged batch through model and sampling, as one function of arrays.

Everything a step needs to know travels in one packed int32 vector (one host-to-device copy takes 9 µs, eight take 290).
The KV arrays and the per-slot state are donated and updated in place. A row's token is either a number from the host
or "what slot s sampled last", which is still on the device: step n+1 is dispatched before the host has seen step n.

A *custom-mask step* is one whose rows have masks and whose logits are returned whole; a row's mask has one bit for
every index of a context. Other steps carry neither.

Layers of one *kind* have the same sliding window, or none. Attention is planned once a step for each kind: the metadata
of a kind lists what its layers read. Under masks a window is a matter of positions, which may be others than indices:
there the device narrows the masks by the positions of all indices of the context.

    packed:  tokens[T] positions[T] kv_slots[T] | sample_rows[S] slots[S] sampling[S, ROW_WORDS]
             | mask[T, M] index_positions[32 M] | metadata of each kind

Of a model with slots for adapters, `adapters[T]` stands behind `kv_slots`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxctx_kernels as kernels
from jaxctx.model.interface import KVSpec, Model, Params
from jaxctx.model.sampling import TOP_LOGPROBS, Sampled, SlotState, sample, unpack_bits
from jaxctx.model.sampling_options import ROW_WORDS, SamplingBatch
from jaxctx.model.sharding import EVERY_DEVICE, KV

_FORMATS = ["<i4", "<f4", f"{TOP_LOGPROBS}<i4", f"{TOP_LOGPROBS}<f4"]
PADDING = np.iinfo(np.int32).min
"""The token of a row that belongs to no request."""

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
    metadata: tuple[kernels.MetadataShape, ...]  # of each kind of layer, see `KVSpec.kinds`
    mask_words: int = 0  # int32 words of a row's mask; 0: rows have no masks
    mask_windows: tuple[int | None, ...] = ()  # that masks are narrowed by, one for each kind; empty: by none
    has_adapters: bool = False  # whether the model has slots for adapters

    def __str__(self) -> str:
        return f"{'custom-mask step' if self.mask_words else 'step'} of {self.rows} rows"

    @property
    def size(self) -> int:
        """int32s of the packed vector."""
        row_words = 3 + self.has_adapters + self.mask_words  # token, position, KV slot, adapter
        sample_words = 2 + ROW_WORDS  # row, slot
        metadata = sum(kind.size() for kind in self.metadata)
        return row_words * self.rows + sample_words * self.samples + self.index_positions + metadata

    @property
    def index_positions(self) -> int:
        """int32s: the positions of all indices that a mask has, if windows narrow it."""
        return 32 * self.mask_words if self.mask_windows else 0


class StepInputs(NamedTuple):
    """The packed vector taken apart: views for the host (numpy, to write) and for the device (to read) alike."""

    tokens: Any  # [rows]; below zero: what slot (-1 - token) sampled last, or PADDING
    positions: Any  # [rows]
    kv_slots: Any  # [rows]: page * page_size + offset; 0 is in the scratch page
    adapters: Any  # [rows]: the slot of the row's adapter, 0: none; [0] where the model has no slots for adapters
    sample_rows: Any  # [samples]: the row that each sample is drawn from
    slots: Any  # [samples]: the slot that remembers the sampled token
    sampling: Any  # [samples, ROW_WORDS], as `row_words` makes them
    mask: Any  # [rows, mask_words]; bit i % 32 of word i / 32: whether the row sees index i, if the metadata lets it
    index_positions: Any  # [32 * mask_words], or [0]: the position of each index of the context
    metadata: tuple[Any, ...]  # [size()] of each kind of layer


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
        shape.index_positions,
        *(kind.size() for kind in shape.metadata),
    )
    parts = [packed[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    tokens, positions, kv_slots, adapters, sample_rows, slots, sampling, mask, index_positions, *metadata = parts
    return StepInputs(
        tokens=tokens,
        positions=positions,
        kv_slots=kv_slots,
        adapters=adapters,
        sample_rows=sample_rows,
        slots=slots,
        sampling=sampling.reshape(samples, ROW_WORDS),
        mask=mask.reshape(rows, shape.mask_words),
        index_positions=index_positions,
        metadata=tuple(metadata),
    )


def write_metadata(segments: Sequence[kernels.Segment], shape: StepShape, views: StepInputs) -> None:
    """Write the metadata of each kind of layer: what rows of `segments` attend to. All else has been written before.

    Raises what `build_attention_metadata` raises.
    """
    windows = shape.mask_windows or (None,) * len(shape.metadata)
    for window, metadata_shape, out in zip(windows, shape.metadata, views.metadata, strict=True):
        seen = segments if window is None else [_without_hidden(each, views, window) for each in segments]
        kernels.build_attention_metadata(seen, metadata_shape, out)


def _without_hidden(segment: kernels.Segment, views: StepInputs, window: int) -> kernels.Segment:
    """A segment of rows with masks, without the first tokens, if these are before the windows of all rows."""
    rows = slice(segment.first_row, segment.first_row + segment.rows)
    is_seen = views.index_positions[: segment.position + 1] > views.positions[rows].min() - window
    return replace(segment, first_token=int(is_seen.argmax()))


def unpack_mask(words: jax.Array) -> jax.Array:
    """Bool `[rows, 32 * mask_words]` of int32 `[rows, mask_words]`: whether a row sees an index."""
    return unpack_bits(words)


def layer_masks(inputs: StepInputs, shape: StepShape) -> tuple[jax.Array | None, ...]:
    """What rows may see by their masks in layers of each kind, bool `[rows, 32 * mask_words]`; None: rows have none."""
    if not shape.mask_words:
        return (None,) * len(shape.metadata)
    mask = unpack_mask(inputs.mask)
    if not shape.mask_windows:
        return (mask,) * len(shape.metadata)
    distance = inputs.positions[:, None] - inputs.index_positions
    return tuple(mask if window is None else mask & (distance < window) for window in shape.mask_windows)


class KindOfLayer(NamedTuple):
    """What layers of one kind read."""

    metadata: kernels.AttentionMetadata
    mask: jax.Array | None  # bool [rows, indices]

    def from_page(self, page: int | jax.Array) -> "KindOfLayer":
        """The same, of page arrays whose page 0 is at `page` of one that holds all layers."""
        return self._replace(metadata=self.metadata._replace(pages=self.metadata.pages + page))


class PagedAttention:
    """The `AttentionBackend` over the page arrays for one trace.

    It holds the arrays as they are updated layer by layer. `looped`, see `AttentionBackend`, is set where one
    `KVCache` holds the pages of all layers.
    """

    def __init__(self, pools: Pools, spec: KVSpec, inputs: StepInputs, shape: StepShape, mesh: Mesh | None = None):
        """`spec`: of the model. `mesh`: parameters and pools are split over it."""
        self.pools = tuple(pools)
        self.mesh = mesh
        self.padding: jax.Array | None = inputs.tokens == PADDING
        of_layers = (each.kernel for each in shape.metadata)
        self.kernel: kernels.KernelName = next((name for name in of_layers if name != "reference"), "reference")
        self.looped = len(pools) < spec.layers
        self.kv_slots: jax.Array = inputs.kv_slots
        self.shapes = shape.metadata
        """Shapes of the metadata of each kind of layer."""
        metadata = [*map(kernels.unpack_metadata, shape.metadata, inputs.metadata)]
        self.kinds = tuple(map(KindOfLayer, metadata, layer_masks(inputs, shape)))
        self.kind_of_layer = spec.kind_of_layer
        """The place of each layer's kind in `kinds`."""
        self._soft_cap = spec.soft_cap
        self._write_and_attend = [_attention(each, spec.soft_cap, mesh) for each in shape.metadata]

    def attend(
        self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Write the rows' k and v into the layer's pages, then attend. For shapes see `AttentionBackend`."""
        kv_slots, kinds, index = self.kv_slots, self.kinds, layer
        if self.looped:  # all layers share one array: address the pages of this one
            first_page, index = layer * self.shapes[0].pool_pages, 0
            kv_slots = kv_slots + first_page * self.shapes[0].page_size
            kinds = tuple(kind.from_page(first_page) for kind in kinds)
        if len(kinds) == 1 or isinstance(layer, int):
            number = self.kind_of_layer[layer] if len(kinds) > 1 else 0
            write_and_attend = self._write_and_attend[number]
            attended, cache = write_and_attend(q, k, v, self.pools[index], kv_slots, *kinds[number], sinks)
        else:
            cache = _write(self.pools[index], k, v, kv_slots, self.shapes[0].kernel)
            attended = self._attend_to_kind(layer, q, cache, kinds, k.shape[1], sinks)
        self.pools = (*self.pools[:index], cache, *self.pools[index + 1 :])
        return attended

    def _attend_to_kind(
        self,
        layer: jax.Array,
        q: jax.Array,
        cache: KVCache,
        kinds: Sequence[KindOfLayer],
        kv_heads: int,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attend in a layer that only the device knows, and with it its kind."""

        def branch(shape: kernels.MetadataShape, kind: KindOfLayer) -> Callable[..., jax.Array]:
            attend = partial(kernels.attend, shape=shape, kv_heads=kv_heads, soft_cap=self._soft_cap)
            return lambda q, cache, sinks: attend(q, *cache, *kind, sinks=sinks)

        number = jnp.asarray(self.kind_of_layer)[layer]
        attended: jax.Array = jax.lax.switch(number, list(map(branch, self.shapes, kinds)), q, cache, sinks)
        return attended


Attended: TypeAlias = tuple[jax.Array, KVCache]


def _attention(shape: kernels.MetadataShape, soft_cap: float | None, mesh: Mesh | None) -> Callable[..., Attended]:
    """`write_and_attend` for this shape, without it.

    XLA cannot split a kernel over a mesh. So each device writes and attends with its own heads, and has their sinks: no
    head needs another one, and all have the same slots and metadata. Devices along "group" have other query heads of
    the same KV heads.
    """
    local = partial(write_and_attend, shape=shape, soft_cap=soft_cap)
    if mesh is None:
        return local
    heads, kv_heads = PartitionSpec(None, EVERY_DEVICE), PartitionSpec(None, KV)  # the second axis, of rows
    cache, replicated = PartitionSpec(KV), PartitionSpec()
    sinks = PartitionSpec(EVERY_DEVICE)
    read = (heads, kv_heads, kv_heads, cache, replicated, replicated, replicated, sinks)
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
    sinks: jax.Array | None,
    *,
    shape: kernels.MetadataShape,
    soft_cap: float | None,
) -> Attended:
    """Write k and v into one layer's pages, then attend: float32 `[rows, heads, head_dim]`, and the pages."""
    cache = _write(cache, k, v, kv_slots, shape.kernel)
    attend = partial(kernels.attend, shape=shape, kv_heads=k.shape[1], soft_cap=soft_cap)
    return attend(q, *cache, metadata, mask, sinks=sinks), cache


def _write(cache: KVCache, k: jax.Array, v: jax.Array, kv_slots: jax.Array, kernel: kernels.KernelName) -> KVCache:
    return KVCache(*kernels.write_rows(cache.k, cache.v, k, v, kv_slots, kernel=kernel))


StepResult = tuple[Pools, SlotState, jax.Array, jax.Array | None]


def step(
    model: Model,
    spec: KVSpec,
    shape: StepShape,
    mesh: Mesh | None,
    params: Params,
    pools: Pools,
    state: SlotState,
    packed: jax.Array,
) -> StepResult:
    """Run one step; `packed` is int32 `[shape.size]`. `spec`: `model.kv`, for the contexts of the engine.

    Returns the pools, the state and the bits of OUTPUT, int32 `[samples, words]`; of a custom-mask step also its logits
    `[samples, vocab_size]` in float32.
    """
    inputs = unpack_inputs(packed, shape)
    from_slot = state.last_token[jnp.maximum(-1 - inputs.tokens, 0)]
    tokens = jnp.where(inputs.tokens < 0, from_slot, inputs.tokens)
    tokens = jnp.where(inputs.tokens == PADDING, 0, tokens)
    kv = PagedAttention(pools, spec, inputs, shape, mesh)
    hidden = model.hidden(params, tokens, inputs.positions, kv, inputs.adapters if shape.has_adapters else None)
    logits = model.logits(params, hidden[inputs.sample_rows])
    sampled, state = sample(logits, SamplingBatch(inputs.sampling), inputs.slots, state, mesh)
    as_bits = [jax.lax.bitcast_convert_type(each, jnp.int32).reshape(shape.samples, -1) for each in sampled]
    return kv.pools, state, jnp.concatenate(as_bits, axis=1), logits if shape.mask_words else None


def make_step(
    model: Model, spec: KVSpec, shape: StepShape, mesh: Mesh | None = None
) -> Callable[[Params, Pools, SlotState, jax.Array], StepResult]:
    """`step` for one shape, to be jitted with arguments 1 and 2 donated.

    `mesh`: parameters, pools and vocabulary are split over it.
    """
    return partial(step, model, spec, shape, mesh)


def read_output(packed: np.ndarray) -> Sampled:
    """What the step returned, int32 `[samples, words]`, on the host: numpy arrays with one row per sample."""
    rows = np.ascontiguousarray(packed).view(OUTPUT)[:, 0]  # a device's strides may be others than the host's
    return Sampled._make(rows[name] for name in Sampled._fields)
