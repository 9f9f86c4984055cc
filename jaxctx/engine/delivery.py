"""Delivery: what a sequence has become, as the plain data that its caller gets."""

from __future__ import annotations

from dataclasses import replace

from jaxctx.engine.interface import ContextInfo, FillResult, GeneratePiece, TokenLogprob, Usage
from jaxctx.engine.output import Emitted
from jaxctx.engine.sequence import Sequence
from jaxctx.engine.step import StepOutput


def fill_result(sequence: Sequence, info: ContextInfo) -> FillResult:
    """Of a fill that is done."""
    assert sequence.computed is not None
    return FillResult(resident=sequence.resident, restored=0, computed=sequence.computed, context=info)


def token_piece(sequence: Sequence, emitted: Emitted, step: StepOutput, row: int) -> GeneratePiece:
    """Of one sampled token: row `row` of a step's samples."""
    assert sequence.request is not None
    token = int(step.tokens[row])
    logprobs: tuple[TokenLogprob, ...] = ()
    if sequence.request.logprobs:
        top = range(sequence.request.top_logprobs)
        alternatives = [(int(step.top_ids[row, i]), float(step.top_logprobs[row, i])) for i in top]
        logprobs = (TokenLogprob(token_id=token, logprob=float(step.logprobs[row]), top=alternatives),)
    return GeneratePiece(
        index=sequence.index,
        context_id=sequence.context.id,
        text=emitted.text,
        token_ids=(token,),
        logprobs=logprobs,
    )


def last_piece(sequence: Sequence, emitted: Emitted, piece: GeneratePiece, info: ContextInfo) -> GeneratePiece:
    """`piece` with what only an output's last one says."""
    assert sequence.output is not None
    assert sequence.sampler is not None
    assert sequence.computed is not None
    usage = Usage(
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.prompt_tokens - sequence.computed,
        computed_tokens=sequence.computed,
        completion_tokens=sequence.output.tokens,
    )
    return replace(
        piece,
        finish=emitted.finish,
        stop_match=emitted.stop_match,
        seed=sequence.sampler.seed,
        usage=usage,
        context=info,
    )
