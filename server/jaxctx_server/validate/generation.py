"""Generate, and sampling wherever it is asked for."""

from __future__ import annotations

from jaxctx.engine.interface import GenerateRequest, Sampling
from jaxctx_server import requests
from jaxctx_server.validate.checks import Checks
from jaxctx_server.validate.limits import INT64_MAX, Limits


def generate(limits: Limits, request: requests.GenerateRequest) -> GenerateRequest:
    """See GenerateRequest."""
    checks = Checks()
    max_tokens = checks.integer("max_tokens", request.max_tokens, 1, limits.max_context_tokens, None)
    logprobs = checks.flag("logprobs", request.logprobs, False)
    top_logprobs = checks.integer("top_logprobs", request.top_logprobs, 0, limits.max_top_logprobs, 0)
    if top_logprobs and top_logprobs == request.top_logprobs and not logprobs:
        checks.refuse("top_logprobs", "needs logprobs")
    stops = checks.items("stop", request.stop, limits.max_stops)
    checked = GenerateRequest(
        context_id=checks.context_id("context_id", request.context_id),
        max_tokens=max_tokens,
        min_tokens=checks.integer("min_tokens", request.min_tokens, 0, max_tokens or limits.default_max_tokens, 0),
        n=checks.integer("n", request.n, 1, min(limits.max_outputs, limits.queue_limit), 1),
        sampling=sampling(checks, limits, "sampling", request.sampling),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stop=tuple(checks.string(f"stop[{i}]", stop, 1, limits.max_stop_bytes) for i, stop in enumerate(stops)),
        stop_token_ids=tuple(
            checks.token_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size, limits.max_stop_token_ids)
        ),
        ignore_eos=checks.flag("ignore_eos", request.ignore_eos, False),
        include_stop=checks.flag("include_stop", request.include_stop, False),
    )
    checks.done()
    return checked


def sampling(checks: Checks, limits: Limits, path: str, value: object) -> Sampling:
    """See Sampling."""
    if value is None:
        return Sampling()
    if not isinstance(value, requests.Sampling):
        checks.refuse(path, "must be sampling options")
        return Sampling()
    penalty = limits.max_penalty
    return Sampling(
        temperature=checks.number(f"{path}.temperature", value.temperature, 0, limits.max_temperature, 1.0),
        top_k=checks.integer(f"{path}.top_k", value.top_k, 0, limits.vocab_size, 0),
        top_p=checks.number(f"{path}.top_p", value.top_p, 0, 1, 1.0, above=True),
        min_p=checks.number(f"{path}.min_p", value.min_p, 0, 1, 0.0),
        repetition_penalty=checks.number(
            f"{path}.repetition_penalty",
            value.repetition_penalty,
            0,
            limits.max_repetition_penalty,
            1.0,
            above=True,
        ),
        presence_penalty=checks.number(f"{path}.presence_penalty", value.presence_penalty, -penalty, penalty, 0.0),
        frequency_penalty=checks.number(f"{path}.frequency_penalty", value.frequency_penalty, -penalty, penalty, 0.0),
        logit_bias=_logit_bias(checks, limits, f"{path}.logit_bias", value.logit_bias),
        seed=checks.integer(f"{path}.seed", value.seed, 0, INT64_MAX, None),
    )


def _logit_bias(checks: Checks, limits: Limits, path: str, value: object) -> dict[int, float]:
    checked = {}
    for token, bias in checks.mapping(path, value, limits.max_logit_bias).items():
        if not (type(token) is int and 0 <= token < limits.vocab_size):
            entry = f"{path}[{token if type(token) is int else ''}]"
            checks.refuse(entry, f"must be of a token id from 0 to {limits.vocab_size - 1}")
        else:
            checked[token] = checks.number(f"{path}[{token}]", bias, -limits.max_bias, limits.max_bias, 0.0)
    return checked
