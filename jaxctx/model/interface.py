"""What the engine's step needs of a model, and what a model needs of the step. Neither knows more of the other.

A model turns rows of tokens into hidden states and hidden states into logits. Rows are a ragged batch: prompt chunks
and decode rows of many requests side by side. Which keys a row may see is decided by the `AttentionBackend`; a model
never sees a page, a context or a batch.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from jaxctx.model.config import AdapterSlots

Params = Any  # a pytree of arrays


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of one token's keys and values.

    `dtype` is the numerical type: "bfloat16", "float32", "uint32"; or of 8 bits, with a scale for each token and head,
    "int8", "float8_e4m3fn".
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    group: int = 1  # query heads that read a KV head

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.kv_heads * self.group


class AttentionBackend(Protocol):
    """Handed to `Model.hidden` for one trace; it stores the rows' KV and reads what each row may see."""

    looped: bool
    """Whether layers may be one body of a loop, `layer` being traced and `pools` carried. Else they are unrolled."""
    pools: Any
    """What is stored."""
    mesh: Mesh | None
    """The devices that parameters and heads are split over, see `sharding`; None: XLA alone splits, where it must."""

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Store k and v of the rows in `layer`, then attend: each row over what it sees, itself included.

        Softmax attention with scale head_dim**-0.5. q `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`
        in the KV dtype, in float32 if that has 8 bits; returns float32 `[rows, heads, head_dim]`.
        """


class Model(Protocol):
    """Static part of a model; its arrays are passed beside it, so that a jitted step takes them as arguments."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def attention_window(self) -> int | None:
        """Tokens, where it is a window that limits `max_positions`, and not what the model was made for."""

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
