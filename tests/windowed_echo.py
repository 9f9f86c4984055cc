"""An echo model of several layers with sliding windows: what `tests.echo` is for attention of one kind.

A layer adds up, exactly, the values of all tokens that a row sees in it, and what comes out is the next layer's value.
So any token too many or too few, in any layer, changes every later token.

    KV of a token in layer 0         token_value(token, position)
    KV of a token in layer n + 1     mix(its KV in layer n + the sum of all KV that it sees in layer n)
    logits                           those of the echo model, of the same behind the last layer
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxctx.engine.factory import ServedModel
from jaxctx.engine.runner.step import PagedAttention
from jaxctx.model.config import AdapterSlots
from jaxctx.model.interface import KVSpec, Params
from tests.echo import VOCAB_SIZE, EchoModel, echo_model, token_value
from tests.sums import stored_sum

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WindowedEcho:
    """Implements `interface.Model`; its parameters are the empty tuple."""

    windows: tuple[int | None, ...]
    max_positions: int = 1 << 20
    vocab_size: int = VOCAB_SIZE
    adapter_slots: AdapterSlots | None = None

    @property
    def kv(self) -> KVSpec:
        return KVSpec(layers=len(self.windows), kv_heads=1, head_dim=1, dtype="uint32", windows=self.windows)

    def context_reason(self, tokens: int) -> str:
        return ""

    def hidden(
        self,
        params: Params,
        tokens: Int32[Array, " rows"],
        positions: Int32[Array, " rows"],
        kv: PagedAttention,
        adapters: jax.Array | None = None,
    ) -> Float32[Array, "rows 2"]:
        values = token_value(tokens, positions)
        for layer in range(len(self.windows)):
            values = mixed(values + stored_sum(kv, values, layer))
        return jnp.stack([values >> 16, values & 0xFFFF], axis=1).astype(jnp.float32)

    def logits(self, params: Params, hidden: Float32[Array, "rows 2"]) -> Float32[Array, "rows vocab"]:
        return EchoModel().logits(params, hidden)


def mixed(values: Any) -> Any:
    """uint32 values, of JAX or numpy, that have little to do with the given ones."""
    values = (values ^ (values >> 15)) * np.uint32(0x2C1B3C6D)
    return values ^ (values >> 13)


@dataclass
class Truth:
    """What the model answers about tokens whose positions and masks are known, on the host."""

    windows: tuple[int | None, ...]

    def values(self, tokens: Sequence[int], positions: Sequence[int], masks: Sequence[Ranges]) -> np.ndarray:
        """uint32 `[tokens]` behind the last layer. An empty mask: all up to the token itself."""
        at = np.array(positions, np.int64)
        allowed = np.tri(len(tokens), dtype=np.bool_)
        for index, ranges in enumerate(masks):
            for number, (start, stop) in enumerate(ranges):
                allowed[index] &= number > 0
                allowed[index, start:stop] = True
        values = token_value(np.array(tokens, np.uint32), at.astype(np.uint32))
        for window in self.windows:
            seen = allowed if window is None else allowed & (at[:, None] - at < window)
            values = mixed(values + np.where(seen, values, 0).sum(1, dtype=np.uint32))
        return values

    def next_token(self, tokens: Sequence[int], positions: Sequence[int], masks: Sequence[Ranges]) -> int:
        """What greedy sampling picks behind the last token."""
        last = self.values(tokens, positions, masks)[-1:]
        halves = jnp.asarray(np.stack([last >> 16, last & 0xFFFF], 1), jnp.float32)
        return int(_logits(halves)[0].argmax())


_logits = jax.jit(lambda hidden: EchoModel().logits((), hidden))


def windowed_echo(windows: tuple[int | None, ...]) -> ServedModel:
    """The whole of it, as the engine takes it."""
    name = "-".join("all" if window is None else str(window) for window in windows)
    return replace(echo_model(), model=WindowedEcho(windows), revision=f"windowed-echo-{name}")
