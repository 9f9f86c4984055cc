"""Custom-mask forwards: what a forward call asks about its tokens, and how the answers are made.

A custom-mask forward is a step whose rows have positions and attention masks of their own, and which can return the
logits of whole rows. `forward_result` turns a row of logits into an answer; it is pure, and slow enough for a thread
of its own.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from jaxctx.cache.attention_overrides import encode_override
from jaxctx.errors import InvalidArgument
from jaxctx.model.sampling import Sampled
from jaxctx.model.sampling_options import ROW, row_words
from jaxctx.types import ForwardOutputParams, ForwardOutputResult, ForwardRequest, GenerateRequest

POSITION_WORD = int(np.flatnonzero(row_words(position=1) != row_words())[0])
ForwardAnswer = Callable[[], ForwardOutputResult]  # makes the answer when called, on any thread


class Sampler:
    """Sampling options of one output as the step reads them: `row_words`, with a position for each token."""

    def __init__(self, request: GenerateRequest, seed: int, first: int = 0, *, constrained: bool = False) -> None:
        """`seed` has 64 bits: equal seeds draw equally at equal positions, in any batch. `first`: its first index.
        `constrained`: only tokens of the mask in the request's slot are drawn.
        """
        sampling = request.sampling
        self.seed = seed
        # The mask of a constrained output leaves stop tokens out itself, where anything else can follow.
        self._may_stop_at = 0 if constrained else first + request.min_tokens
        self._words = row_words(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=seed,
            biased=bool(sampling.logit_bias),
            logprobs=request.logprobs,
            constrained=constrained,
        )
        self._words_before_stop = self._words.copy()
        self._words_before_stop.view(ROW)["suppress"] = True  # no stop token may be drawn
        penalised = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        # Whether the slot must know the request's earlier tokens before its first step.
        self.needs_history = penalised or bool(sampling.logit_bias) or request.min_tokens > 0

    def write(self, row: np.ndarray, *, position: int) -> None:
        """Fill int32 `row` `[ROW_WORDS]` for the token at `position`: no stop token before `min_tokens` others."""
        row[:] = self._words_before_stop if position < self._may_stop_at else self._words
        row[POSITION_WORD] = position


def forward_result(
    asked: ForwardOutputParams, logits: np.ndarray | None, token_id: int | None = None, seed: int | None = None
) -> ForwardOutputResult:
    """The answer about one token: by the logits of its row, float32 `[vocab]`, needed for everything but a sample.

    `token_id` is the sampled token, if one was asked for, and `seed` the seed it was drawn with. Logits that are not a
    number count as minus infinity, as they do when sampling.
    """
    sample = ForwardOutputResult(index=asked.index, token_id=token_id, seed=seed)
    if logits is None or not needs_logits(asked):
        return sample
    finite = np.nan_to_num(logits, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
    logprobs = finite.astype(np.float64)
    peak = logprobs.max()
    if peak > -np.inf:  # else no token is possible
        logprobs -= peak
        logprobs -= np.log(np.exp(logprobs).sum())
    possible = logprobs[logprobs > -np.inf]
    return replace(
        sample,
        logprobs=logprobs[list(asked.logprob_ids)].tolist(),
        top=[(int(i), float(logprobs[i])) for i in best(finite, asked.top)] if asked.top else (),
        logits=logits.astype("<f4").tobytes() if asked.logits else b"",
        entropy=float(-(np.exp(possible) * possible).sum()) + 0.0 if asked.entropy else None,
    )


@dataclass(frozen=True, slots=True)
class CustomMaskForward:
    """The request of a forward call: tokens from index `start` on belong to it, and some of their rows have outputs.

    The default, `NO_FORWARD`, is for requests that are no forward call: it has no tokens and no outputs.
    """

    start: int = sys.maxsize
    outputs: Mapping[int, ForwardOutputParams] = field(default_factory=dict)  # by token index in the context, ascending
    samplers: Mapping[int, Sampler] = field(default_factory=dict)  # by token index, where a sample is asked for
    keep_working: bool = False

    def answers(self, indices: Sequence[int], logits: np.ndarray | None, sampled: Sampled) -> dict[int, ForwardAnswer]:
        """Answers about the tokens at `indices`, by index: row i of `logits`, if there are any, and of `sampled`."""
        answers: dict[int, ForwardAnswer] = {}
        for row, index in enumerate(indices):
            asked, sampler = self.outputs[index], self.samplers.get(index)
            row_logits = logits[row] if logits is not None and needs_logits(asked) else None
            token_id = int(sampled.tokens[row]) if sampler else None
            seed = sampler.seed if sampler else None
            answers[index] = partial(forward_result, asked, row_logits, token_id, seed)
        return answers


NO_FORWARD = CustomMaskForward()


def make_forward(request: ForwardRequest, first: int, new_seed: Callable[[], int]) -> CustomMaskForward:
    """The forward pass of `request`, whose first token gets the index `first` in the context."""
    outputs, samplers = {}, {}
    for output in sorted(request.outputs, key=lambda output: output.index):
        outputs[first + output.index] = output
        if output.sample is not None:
            seed = new_seed() if output.sample.seed is None else output.sample.seed
            samplers[first + output.index] = Sampler(GenerateRequest(context_id="", sampling=output.sample), seed)
    return CustomMaskForward(first, outputs, samplers, request.keep_working)


def attention_overrides(request: ForwardRequest, first: int) -> list[bytes]:
    """The encoded position and mask of every token, empty if all rows are standard ones.

    Raises InvalidArgument for a mask that reaches beyond its token.
    """
    if not (request.positions or request.masks):
        return []
    encoded: list[bytes] = []
    for offset in range(len(request.tokens)):
        index = first + offset
        position = request.positions[offset] if request.positions else index
        ranges = request.masks[offset] if request.masks else ()
        if ranges and ranges[-1][1] > index + 1:
            raise InvalidArgument.field(f"masks[{offset}]", f"token {index} sees nothing behind itself")
        encoded.append(encode_override(index, position, ranges))
    return encoded if any(encoded) else []


def needs_logits(asked: ForwardOutputParams) -> bool:
    """Whether the output needs more than a sampled token."""
    return bool(asked.logprob_ids or asked.top or asked.logits or asked.entropy)


def best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest, at least one, best first, equal ones by rising id."""
    count = min(count, len(logits))
    candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    chosen: np.ndarray = candidates[np.argsort(-logits[candidates], kind="stable")[:count]]
    return chosen
