"""Delivery: what a sequence has become, as the plain data that its caller gets."""

from __future__ import annotations

from dataclasses import fields, replace

from jaxctx.cache.contexts import ContextCache
from jaxctx.engine.interface import (
    ContextInfo,
    EngineStats,
    Expiry,
    FillResult,
    GeneratePiece,
    SnapshotInfo,
    TokenLogprob,
    Usage,
)
from jaxctx.engine.output import Emitted
from jaxctx.engine.scheduler import Scheduler
from jaxctx.engine.sequence import Sequence
from jaxctx.engine.step import StepOutput
from jaxctx.lifetime import Lifetime
from jaxctx.store import Version


def fill_result(sequence: Sequence, info: ContextInfo) -> FillResult:
    """Of a fill that is done."""
    assert sequence.computed is not None
    return FillResult(resident=sequence.resident, restored=sequence.restored, computed=sequence.computed, context=info)


def expiry(lifetime: Lifetime) -> Expiry | None:
    """When an object ends, as its owner is told."""
    if lifetime.at is None or lifetime.seconds is None:
        return None
    return Expiry(lifetime.at, lifetime.seconds, lifetime.sliding)


def snapshot_info(version: Version, *, latest: bool) -> SnapshotInfo:
    """A version of a snapshot, as its owner is told."""
    same = {each.name: getattr(version, each.name) for each in fields(SnapshotInfo) if hasattr(version, each.name)}
    return SnapshotInfo(**same, latest=latest, expiry=expiry(version.lifetime))


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


def load(cache: ContextCache, scheduler: Scheduler, **others: int) -> EngineStats:
    """Load and memory of an engine; `others` is what only it knows."""
    pool, tiers = cache.stats(), cache.memory.tiers
    return EngineStats(
        pages_total=pool.total,
        pages_free=pool.free,
        pages_cached=pool.cached,
        pages_held=pool.held,
        pages_reserved=scheduler.budget.reserved,
        contexts=len(cache),
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        tokens_computed=scheduler.tokens_computed,
        tokens_cached=scheduler.tokens_cached,
        tokens_restored=scheduler.tokens_restored,
        preemptions=scheduler.preemptions,
        suspensions=scheduler.budget.suspensions,
        host_pages_total=tiers.host.total,
        host_pages_used=tiers.host.used,
        disk_pages_total=tiers.disk.total,
        disk_pages_used=tiers.disk.used,
        **others,  # type: ignore[arg-type]
    )
