"""Forward."""

from __future__ import annotations

from collections.abc import Sequence

from jaxctx.engine.interface import ForwardRequest, PassOutput, Sampling
from jaxctx_server import requests
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.generation import sampling
from jaxctx_server.validate.limits import Limits

NOT_APPLIED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
PLAIN = Sampling()
LOGIT_BYTES = 4
Ranges = tuple[tuple[int, int], ...]


def forward(limits: Limits, request: requests.ForwardRequest) -> ForwardRequest:
    """See ForwardRequest. That a mask ends at its token depends on the context's length, and is for the engine."""
    checks = Checks()
    high = limits.max_context_tokens
    tokens = checks.token_ids("tokens", request.tokens, limits.vocab_size, high, low=1)
    checked = ForwardRequest(
        context_id=checks.context_id("context_id", request.context_id),
        tokens=tokens,
        positions=[
            checks.integer(f"positions[{place}]", position, 0, high - 1, 0)
            for place, position in enumerate(_all_or_none(checks, "positions", request.positions, len(tokens), high))
        ],
        masks=_masks(checks, limits, _all_or_none(checks, "masks", request.masks, len(tokens), high)),
        keep_working=checks.flag("keep_working", request.keep_working, False),
        outputs=_outputs(checks, limits, request.outputs, len(tokens)),
    )
    checks.done()
    return checked


def _all_or_none(checks: Checks, path: str, value: object, tokens: int, high: int) -> Sequence[object]:
    """An entry for each token, or none. Where the tokens are wrong (`tokens` 0), the number of entries is not."""
    entries = checks.items(path, value, high)
    if entries and tokens and len(entries) != tokens:
        checks.refuse(path, f"must have one entry for each of the {tokens} tokens, or none, not {len(entries)}")
    return entries if len(entries) == tokens else ()


def _masks(checks: Checks, limits: Limits, entries: Sequence[object]) -> list[Ranges]:
    checked: list[Ranges] = []
    ranges = 0
    for place, entry in enumerate(entries):
        checked.append(_mask(checks, limits, f"masks[{place}]", entry))
        ranges += len(checked[-1])
        if ranges > limits.max_ranges:
            checks.refuse("masks", f"must have up to {limits.max_ranges} ranges together")
            return []
    return checked


def _mask(checks: Checks, limits: Limits, path: str, value: object) -> Ranges:
    if not isinstance(value, requests.AttentionMask):
        checks.refuse(path, "must be a mask")
        return ()
    path = f"{path}.bounds"
    bounds = checks.items(path, value.bounds, 2 * limits.max_mask_ranges)
    if len(bounds) % 2:
        checks.refuse(path, "must be start and stop of each range")
        return ()
    whole = [bound for bound in bounds if type(bound) is int]
    starts, stops = whole[::2], whole[1::2]
    if (
        len(whole) < len(bounds)
        or any(start >= stop for start, stop in zip(starts, stops, strict=True))
        or any(start < before for start, before in zip(starts, [0, *stops[:-1]], strict=False))
        or (stops and stops[-1] > limits.max_context_tokens)
    ):
        high = limits.max_context_tokens
        checks.refuse(path, f"must be ranges of indices, start below stop, ascending and apart, within 0 to {high}")
        return ()
    return tuple(zip(starts, stops, strict=True))


def _outputs(checks: Checks, limits: Limits, value: object, count: int) -> list[PassOutput]:
    entries = checks.items("outputs", value, limits.max_pass_outputs)
    checked = [_output(checks, limits, f"outputs[{place}]", entry, count) for place, entry in enumerate(entries)]
    seen: set[int] = set()
    for place, output in enumerate(checked):
        if count and output.index in seen:
            checks.refuse(f"outputs[{place}].index", "must be different from those before it")
        seen.add(output.index)
    rows = sum(output.logits for output in checked)
    if rows * limits.vocab_size * LOGIT_BYTES > limits.max_logits_bytes:
        most = limits.max_logits_bytes // (limits.vocab_size * LOGIT_BYTES)
        checks.refuse("outputs", f"must ask for the logits of up to {most} tokens, not {rows}")
    return checked


def _output(checks: Checks, limits: Limits, path: str, value: object, count: int) -> PassOutput:
    if not isinstance(value, requests.PassOutput):
        checks.refuse(path, "must be an output")
        return PassOutput(index=0)
    sample = None if value.sample is None else sampling(checks, limits, f"{path}.sample", value.sample)
    for name in NOT_APPLIED:
        if sample is not None and getattr(sample, name) != getattr(PLAIN, name):
            checks.refuse(f"{path}.sample.{name}", "must be unset: a pass does not apply it")
    most = min(limits.max_pass_top, limits.vocab_size)
    ids = checks.token_ids(f"{path}.logprob_ids", value.logprob_ids, limits.vocab_size, limits.max_logprob_ids)
    return PassOutput(
        index=checks.integer(f"{path}.index", value.index, 0, max(count, 1) - 1, 0),
        sample=sample,
        logprob_ids=tuple(ids),
        top=checks.integer(f"{path}.top", value.top, 0, most, 0),
        logits=checks.flag(f"{path}.logits", value.logits, False),
        entropy=checks.flag(f"{path}.entropy", value.entropy, False),
    )
