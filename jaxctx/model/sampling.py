"""Sampling: logits to tokens on the device, inside the jitted step. Options are arrays, so no mix of them compiles.

Order of operations, per row:

    logits ─▶ allowed ─▶ bias ─▶ min_tokens ─▶ penalties ─▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ draw
       └────▶ logprobs: log-softmax of the model's own, unmodified logits

`allowed` leaves only the tokens with which an output can go on to have its format.

A row's token depends on nothing but the row, see `draw_tokens`. Rows never mix; a row of NaN yields some valid id and
leaves its neighbours as they are.

Milliseconds of `sample` on two CPU cores that had other work too (`scripts/bench_sampling.py`):

    rows x vocabulary   greedy   temperature   temperature, top_k, top_p   top_p, flat row   greedy, penalties
    8 x 152,000            1.6             9                         6.5                24                   2
    16 x 8,192             0.4           0.8                         1.1                 4                 0.5
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32

from jaxctx.model.sampling_options import SamplingBatch
from jaxctx.model.token_sampling import draw_tokens
from jaxctx.model.top_k import top_k

TOP_LOGPROBS = 20
MAX_GATHERED_ROWS = 128  # of the slots' state


class SlotState(NamedTuple):
    """What sampling remembers of each running sequence. The last slot is scratch, for padding rows. Donate it."""

    last_token: Int32[Array, " slots"]  # that was sampled
    counts: Int32[Array, "slots vocab"]  # how often each token was sampled
    seen: Bool[Array, "slots vocab"]  # tokens of the prompt
    bias: Float32[Array, "slots vocab"]
    stop_mask: Bool[Array, "slots vocab"]  # what `suppress` forbids
    allowed: Bool[Array, "slots vocab"]  # what `constrained` allows


class Sampled(NamedTuple):
    tokens: Int32[Array, " rows"]
    logprobs: Float32[Array, " rows"]
    top_ids: Int32[Array, "rows 20"]  # best first; a vocabulary below 20 is padded with id 0 at -inf
    top_logprobs: Float32[Array, "rows 20"]


def slot_state(slots: int, vocab_size: int) -> SlotState:
    """State of `slots` sequences and the scratch slot: 11 bytes per slot and vocabulary entry."""
    shape = (slots + 1, vocab_size)
    return SlotState(
        last_token=jnp.zeros(slots + 1, jnp.int32),
        counts=jnp.zeros(shape, jnp.int32),
        seen=jnp.zeros(shape, jnp.bool_),
        bias=jnp.zeros(shape, jnp.float32),
        stop_mask=jnp.zeros(shape, jnp.bool_),
        allowed=jnp.zeros(shape, jnp.bool_),
    )


@cache  # planners ask for the same again and again, and tracing takes milliseconds
def slot_state_bytes(slots: int, vocab_size: int) -> int:
    """Bytes of the state of so many sequences, and the scratch slot, before a device pads them."""
    state = jax.eval_shape(partial(slot_state, slots, vocab_size))
    return sum(array.size * array.dtype.itemsize for array in state)


def allowed_words(vocab_size: int) -> int:
    """int32 words of a mask with a bit for every token: bit i % 32 of word i / 32 for token i."""
    return -(-vocab_size // 32)


def slot_words(
    slot: int, vocab_size: int, prompt: np.ndarray, output: np.ndarray, bias: Mapping[int, float], stops: Sequence[int]
) -> np.ndarray:
    """The argument of `load_slot`: what penalties, bias and min_tokens of the sequence that takes a slot depend on.

    `prompt` and `output` are token ids `[tokens]`; `output` was sampled before the request was preempted. Returns int32
    `[1 + 2 * vocab_size]`: the slot, the history of each token (`_token_history`), the bits of each token's bias.
    Stop ids and biases outside the vocabulary are left out.
    """
    history = _token_history(vocab_size, prompt, output, stops)
    biases = _bias_by_token(vocab_size, bias)
    return np.concatenate([[slot], history, biases.view(np.int32)], dtype=np.int32)


def _token_history(vocab_size: int, prompt: np.ndarray, output: np.ndarray, stops: Sequence[int]) -> np.ndarray:
    """The history of every token, int64 `[vocab_size]`: times sampled << 2 | in the prompt << 1 | a stop id."""
    history = np.bincount(output, minlength=vocab_size) << 2
    history[prompt] |= 2
    history[[token for token in stops if 0 <= token < vocab_size]] |= 1
    return history


def _bias_by_token(vocab_size: int, bias: Mapping[int, float]) -> np.ndarray:
    """The bias of every token, float32 `[vocab_size]`; ids outside the vocabulary are left out."""
    biases = np.zeros(vocab_size, np.float32)
    for token, value in bias.items():
        if 0 <= token < vocab_size:
            biases[token] = value
    return biases


def load_slot(state: SlotState, words: Int32[Array, " words"]) -> SlotState:
    """The state with a slot filled from the `words` of its sequence, see `slot_words`.

    Only sequences with penalties, a bias or min_tokens need this: others never read those parts of their slot.
    """
    slot, (known, bias) = words[0], jnp.split(words[1:], 2)
    return state._replace(
        counts=state.counts.at[slot].set(known >> 2),
        seen=state.seen.at[slot].set(known & 2 != 0),
        bias=state.bias.at[slot].set(lax.bitcast_convert_type(bias, jnp.float32)),
        stop_mask=state.stop_mask.at[slot].set(known & 1 != 0),
    )


def load_allowed(state: SlotState, words: Int32[Array, "rows 1+vocab/32"]) -> SlotState:
    """The state with the allowed tokens of some slots replaced. Each row is a slot and its mask, see `allowed_words`.

    The bits are unpacked here, in a call for a few rows: in the step, for all rows, that would take tens of megabytes.
    """
    allowed = unpack_bits(words[:, 1:])[:, : state.allowed.shape[1]]
    return state._replace(allowed=state.allowed.at[words[:, 0]].set(allowed))


def unpack_bits(words: Int32[Array, "rows words"]) -> Bool[Array, "rows 32*words"]:
    """The bits of each row, the lowest of each word first."""
    bits = words[:, :, None] >> jnp.arange(32) & 1
    return (bits != 0).reshape(len(words), -1)


def sample(
    logits: Float32[Array, "rows vocab"],
    batch: SamplingBatch,
    slots: Int32[Array, " rows"],
    state: SlotState,
    mesh: Mesh | None = None,
) -> tuple[Sampled, SlotState]:
    """Draw one token per row, and note and count it in the row's slot, unless that is the scratch slot.

    `mesh`: the vocabulary is split over it.

    Work that no row needs is skipped at run time (`lax.cond`): an all-greedy batch costs an argmax.
    """
    plain = ~(_adjusted(batch) | (batch.temperature > 0)).any()
    tokens = lax.cond(
        plain, lambda: jnp.argmax(logits, -1).astype(jnp.int32), lambda: _next(logits, batch, slots, state, mesh)
    )
    find_logprobs = partial(_logprobs, logits, tokens, mesh)
    nothing = partial(jax.tree.map, jnp.zeros_like, jax.eval_shape(find_logprobs))
    logprobs = lax.cond(batch.logprobs.any(), find_logprobs, nothing)
    rows = state.counts.shape[0]
    counted = jnp.where(slots < rows - 1, slots, rows)
    last_token = state.last_token.at[counted].set(tokens, mode="drop")
    counts = state.counts.at[counted, tokens].add(1, mode="drop")
    return Sampled(tokens, *logprobs), state._replace(last_token=last_token, counts=counts)


def _adjusted(batch: SamplingBatch) -> jax.Array:
    penalised = (batch.repetition_penalty != 1) | (batch.presence_penalty != 0) | (batch.frequency_penalty != 0)
    return batch.suppress | batch.biased | batch.constrained | penalised


def _adjust(x: jax.Array, batch: SamplingBatch, slots: jax.Array, state: SlotState) -> jax.Array:
    """Format, bias, min_tokens, penalties. Neutral rows come out as they went in, whatever their slot holds."""
    x = _keep_allowed(x, batch, slots, state)
    x = x + jnp.where(batch.biased[:, None], _of_slots(state.bias, slots), 0)
    x = jnp.where(batch.suppress[:, None] & _of_slots(state.stop_mask, slots), -jnp.inf, x)
    counts = _of_slots(state.counts, slots)
    repetition = batch.repetition_penalty[:, None]
    scaled = jnp.where(x > 0, x / repetition, x * repetition)
    x = jnp.where(_of_slots(state.seen, slots) | (counts > 0), scaled, x)
    return x - batch.frequency_penalty[:, None] * counts - batch.presence_penalty[:, None] * (counts > 0)


def _of_slots(array: jax.Array, slots: Int32[Array, " rows"]) -> jax.Array:
    """The rows of these slots, `[rows, vocab]`, few at a time: 256 did not fit into the vector memory of a TPU v5e."""
    parts = [array[slots[start : start + MAX_GATHERED_ROWS]] for start in range(0, slots.shape[0], MAX_GATHERED_ROWS)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _keep_allowed(x: jax.Array, batch: SamplingBatch, slots: jax.Array, state: SlotState) -> jax.Array:
    """The logits, minus infinity where a constrained row must not go on."""
    return jnp.where(batch.constrained[:, None] & ~_of_slots(state.allowed, slots), -jnp.inf, x)


def _next(x: jax.Array, batch: SamplingBatch, slots: jax.Array, state: SlotState, mesh: Mesh | None) -> jax.Array:
    """Tokens of a batch in which some row is adjusted or sampled; greedy rows among them stay greedy."""
    sampled = batch.temperature > 0
    # Both branches compute something: one that returned its operand would make XLA copy the logits of every step.
    distance = lax.cond(
        _adjusted(batch).any(),
        lambda: _distance(_adjust(x, batch, slots, state), batch),
        lambda: _distance(x, batch),
    )
    greedy = jnp.argmin(distance, -1).astype(jnp.int32)
    tokens: jax.Array = lax.cond(sampled.any(), partial(draw_tokens, mesh=mesh), lambda *_: greedy, distance, batch)
    return jnp.where(sampled, tokens, greedy)


def _distance(x: jax.Array, batch: SamplingBatch) -> jax.Array:
    """How far each token is below the best, in units of temperature: weights are exp(-distance), and none overflows."""
    x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, np.finfo(np.float32).max))
    best = x.max(-1, keepdims=True)
    below = jnp.where(jnp.isfinite(best), best, 0) - x
    return below / jnp.where(batch.temperature > 0, batch.temperature, 1)[:, None]


def _logprobs(logits: jax.Array, tokens: jax.Array, mesh: Mesh | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    total = jax.nn.logsumexp(logits, axis=-1)
    top, ids = top_k(logits, min(TOP_LOGPROBS, logits.shape[1]), mesh)
    missing = ((0, 0), (0, TOP_LOGPROBS - top.shape[1]))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    padded = jnp.pad(top - total[:, None], missing, constant_values=-jnp.inf)
    return chosen - total, jnp.pad(ids, missing), padded
