"""Echo: a model whose next token is a hash of every token before it, read back from the KV pages.

It runs in the real step through the real page table, at thousands of requests a second, and any aliased, stale or lost
page changes every later token. It stands in for the transformer in tests of everything around a model. It never learns,
has no parameters, and uses integers throughout, so its answers are exact on every backend and in every batch.

    KV of a token   mix(token, position)             one uint32, as key; values stay unused
    hidden state    the sum of all visible KV, halved into two 16-bit numbers (exact in any float type above bfloat16)
    logits          a permutation of 0..V-1 chosen by that sum, scaled to [-4, 4): no ties

Its arithmetic works on numpy arrays too, so that `echo_next` and `echo_logprobs` tell the truth on the host.
"""

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float32, Int32
from tokenizers import decoders, models, pre_tokenizers

from jaxctx.engine.factory import ServedModel
from jaxctx.engine.runner.step import PagedAttention
from jaxctx.model.config import AdapterSlots
from jaxctx.model.interface import AttentionBackend, KVSpec, Params
from jaxctx.model.text import ChatTemplate, ModelText, Tokenizer
from tests.sums import stored_sum

VOCAB_SIZE = 512  # a power of two, on which an odd factor and an xor are permutations
EOS_ID = 256  # first id after the bytes; its logit is EOS_LOGIT, so greedy text goes on for as long as it is let
EOS_LOGIT = -30.0  # finite: a logit bias, a stop token or another seed can still choose it

_ODD_A, _ODD_B = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_MIX_A, _MIX_B = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_IDS = np.arange(VOCAB_SIZE, dtype=np.uint32)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Words: TypeAlias = Any  # uint32, of JAX or numpy


class Sums(Protocol):
    """What the echo model needs without pages: for each row the sum modulo 2**32 of the uint32 values it sees."""

    def visible_sum(self, values: jax.Array) -> jax.Array: ...


@dataclass(frozen=True, slots=True)
class EchoModel:
    """Implements `interface.Model`; its parameters are the empty tuple."""

    max_positions: int = 1 << 20
    vocab_size: int = VOCAB_SIZE
    adapter_slots: AdapterSlots | None = None

    @property
    def kv(self) -> KVSpec:
        return KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="uint32")

    def context_reason(self, tokens: int) -> str:
        return ""

    def hidden(
        self,
        params: Params,
        tokens: Int32[Array, " rows"],
        positions: Int32[Array, " rows"],
        kv: AttentionBackend | Sums,
        adapters: jax.Array | None = None,
    ) -> Float32[Array, "rows 2"]:
        values = token_value(tokens, positions)
        total = stored_sum(kv, values) if isinstance(kv, PagedAttention) else kv.visible_sum(values)
        return jnp.stack([total >> 16, total & 0xFFFF], axis=1).astype(jnp.float32)

    def logits(self, params: Params, hidden: Float32[Array, "rows 2"]) -> Float32[Array, "rows vocab"]:
        halves = hidden.astype(jnp.uint32)
        order = _order(halves[:, :1] << 16 | halves[:, 1:])
        return jnp.where(_IDS == EOS_ID, EOS_LOGIT, order.astype(jnp.float32) / (VOCAB_SIZE / 8) - 4)


def token_value(tokens: Words, positions: Words) -> Words:
    return _mix(tokens.astype(np.uint32) * _ODD_A + positions.astype(np.uint32) * _ODD_B)


def _order(total: Words) -> Words:
    """A permutation of the token ids."""
    choice = _mix(total)
    return (_IDS * (choice | 1) ^ (choice >> 16)) & (VOCAB_SIZE - 1)


def _mix(h: Words) -> Words:
    """The mixer of `jaxctx.model.token_sampling`, here on its own so that a change there cannot change the echo."""
    h = (h ^ (h >> 16)) * _MIX_A
    h = (h ^ (h >> 15)) * _MIX_B
    return h ^ (h >> 16)


def echo_next(tokens: Sequence[int], suppress: Collection[int] = ()) -> int:
    """The token that greedy sampling picks after `tokens` (at least one) at positions 0, 1, …, on the host."""
    values = token_value(np.array(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32))
    order = _order(values.sum(keepdims=True, dtype=np.uint32)).tolist()
    return max(set(range(VOCAB_SIZE)).difference(suppress), key=lambda token: (token != EOS_ID, order[token]))


def echo_logprobs(tokens: Sequence[int], seen: Sequence[int] | slice = slice(None)) -> np.ndarray:
    """Log probabilities, float64 `[VOCAB_SIZE]`, of what follows `tokens` if the last one sees those at `seen` only."""
    values = token_value(np.array(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32))[seen]
    order = _order(values.sum(keepdims=True, dtype=np.uint32))
    logits = np.where(np.arange(VOCAB_SIZE) == EOS_ID, EOS_LOGIT, order / (VOCAB_SIZE / 8) - 4)
    logprobs: np.ndarray = logits - np.logaddexp.reduce(logits)
    return logprobs


def echo_text() -> ModelText:
    """Text for the echo model: ids below 256 are bytes, then special tokens, then pairs of frequent letters."""
    alphabet = _byte_alphabet()
    special = ["<|endoftext|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = "etaoinshrdlucmfw"
    merges = [(first, second) for first in letters for second in letters][: VOCAB_SIZE - len(alphabet) - len(special)]
    entries = [*alphabet, *special, *(first + second for first, second in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(entries)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    return ModelText(
        tokenizer=Tokenizer(backend),
        chat_template=ChatTemplate(CHATML),
        bos_id=None,
        eos_ids=(EOS_ID,),
        config_json=json.dumps({"chat_template": CHATML}),
    )


def pairs_text() -> ModelText:
    """Text for the echo model in which every id is printable ASCII, a character or a pair of them: outputs are whole
    characters, and mostly no tokens that their text would give.
    """
    singles = [chr(code) for code in range(0x20, 0x7F)]
    merges = [(first, second) for first in singles[33:58] for second in singles[33:58]]  # of capital letters
    merges = merges[: VOCAB_SIZE - len(singles) - 1]
    entries = [*singles, *(first + second for first, second in merges)]
    entries.insert(EOS_ID, "<|endoftext|>")
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(entries)}, merges=merges))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", special=True, normalized=False)])
    return ModelText(tokenizer=Tokenizer(backend), chat_template=None, bos_id=None, eos_ids=(EOS_ID,))


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte (GPT-2): itself if printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def echo_model(text: ModelText | None = None, **settings: Any) -> ServedModel:
    """The whole of it, as the engine takes it. `settings` are those of `EchoModel`; its text is `echo_text`'s."""
    return ServedModel(
        model=EchoModel(**settings),
        params=(),
        text=text or echo_text(),
        model_id="echo",
        revision="echo-1",
        architecture="echo",
        parameters=0,
        dtype="uint32",
        weights_dtype="uint32",
    )
