"""The step: one ragged batch through model and sampling, as one function of arrays; and what else is traced.

Everything a step needs to know travels in one packed int32 vector (one host-to-device copy takes 9 µs, eight take 290).
The KV arrays and the per-slot state are donated and updated in place. A row's token is either a number from the host
or "what slot s sampled last", which is still on the device: step n+1 is dispatched before the host has seen step n.

A *pass* is a step whose rows have masks and whose logits are returned whole; a row's mask has a bit for every index of
a context. Other steps carry neither.

    packed:  tokens[T] positions[T] kv_slots[T] | sample_rows[S] slots[S] sampling[S, ROW_WORDS] | mask[T, M] | plan

Between steps whole pages of all layers are copied, read out and written; page 0 is scratch and pads. Outside the pools
a page is one array of the dtype in which the pools store it, `[layers, 2, kv_heads, page_size, head_dim]`: keys and
values; or of bytes where they store 8 bits, a scale of four after each token's. So a page can be kept, checked and
given up on its own, and its bytes are the same on every platform.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import jaxctx_kernels as kernels
from jaxctx.model.interface import Model, Params
from jaxctx.model.sampling import ROW_WORDS, TOP_LOGPROBS, Sampled, SlotState, sample, unpack_rows
from jaxctx.model.sharding import TENSOR

_FORMATS = ["<i4", "<f4", f"{TOP_LOGPROBS}<i4", f"{TOP_LOGPROBS}<f4"]
OUTPUT = np.dtype({"names": Sampled._fields, "formats": _FORMATS})  # what a step tells of a sampled row


class LayerPool(NamedTuple):
    """Page arrays of a layer; or of all layers, the pages of each after those of the one before."""

    k: kernels.KVPages  # [kv_heads, pages, page_size, head_dim]; of 8 bits with scales
    v: kernels.KVPages


Pools: TypeAlias = tuple[LayerPool, ...]
Pages: TypeAlias = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The static side of a step: one compiled function per value."""

    rows: int
    samples: int
    plan: kernels.MetadataShape
    mask_words: int = 0  # of a row's mask; 0: no pass

    def __str__(self) -> str:
        return f"{'pass' if self.mask_words else 'step'} of {self.rows} rows"

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
    parts = [packed[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
    parts[5] = parts[5].reshape(shape.samples, ROW_WORDS)
    parts[6] = parts[6].reshape(shape.rows, shape.mask_words)
    return StepInputs(*parts)


class PagedKV:
    """`KVAccess` over the page arrays for one trace; holds the arrays as they are updated layer by layer."""

    def __init__(
        self, pools: Pools, layers: int, inputs: StepInputs, shape: StepShape, mesh: Mesh | None = None
    ) -> None:
        """`mesh`: the pools are split over it."""
        self.pools = tuple(pools)
        self.looped = len(pools) < layers
        self.kv_slots: jax.Array = inputs.kv_slots
        self.plan = kernels.unpack_metadata(shape.plan, inputs.plan)
        self.shape = shape.plan
        bits = inputs.mask[:, :, None] >> jnp.arange(32) & 1  # lowest first
        self.mask = (bits != 0).reshape(shape.rows, -1) if shape.mask_words else None
        self._attend: Callable[..., jax.Array] = partial(kernels.attend, shape=self.shape)
        if mesh is not None:  # XLA cannot split a kernel; no head needs another, and all have the same plan
            heads, pool, whole = PartitionSpec(None, TENSOR), PartitionSpec(TENSOR), PartitionSpec()
            read = (heads, pool, pool, whole, whole)
            self._attend = jax.shard_map(self._attend, mesh=mesh, in_specs=read, out_specs=heads, check_vma=False)

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        slots, plan, at = self.kv_slots, self.plan, layer
        if self.looped:
            first, at = layer * self.shape.pool_pages, 0
            slots, plan = slots + first * self.shape.page_size, plan._replace(pages=plan.pages + first)
        pool = self.pools[at]
        pool = LayerPool(kernels.write_kv(pool.k, k, slots), kernels.write_kv(pool.v, v, slots))
        self.pools = (*self.pools[:at], pool, *self.pools[at + 1 :])
        return self._attend(q, pool.k, pool.v, plan, self.mask)


StepResult = tuple[Pools, SlotState, jax.Array, jax.Array | None]


def make_step(
    model: Model, shape: StepShape, mesh: Mesh | None = None
) -> Callable[[Params, Pools, SlotState, jax.Array], StepResult]:
    """The step for one shape, to be jitted with arguments 1 and 2 donated. `mesh`: the pools are split over it.

    Returns the pools, the state and the bits of OUTPUT, int32 `[samples, words]`; of a pass also its logits in float32.
    """

    def step(params: Params, pools: Pools, state: SlotState, packed: jax.Array) -> StepResult:
        inputs = split(packed, shape)
        from_slot = state.last_token[jnp.maximum(-1 - inputs.tokens, 0)]
        tokens = jnp.where(inputs.tokens < 0, from_slot, inputs.tokens)
        kv = PagedKV(pools, model.kv.layers, inputs, shape, mesh)
        hidden = model.hidden(params, tokens, inputs.positions, kv)
        logits = model.logits(params, hidden[inputs.sample_rows])
        drawn, state = sample(logits, unpack_rows(inputs.sampling), inputs.slots, state)
        as_bits = [jax.lax.bitcast_convert_type(each, jnp.int32).reshape(shape.samples, -1) for each in drawn]
        return kv.pools, state, jnp.concatenate(as_bits, axis=1), logits if shape.mask_words else None

    return step


def read_output(packed: np.ndarray) -> Sampled:
    """What the step returned, on the host: numpy arrays, one row per sampled row."""
    rows = np.ascontiguousarray(packed).view(OUTPUT)[:, 0]  # as it is on a host; a device's strides may be others
    return Sampled._make(rows[name] for name in Sampled._fields)


def in_layers(pools: Pools, layers: int, pages: jax.Array) -> jax.Array:
    """The pages `[n]` of each of a pool's layers, one layer after the other."""
    held = layers // len(pools)
    size = jax.tree.leaves(pools)[0].shape[1] // held
    return jnp.concatenate([pages + n * size for n in range(held)])


def copy_in(layers: int, pools: Pools, pairs: jax.Array) -> Pools:
    """Copy pages `pairs[0]` to `pairs[1]`; int32 `[2, n]`."""
    sources, targets = (in_layers(pools, layers, pages) for pages in pairs)
    copied: Pools = kernels.copy_pages(pools, sources, targets)
    return copied


def save_from(layers: int, pools: Pools, pages: jax.Array) -> Pages:
    """The pages `[n]`, an array each."""
    ids = in_layers(pools, layers, pages)
    stacked = jnp.concatenate([jnp.stack([kernels.read_pages(array, ids) for array in pool], 1) for pool in pools])
    stacked = stacked.reshape(layers, len(pages), *stacked.shape[1:])
    return tuple(stacked[:, i] for i in range(len(pages)))


def load_into(layers: int, pools: Pools, pages: jax.Array, data: Pages, on_device: Sharding) -> Pools:
    """Write an array of `data` to each of the pages `[n]`, once it lies where `on_device` says."""
    here = [jax.device_put(page, on_device) for page in data]
    ids, held = in_layers(pools, layers, pages).reshape(-1, len(here)), layers // len(pools)
    written = list(pools)
    for layer in range(layers):
        pool, of_layer, own = layer // held, ids[layer % held], [page[layer] for page in here]
        arrays = enumerate(written[pool])
        written[pool] = LayerPool(*(kernels.write_pages(a, of_layer, [page[i] for page in own]) for i, a in arrays))
    return tuple(written)


def page_struct(layers: int, pools: Pools) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a page outside the pools, split over devices as the pools are."""
    page = jax.eval_shape(partial(save_from, layers), pools, jax.ShapeDtypeStruct((1,), jnp.int32))[0]
    sharding = jax.tree.leaves(pools)[0].sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, None, *sharding.spec[:1])
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=sharding)


def on_host(sharding: Sharding) -> Sharding:
    """The same in host memory that the device can reach, where there is such memory; else where it was."""
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    return sharding.with_memory_kind("pinned_host") if "pinned_host" in kinds else sharding
