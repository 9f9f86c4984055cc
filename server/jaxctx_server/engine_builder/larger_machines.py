"""For a plan that does not fit: the smallest machine of the kind that holds the model, in words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxctx.engine.plan.chips_needed import chips_needed, weights_bytes
from jaxctx.engine.plan.memory_planner import TARGETS
from jaxctx.model.functional import DecoderModel, FlatParams
from jaxctx_server.config import PlanConfig
from jaxctx_server.errors import MODEL, StartError


@contextmanager
def refusing_what_does_not_fit(
    config: PlanConfig, model: DecoderModel, params: FlatParams, memory: int, mesh: tuple[int, int]
) -> Iterator[None]:
    """Raise StartError, naming a machine that is large enough, where chips of `memory` bytes each are too small.

    That is at once for weights that do not fit, and where a compiler refuses what is compiled inside. `mesh`: the sizes
    of its axes "kv" and "group".
    """

    def refuse(why: str) -> StartError:
        name = "the bundled model" if config.model is None else config.model
        message = f"{name}: does not fit on {config.target}: {why}"
        larger = larger_machine(config, model, params, mesh)
        return StartError(f"{message}; {larger}" if larger else message, MODEL)

    weights = weights_bytes(model, params, *mesh)
    if weights > memory:
        of_each = "" if mesh == (1, 1) else " of each chip"
        raise refuse(f"weights take {weights / 2**30:,.1f} GiB of {memory / 2**30:,.1f} GiB{of_each}")
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise refuse("beside the weights its memory is too small for a step") from error


def larger_machine(config: PlanConfig, model: DecoderModel, params: FlatParams, mesh: tuple[int, int]) -> str:
    """The smallest machine of the target's chips that holds the model, in words. Empty: none is known.

    `mesh`: the sizes of the axes "kv" and "group" on the target, which is too small.
    """
    if config.target == "here" or config.draft_model is not None:  # a draft model runs on one chip
        return ""
    chip = config.target if config.target in TARGETS else re.sub(r"^\d+x|-\d+$", "", config.target)
    needed = chips_needed(model, params, chip, more_than=mesh[0] * mesh[1])
    return f"no machine of {chip} that the model divides over holds it" if needed is None else needed.describe(chip)
