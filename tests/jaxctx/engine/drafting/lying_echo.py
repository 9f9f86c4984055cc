"""The echo model as a draft model that is wrong now and then: what it stores is right, what it says is not always."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxctx.engine.factory import ServedModel
from jaxctx.model.interface import Params
from tests.echo import EchoModel, echo_model


@dataclass(frozen=True, slots=True)
class LyingEcho(EchoModel):
    """Its parameter is a number, int32: it lies behind one in so many of all states. 1: always; 0: never."""

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        (lies,) = params
        halves = hidden.astype(jnp.uint32)
        is_lie = (lies > 0) & (halves[:, 1:] % jnp.maximum(lies, 1) == 0)
        # Not `super()`: a class with slots is another one than the one that its methods were written in.
        return EchoModel.logits(self, params, jnp.where(is_lie, (halves ^ 0x2A5).astype(jnp.float32), hidden))


def lying_echo(lies: int, **settings: Any) -> ServedModel:
    """The model as an engine takes it, which tells the truth if `lies` is 0."""
    return replace(
        echo_model(),
        model=LyingEcho(**settings),
        params=(jnp.int32(lies),),
        revision=f"lying-{lies}",
        model_id="liar",
    )
