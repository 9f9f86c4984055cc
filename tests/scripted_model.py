"""A model whose text a Python function writes. It stands in for one that has learnt language, which none that a test
can afford has: everything around it is what it is in service, the step, pages, sampling, grammars and drafts.

It reads the tokens before each row back from the KV pages, as the echo model does: a page stores two hashes of a token
and its position, and the sums of those that a row sees name one sequence of tokens. The host is told each row's token
and sums, so that it knows the sequence of every sum that it has seen; it asks the function what comes next.

    KV of a token   two hashes of it and its position    uint32, as key and value
    hidden state    the two sums of all visible KV, each halved into 16-bit numbers
    logits          made on the host, by the writer's wishes

It runs on one CPU device, in one process. Pages that another process computed are strange to it: what follows them is
`STRANGE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.engine.factory import ServedModel
from jaxctx.engine.runner.step import PagedAttention
from jaxctx.model.config import AdapterSlots
from jaxctx.model.interface import KVSpec, Params
from jaxctx.model.text import ModelText
from jaxctx_kernels import write_kv
from tests.echo import token_value
from tests.sums import layer_sum

Writer = Callable[[str], Sequence[str]]
"""From all text so far, special tokens included, to texts that may follow, the wanted one first. That one is written
and the output ends behind it. Of the others the first token is taken where a grammar does not let the wanted one be
written, and the writer is asked again. "" is the end.
"""
SALT = 0x5BD1E995  # makes the second hash of the first
BEST, STEP = 2000.0, 40.0  # logits of wishes: so far from each other that any usual temperature picks the first
STRANGE = "?"


@dataclass(slots=True, eq=False)
class Place:
    """The end of one sequence of tokens."""

    before: Place | None  # None: nothing stands before, and this is no token
    token: int
    plan: Sequence[int] = ()  # tokens that are to follow
    wishes: Sequence[int] | None = None  # tokens that may follow, the wanted one first; None: nobody has asked

    def tokens(self) -> list[int]:
        """The whole sequence."""
        tokens: list[int] = []
        place = self
        while place.before is not None:
            tokens.append(place.token)
            place = place.before
        return tokens[::-1]


class Past:
    """What the host knows of sequences, and what follows them."""

    def __init__(self, text: ModelText, write: Writer) -> None:
        self._text, self._write = text, write
        self._places: dict[tuple[int, int], Place] = {(0, 0): Place(None, -1)}
        self.vocab_size = text.tokenizer.largest_id()[0] + 1

    def note(self, tokens: Any, positions: Any, values: Any, sums: Any) -> np.ndarray:
        """Remember the rows of a step. `values`, `sums`: uint32 `[2, rows]`; returns the sums."""
        tokens, positions, values, sums = (np.asarray(each) for each in (tokens, positions, values, sums))
        before = sums - values
        for row in np.argsort(positions, kind="stable"):  # of a prompt each row follows the one before
            key = (int(sums[0, row]), int(sums[1, row]))
            place = self._places.get((int(before[0, row]), int(before[1, row])))
            if key not in self._places and place is not None:
                self._places[key] = Place(place, int(tokens[row]))
        return sums

    def logits(self, sums: Any) -> np.ndarray:
        """float32 `[rows, vocab_size]` of what follows rows of these sums, uint32 `[2, rows]`."""
        sums = np.asarray(sums)
        logits = np.tile(-np.arange(self.vocab_size, dtype=np.float32) / self.vocab_size, (sums.shape[1], 1))
        for row, key in enumerate(zip(*sums.tolist(), strict=True)):
            place = self._places.get(key)
            wishes = self.wishes(place) if place is not None else self._tokens(STRANGE)[:1]
            for rank, token in enumerate(dict.fromkeys(wishes)):
                logits[row, token] = max(BEST - STEP * rank, STEP)
        return logits

    def wishes(self, place: Place) -> Sequence[int]:
        """Tokens that may follow, the wanted one first."""
        if place.wishes is None:
            text = self._text.tokenizer.decode(place.tokens(), skip_special_tokens=False)
            texts = [self._tokens(each) for each in self._write(text)]
            place.plan = self._rest_of_plan(place) or texts[0]
            place.wishes = [place.plan[0], *(tokens[0] for tokens in texts)]
        return place.wishes

    @staticmethod
    def _rest_of_plan(place: Place) -> Sequence[int]:
        """What the plan of the place before leaves, if its first token is the one that was taken.

        Plans are of tokens, because a text that breaks off within a character cannot be told.
        """
        before = place.before
        is_taken = before is not None and before.plan and before.plan[0] == place.token
        return before.plan[1:] if before is not None and is_taken else ()

    def _tokens(self, text: str) -> list[int]:
        """A text, and the end behind it."""
        return [*self._text.tokenizer.encode(text, add_special_tokens=False), self._text.eos_ids[0]]


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """Implements `interface.Model`; its parameters are the empty tuple."""

    past: Past
    max_positions: int = 8192
    adapter_slots: AdapterSlots | None = None
    kv: KVSpec = field(default=KVSpec(layers=1, kv_heads=1, head_dim=1, dtype="uint32"))

    @property
    def vocab_size(self) -> int:
        return self.past.vocab_size

    def context_reason(self, tokens: int) -> str:
        return ""

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        kv: PagedAttention,
        adapters: jax.Array | None = None,
    ) -> jax.Array:
        keys = token_value(tokens, positions)
        values = jnp.stack([keys, token_value(keys ^ jnp.uint32(SALT), positions)])
        sums = jax.pure_callback(
            self.past.note,
            jax.ShapeDtypeStruct(values.shape, jnp.uint32),
            tokens,
            positions,
            values,
            stored_sums(kv, values),
        )
        return jnp.concatenate([sums >> 16, sums & 0xFFFF]).T.astype(jnp.float32)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        halves = hidden.T.astype(jnp.uint32)
        logits = jax.ShapeDtypeStruct((hidden.shape[0], self.vocab_size), jnp.float32)
        return jax.pure_callback(self.past.logits, logits, halves[:2] << 16 | halves[2:])


def stored_sums(kv: PagedAttention, values: jax.Array) -> jax.Array:
    """Store uint32 `[2, rows]` as key and value; for each row the sums of all that it sees, itself included."""
    pool = kv.pools[0]
    stored = [write_kv(pages, each[:, None, None], kv.kv_slots) for pages, each in zip(pool, values, strict=True)]
    kv.pools = (pool._make(stored),)
    return jnp.stack([layer_sum(kv, pages) for pages in stored])


def scripted_model(text: ModelText, write: Writer, model_id: str) -> ServedModel:
    """The whole of it, as the engine takes it."""
    return ServedModel(
        model=ScriptedModel(Past(text, write)),
        params=(),
        text=text,
        model_id=model_id,
        revision=f"{model_id}-1",
        architecture="scripted",
        parameters=0,
        dtype="uint32",
        weights_dtype="uint32",
    )
