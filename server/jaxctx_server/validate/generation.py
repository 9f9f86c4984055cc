"""Generate and Forward, and sampling wherever it is asked for."""

from collections.abc import Sequence

from jaxctx.engine.interface import ForwardRequest, GenerateRequest, PassOutput, Sampling
from jaxctx_server.validate.contexts import context
from jaxctx_server.validate.field import Field, refuse_repeated
from jaxctx_server.validate.limits import INT64_MAX

NOT_APPLIED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")  # by a pass
PLAIN = Sampling()
LOGIT_BYTES = 4
Ranges = tuple[tuple[int, int], ...]


def generate(request: Field) -> GenerateRequest:
    """What to generate."""
    limits = request.limits
    max_tokens = request["max_tokens"].integer(1, limits.max_context_tokens, None)
    logprobs = request["logprobs"].flag(False)
    top_logprobs = request["top_logprobs"].integer(0, limits.max_top_logprobs, 0)
    if top_logprobs and not logprobs:
        request["top_logprobs"].refuse("needs logprobs")
    return GenerateRequest(
        context_id=context(request),
        max_tokens=max_tokens,
        min_tokens=request["min_tokens"].integer(0, max_tokens or limits.default_max_tokens, 0),
        n=request["n"].integer(1, min(limits.max_outputs, limits.queue_limit), 1),
        sampling=sampling(request["sampling"]) or PLAIN,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stop=tuple(stop.text(1, limits.max_stop_bytes) for stop in request["stop"].items(limits.max_stops)),
        stop_token_ids=tuple(request["stop_token_ids"].token_ids(limits.max_stop_token_ids)),
        ignore_eos=request["ignore_eos"].flag(False),
        include_stop=request["include_stop"].flag(False),
    )


def sampling(field: Field) -> Sampling | None:
    """None where it was not sent."""
    if field.value is None or not field.message("must be sampling options"):
        return None
    limits = field.limits
    return Sampling(
        temperature=field["temperature"].number(0, limits.max_temperature, 1.0),
        top_k=field["top_k"].integer(0, limits.vocab_size, 0),
        top_p=field["top_p"].number(0, 1, 1.0, above=True),
        min_p=field["min_p"].number(0, 1, 0.0),
        repetition_penalty=field["repetition_penalty"].number(0, limits.max_repetition_penalty, 1.0, above=True),
        presence_penalty=field["presence_penalty"].number(-limits.max_penalty, limits.max_penalty, 0.0),
        frequency_penalty=field["frequency_penalty"].number(-limits.max_penalty, limits.max_penalty, 0.0),
        logit_bias=_logit_bias(field["logit_bias"]),
        seed=field["seed"].integer(0, INT64_MAX, None),
    )


def _logit_bias(field: Field) -> dict[int, float]:
    limits, checked = field.limits, {}
    for token, value in field.mapping(limits.max_logit_bias).items():
        bias = field.at(f"[{token if type(token) is int else ''}]", value)
        if type(token) is int and 0 <= token < limits.vocab_size:
            checked[token] = bias.number(-limits.max_bias, limits.max_bias, 0.0)
        else:
            bias.refuse(f"must be of a token id from 0 to {limits.vocab_size - 1}")
    return checked


def forward(request: Field) -> ForwardRequest:
    """A pass. That a mask ends at its token depends on the context's length, and is for the engine."""
    high = request.limits.max_context_tokens
    tokens = request["tokens"].token_ids(high, low=1)
    return ForwardRequest(
        context_id=context(request),
        tokens=tokens,
        positions=[each.integer(0, high - 1, 0) for each in _all_or_none(request["positions"], len(tokens))],
        masks=_masks(request["masks"], len(tokens)),
        keep_working=request["keep_working"].flag(False),
        outputs=_outputs(request["outputs"], len(tokens)),
    )


def _all_or_none(field: Field, tokens: int) -> Sequence[Field]:
    """An entry for each token, or none. Where the tokens are wrong (`tokens` 0), the number of entries is not."""
    entries = field.items(field.limits.max_context_tokens)
    if entries and tokens and len(entries) != tokens:
        field.refuse(f"must have one entry for each of the {tokens} tokens, or none, not {len(entries)}")
    return entries if len(entries) == tokens else ()


def _masks(field: Field, tokens: int) -> list[Ranges]:
    checked: list[Ranges] = []
    ranges = 0
    for mask in _all_or_none(field, tokens):
        checked.append(_ranges(mask["bounds"]) if mask.message("must be a mask") else ())
        ranges += len(checked[-1])
        if ranges > field.limits.max_ranges:
            field.refuse(f"must have up to {field.limits.max_ranges} ranges together")
            break
    return checked


def _ranges(field: Field) -> Ranges:
    bounds = field.sequence(2 * field.limits.max_mask_ranges)
    if len(bounds) % 2:
        field.refuse("must be start and stop of each range")
        return ()
    high = field.limits.max_context_tokens
    whole = [bound for bound in bounds if type(bound) is int]
    ranges = tuple(zip(whole[::2], whole[1::2], strict=False))
    ends = [0, *(stop for _, stop in ranges)]
    in_order = all(end <= start < stop <= high for end, (start, stop) in zip(ends, ranges, strict=False))
    if len(whole) < len(bounds) or not in_order:
        field.refuse(f"must be ranges of indices, start below stop, ascending and apart, within 0 to {high}")
        return ()
    return ranges


def _outputs(field: Field, tokens: int) -> list[PassOutput]:
    limits = field.limits
    entries = [each for each in field.items(limits.max_pass_outputs) if each.message("must be an output")]
    checked = [_output(entry, tokens) for entry in entries]
    if tokens:
        refuse_repeated([entry["index"] for entry in entries], [output.index for output in checked])
    rows = sum(output.logits for output in checked)
    if rows * limits.vocab_size * LOGIT_BYTES > limits.max_logits_bytes:
        most = limits.max_logits_bytes // (limits.vocab_size * LOGIT_BYTES)
        field.refuse(f"must ask for the logits of up to {most} tokens, not {rows}")
    return checked


def _output(field: Field, tokens: int) -> PassOutput:
    limits = field.limits
    sample = sampling(field["sample"])
    for name in NOT_APPLIED:
        if sample is not None and getattr(sample, name) != getattr(PLAIN, name):
            field["sample"][name].refuse("must be unset: a pass does not apply it")
    return PassOutput(
        index=field["index"].integer(0, max(tokens, 1) - 1, 0),
        sample=sample,
        logprob_ids=tuple(field["logprob_ids"].token_ids(limits.max_logprob_ids)),
        top=field["top"].integer(0, min(limits.max_pass_top, limits.vocab_size), 0),
        logits=field["logits"].flag(False),
        entropy=field["entropy"].flag(False),
    )
