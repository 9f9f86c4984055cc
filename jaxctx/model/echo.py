"""Echo: a model whose next token is a hash of every token before it, read back from the KV pages.

It runs in the real step through the real page table, at thousands of requests a second, and any aliased, stale or lost
page changes every later token. It stands in for the transformer in tests of everything around a model. It never learns,
has no parameters, and uses integers throughout, so its answers are exact on every backend and in every batch.

    KV of a token   mix(token, position)             one uint32
    hidden state    the sum of all visible KV, halved into two 16-bit numbers (exact in any float type above bfloat16)
    logits          a permutation of 0..V-1 chosen by that sum, scaled to [-4, 4): no ties

Its arithmetic works on numpy arrays too, for tests to compare with. Its tokenizer is `jaxctx.model.text.echo_text`.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxctx.model.interface import KVAccess, KVSpec, Params

VOCAB_SIZE = 512  # a power of two, on which an odd factor and an xor are permutations
EOS_ID = 256  # first id after the bytes; its logit is EOS_LOGIT, so greedy text goes on for as long as it is let
EOS_LOGIT = -30.0  # finite: a logit bias, a stop token or another seed can still choose it

_ODD_A, _ODD_B = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_MIX_A, _MIX_B = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_IDS = np.arange(VOCAB_SIZE, dtype=np.uint32)


Words: TypeAlias = Any  # uint32, of JAX or numpy


@dataclass(frozen=True, slots=True)
class EchoModel:
    """Implements `interface.Model`; its parameters are the empty tuple."""

    max_positions: int = 1 << 20
    vocab_size: int = VOCAB_SIZE

    @property
    def kv(self) -> KVSpec:
        return KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="uint32")

    def hidden(
        self, params: Params, tokens: Int32[Array, " rows"], positions: Int32[Array, " rows"], kv: KVAccess
    ) -> Float32[Array, "rows 2"]:
        total = kv.visible_sum(0, _token_value(tokens, positions))
        return jnp.stack([total >> 16, total & 0xFFFF], axis=1).astype(jnp.float32)

    def logits(self, params: Params, hidden: Float32[Array, "rows 2"]) -> Float32[Array, "rows vocab"]:
        halves = hidden.astype(jnp.uint32)
        order = _order(halves[:, :1] << 16 | halves[:, 1:])
        return jnp.where(_IDS == EOS_ID, EOS_LOGIT, order.astype(jnp.float32) / (VOCAB_SIZE / 8) - 4)


def _token_value(tokens: Words, positions: Words) -> Words:
    return _mix(tokens.astype(np.uint32) * _ODD_A + positions.astype(np.uint32) * _ODD_B)


def _order(total: Words) -> Words:
    """A permutation of the token ids."""
    choice = _mix(total)
    return (_IDS * (choice | 1) ^ (choice >> 16)) & (VOCAB_SIZE - 1)


def _mix(h: Words) -> Words:
    """The mixer of `draw`, here on its own so that a change there cannot change the echo."""
    h = (h ^ (h >> 16)) * _MIX_A
    h = (h ^ (h >> 15)) * _MIX_B
    return h ^ (h >> 16)
