"""Passes: what is asked of tokens that a request gives explicitly, and what is told of them.

A pass is a step whose rows have positions and masks of their own, and which tells whole distributions. `pass_result`
turns a row of its logits into an answer; it is pure, and slow enough for a thread of its own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from jaxctx.cache.attention_overrides import encode_mark
from jaxctx.errors import InvalidArgument
from jaxctx.model.sampling import ROW, Sampled, row_words
from jaxctx.types import ForwardOutput, ForwardOutputResult, ForwardRequest, GenerateRequest

POSITION_WORD = int(np.flatnonzero(row_words(position=1) != row_words())[0])
ForwardAnswer = Callable[[], ForwardOutputResult]  # still to be made


class Sampler:
    """Sampling options as the step wants them: `row_words`, patched per token."""

    def __init__(self, request: GenerateRequest, seed: int, first: int = 0) -> None:
        """Equal seeds, of 64 bits, draw equally at equal positions, in any batch. `first`: where its output begins."""
        s = request.sampling
        self.seed = seed
        self._may_stop_at = first + request.min_tokens
        given = {name: getattr(s, name) for name in ROW.names or () if hasattr(s, name)}
        given |= {"seed": seed, "biased": bool(s.logit_bias), "logprobs": request.logprobs}
        self._words = [row_words(**given | {"suppress": suppress}) for suppress in (False, True)]
        penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
        # Whether the slot must know the sequence's past before its first step.
        self.needs_history = penalised or bool(s.logit_bias) or request.min_tokens > 0

    def write(self, row: np.ndarray, *, position: int) -> None:
        """Fill int32 `row` `[ROW_WORDS]` for the token at `position`: no stop token before `min_tokens` others."""
        row[:] = self._words[position < self._may_stop_at]
        row[POSITION_WORD] = position


def pass_result(
    asked: ForwardOutput, logits: np.ndarray | None, token_id: int | None = None, seed: int | None = None
) -> ForwardOutputResult:
    """What was asked for of one token: by the logits of its row, float32 `[vocab]`, needed for all but a sample.

    `token_id` is what was drawn, if anything was to be, and `seed` repeats it. Logits that are no number count as minus
    infinity, as they do for samples.
    """
    drawn = ForwardOutputResult(index=asked.index, token_id=token_id, seed=seed)
    if logits is None or not needs_logits(asked):
        return drawn
    finite = np.nan_to_num(logits, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
    logprobs = finite.astype(np.float64)
    if (peak := logprobs.max()) > -np.inf:  # else no token is possible
        logprobs -= peak
        logprobs -= np.log(np.exp(logprobs).sum())
    possible = logprobs[logprobs > -np.inf]
    return replace(
        drawn,
        logprobs=logprobs[list(asked.logprob_ids)].tolist(),
        top=[(int(i), float(logprobs[i])) for i in best(finite, asked.top)] if asked.top else (),
        logits=logits.astype("<f4").tobytes() if asked.logits else b"",
        entropy=float(-(np.exp(possible) * possible).sum()) + 0.0 if asked.entropy else None,
    )


@dataclass(frozen=True, slots=True)
class CustomMaskForward:
    """What a forward pass asks: the tokens from index `start` on are its own, and some of their rows have outputs.

    By default that of a sequence that is none: nothing is its own, and nothing is asked.
    """

    start: int = sys.maxsize
    outputs: Mapping[int, ForwardOutput] = field(default_factory=dict)  # by index in the context, ascending
    samplers: Mapping[int, Sampler] = field(default_factory=dict)  # of those that want a sample
    keep_working: bool = False

    def rows(self, indices: Sequence[int], logits: np.ndarray | None, sampled: Sampled) -> dict[int, ForwardAnswer]:
        """What a step says of the tokens at `indices`: row by row in `logits`, if it told any, and what it sampled."""
        told: dict[int, ForwardAnswer] = {}
        for place, index in enumerate(indices):
            asked, sampler = self.outputs[index], self.samplers.get(index)
            own = logits[place] if logits is not None and needs_logits(asked) else None
            drawn = (int(sampled.tokens[place]), sampler.seed) if sampler else (None, None)
            told[index] = partial(pass_result, asked, own, *drawn)
        return told


NO_FORWARD = CustomMaskForward()


def make_forward(request: ForwardRequest, first: int, new_seed: Callable[[], int]) -> CustomMaskForward:
    """Of tokens whose first one has the index `first`."""
    outputs, samplers = {}, {}
    for output in sorted(request.outputs, key=lambda output: output.index):
        outputs[first + output.index] = output
        if output.sample is not None:
            seed = new_seed() if output.sample.seed is None else output.sample.seed
            samplers[first + output.index] = Sampler(GenerateRequest(context_id="", sampling=output.sample), seed)
    return CustomMaskForward(first, outputs, samplers, request.keep_working)


def marks(request: ForwardRequest, first: int) -> list[bytes]:
    """A mark for every token, none if all are usual. InvalidArgument for a mask that goes beyond its token."""
    encoded: list[bytes] = []
    for offset in range(len(request.tokens) if request.positions or request.masks else 0):
        index = first + offset
        position = request.positions[offset] if request.positions else index
        ranges = request.masks[offset] if request.masks else ()
        if ranges and ranges[-1][1] > index + 1:
            raise InvalidArgument.field(f"masks[{offset}]", f"token {index} sees nothing behind itself")
        encoded.append(encode_mark(index, position, ranges))
    return encoded if any(encoded) else []


def needs_logits(asked: ForwardOutput) -> bool:
    """Whether more than a sample is asked for."""
    return bool(asked.logprob_ids or asked.top or asked.logits or asked.entropy)


def best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest, at least one, best first, equal ones by rising id."""
    count = min(count, len(logits))
    candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    chosen: np.ndarray = candidates[np.argsort(-logits[candidates], kind="stable")[:count]]
    return chosen
