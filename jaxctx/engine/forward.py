"""Forward: what a pass asks, as the scheduler and the step want it, and what became of it.

Called on the step thread, but for `results`, which is for a thread of its own: a distribution over a whole vocabulary
takes longer than the step thread has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxctx.cache.marks import encode_mark
from jaxctx.engine.answers import ContextInfo, ForwardResult
from jaxctx.engine.batch import Part
from jaxctx.engine.passes import pass_result
from jaxctx.engine.requests import ForwardRequest, GenerateRequest, PassOutput
from jaxctx.engine.sequence import Pass, PassRow, Sampler
from jaxctx.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PassRows:
    """A pass that is done."""

    rows: Sequence[PassRow]
    context: ContextInfo


def make_pass(request: ForwardRequest, first: int, new_seed: Callable[[], int]) -> Pass:
    """Of tokens whose first one has the index `first`."""
    samplers = {}
    for output in request.outputs:
        if output.sample is not None:
            seed = new_seed() if output.sample.seed is None else output.sample.seed
            samplers[first + output.index] = Sampler(GenerateRequest(context_id="", sampling=output.sample), seed)
    outputs = {first + output.index: output for output in sorted(request.outputs, key=lambda o: o.index)}
    return Pass(first, outputs, samplers, request.keep_working)


def marks(request: ForwardRequest, first: int, positions: int) -> list[bytes]:
    """A mark for every token, none if all are usual. InvalidArgument for a position or a mask that cannot be.

    `positions`: how many the model has.
    """
    encoded: list[bytes] = []
    for offset in range(len(request.tokens) if request.positions or request.masks else 0):
        index = first + offset
        position = request.positions[offset] if request.positions else index
        ranges = request.masks[offset] if request.masks else ()
        if not 0 <= position < positions:
            raise InvalidArgument.field(f"positions[{offset}]", f"must be 0 to {positions - 1}")
        if ranges and ranges[-1][1] > index + 1:
            raise InvalidArgument.field(f"masks[{offset}]", f"token {index} sees nothing behind itself")
        encoded.append(encode_mark(index, position, ranges))
    return encoded if any(encoded) else []


def needs_logits(asked: PassOutput) -> bool:
    """Whether more than a sample is asked for."""
    return bool(asked.logprob_ids or asked.top or asked.logits or asked.entropy)


def rows(part: Part, logits: np.ndarray | None, tokens: np.ndarray) -> list[PassRow]:
    """What a step says of the tokens of `part` that were asked about: row by row in `logits` and `tokens`."""
    passing = part.sequence.passing
    told: list[PassRow] = []
    for place, index in enumerate(part.outputs):
        assert passing is not None
        asked, sampler = passing.outputs[index], passing.samplers.get(index)
        told.append(
            PassRow(
                asked,
                logits[place] if logits is not None and needs_logits(asked) else None,
                int(tokens[place]) if sampler else None,
                sampler.seed if sampler else None,
            )
        )
    return told


def results(done: PassRows) -> ForwardResult:
    """The answer, in the order of the tokens."""
    return ForwardResult(
        outputs=[pass_result(row.asked, row.logits, row.token_id, row.seed) for row in done.rows], context=done.context
    )
