"""Passes: steps whose rows have positions and masks of their own, and which tell whole distributions.

A pass is written like any other step (`batch.write_part`), of one sequence's rows from row 0 on; `write_marks` and
`write_outputs` add what is its own. `pass_result` turns a row of its logits into an answer; it is pure, and slow enough
for a thread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxctx.cache.marks import decode_mark
from jaxctx.engine.answers import PassResult
from jaxctx.engine.requests import PassOutput
from jaxctx.engine.sequence import Sampler
from jaxctx.engine.step import StepInputs


def write_marks(views: StepInputs, first: int, rows: int, marks: Mapping[int, bytes]) -> None:
    """Give rows `0 .. rows - 1`, of the indices from `first` on, the positions and masks of `marks`, by index."""
    for row in range(rows):
        if not (encoded := marks.get(first + row)):
            continue
        mark = decode_mark(encoded)
        views.positions[row] = mark.position
        if mark.ranges:
            seen = np.zeros(32 * views.mask.shape[1], np.bool_)
            for start, stop in mark.ranges:
                seen[start:stop] = True
            views.mask[row] = np.packbits(seen, bitorder="little").view("<i4")


def write_outputs(views: StepInputs, first: int, outputs: Sequence[int], samplers: Mapping[int, Sampler]) -> None:
    """Ask about the tokens at the indices `outputs`, in this order; `first` is that of row 0.

    Tokens are drawn by their `samplers`, by index, in nobody's slot: without penalties and bias. Others are greedy.
    """
    for place, index in enumerate(outputs):
        views.sample_rows[place] = index - first
        if index in samplers:
            samplers[index].write(views.sampling[place], position=index + 1, suppress=False)


def pass_result(asked: PassOutput, logits: np.ndarray | None, token_id: int | None, seed: int | None) -> PassResult:
    """What was asked of a row of float32 `logits` `[vocab]`, which are needed for all but a sample.

    `token_id` is what was drawn and `seed` what repeats it, both None if nothing was to be. Logits that are no number
    count as minus infinity, as they do for samples.
    """
    if logits is None or not (asked.logprob_ids or asked.top or asked.logits or asked.entropy):
        return PassResult(index=asked.index, token_id=token_id, seed=seed)
    finite = np.nan_to_num(logits, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
    logprobs = log_softmax(finite.astype(np.float64))
    return PassResult(
        index=asked.index,
        token_id=token_id,
        seed=seed,
        logprobs=logprobs[list(asked.logprob_ids)].tolist(),
        top=[(int(i), float(logprobs[i])) for i in best(finite, asked.top)],
        logits=logits.astype("<f4").tobytes() if asked.logits else b"",
        entropy=entropy(logprobs) if asked.entropy else None,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities; float64, all minus infinity if all logits are."""
    peak = logits.max()
    if peak == -np.inf:
        return logits
    below = logits - peak
    logprobs: np.ndarray = below - np.log(np.exp(below).sum())
    return logprobs


def best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest, best first, equal ones by rising id."""
    if count == 0:
        return np.zeros(0, np.int64)
    count = min(count, len(logits))
    candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    chosen: np.ndarray = candidates[np.argsort(-logits[candidates], kind="stable")[:count]]
    return chosen


def entropy(logprobs: np.ndarray) -> float:
    """In nats."""
    possible = logprobs[logprobs > -np.inf]
    return float(-(np.exp(possible) * possible).sum()) + 0.0
