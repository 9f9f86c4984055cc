"""What the engine's step needs of a model, and what a model needs of the step. Neither knows more of the other.

A model turns rows of tokens into hidden states and hidden states into logits. Rows are a ragged batch: prompt chunks
and decode rows of many requests side by side. Which keys a row may see is decided by the `AttentionBackend`; a model
never sees a page, a context or a batch.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jaxctx.model.config import AdapterSlots
from jaxctx_kernels import KernelName

Params = Any  # a pytree of arrays


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of one token's keys and values, and what attention does with them.

    `dtype` is the numerical type: "bfloat16", "float32", "uint32"; or of 8 bits, with a scale for each token and head,
    "int8", "float8_e4m3fn".

    `windows` has an entry for each layer, or none at all: in all layers a row sees everything then. A row at position p
    sees, of what it sees without one, the positions from `p - window + 1` on: as many tokens as the window has, itself
    included. None: everything. `soft_cap`: a scaled score s becomes `soft_cap * tanh(s / soft_cap)` in all layers,
    before what a row does not see is left out; None: it stays as it is. `sinks`: whether each query head has an
    attention sink in all layers, which a model hands to `AttentionBackend.attend`.

    Raises ValueError if there are windows for another number of layers, or if a window or the cap is not positive.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    group: int = 1  # query heads that read a KV head
    windows: tuple[int | None, ...] = ()  # tokens, of each layer
    soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows for {self.layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows {self.windows}: a row sees itself")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"a soft cap of {self.soft_cap}: scores have room above 0 only")

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.kv_heads * self.group

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The windows of the kinds of layer, each once, in the order of their first layers. One has no window: None."""
        return tuple(dict.fromkeys(self.windows)) or (None,)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Of each layer its place in `kinds`."""
        kinds = self.kinds
        return tuple(kinds.index(window) for window in self.windows) or (0,) * self.layers

    @property
    def has_windows(self) -> bool:
        """Whether in any layer a row does not see everything before it."""
        return self.kinds != (None,)

    def within(self, tokens: int) -> "KVSpec":
        """The same for contexts of at most so many tokens: without the windows that are as long."""
        windows = tuple(None if window is None or window >= tokens else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else ())


class AttentionBackend(Protocol):
    """Handed to `Model.hidden` for one trace; it stores the rows' KV and reads what each row may see."""

    looped: bool
    """Whether layers may be one body of a loop, `layer` being traced and `pools` carried. Else they are unrolled."""
    pools: Any
    """What is stored."""
    mesh: Mesh | None
    """The devices that parameters and heads are split over, see `sharding`; None: XLA alone splits, where it must."""
    padding: jax.Array | None
    """Bool `[rows]`: rows that nothing reads, whose values may be any; None: there is none."""
    kernel: KernelName
    """What computes attention, and so of which kind the device is; "reference" says nothing of it."""

    def attend(
        self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Store k and v of the rows in `layer`, then attend: each row over what it sees there, itself included.

        Softmax attention with scale head_dim**-0.5, with the layer's window and the soft cap of `KVSpec`. q
        `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]` in the KV dtype, in float32 if that has 8 bits;
        returns float32 `[rows, heads, head_dim]`. `sinks`: of the layer, float32 `[heads]` in the order of q's heads,
        scores that the softmax of every row has beside those of tokens, with no value; None: `KVSpec` has none.
        """


class Model(Protocol):
    """Static part of a model; its arrays are passed beside it, so that a jitted step takes them as arguments."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def context_reason(self, tokens: int) -> str:
        """What to tell users about contexts of up to so many tokens: why not more, or what that changes; or nothing."""

    @property
    def kv(self) -> KVSpec: ...

    @property
    def adapter_slots(self) -> AdapterSlots | None:
        """Places for adapters among the parameters; None: the model takes none."""

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        kv: AttentionBackend,
        adapters: jax.Array | None = None,
    ) -> jax.Array:
        """tokens, positions int32 `[rows]` → hidden states `[rows, width]` after the final norm.

        `adapters` int32 `[rows]`: the slot of each row's adapter, 0 for none. It is there where the model has slots.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden `[rows, width]` → float32 `[rows, vocab_size]`."""
