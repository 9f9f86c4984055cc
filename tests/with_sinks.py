"""A model with attention sinks, made of one without: what it computes besides stays as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxctx.model.interface import KVSpec


@dataclass(frozen=True, eq=False)
class WithSinks:
    """`model`, each layer of which hands its sinks to the `AttentionBackend`. All else is the model's."""

    model: Any
    sinks: np.ndarray  # float32 [layers, heads]; on a mesh whose order of query heads is the model's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def kv(self) -> KVSpec:
        return replace(self.model.kv, sinks=True)

    def hidden(
        self, params: Any, tokens: jax.Array, positions: jax.Array, kv: Any, adapters: jax.Array | None = None
    ) -> jax.Array:
        attend = kv.attend

        def attend_with_sinks(
            layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, of_model: None
        ) -> jax.Array:
            assert of_model is None
            attended: jax.Array = attend(layer, q, k, v, jnp.asarray(self.sinks)[layer])
            return attended

        kv.attend = attend_with_sinks
        hidden: jax.Array = self.model.hidden(params, tokens, positions, kv, adapters)
        return hidden
