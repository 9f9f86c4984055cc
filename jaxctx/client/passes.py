"""Forward passes: what is asked of one, and what it tells. Plain data, and its translation; no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxctx.client import answers, requests
from jaxctx.client.options import SamplingOptions
from jaxctx.client.types import ContextInfo
from jaxctx.errors import InvalidArgument
from jaxctx.v1 import context_service_pb2, forward_pb2

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What to tell of one token of a pass: of the distribution of the token that follows it."""

    index: int = 0  # which of the pass's tokens
    sample: SamplingOptions | None = None  # draw from it; {} as it is
    logprob_ids: Sequence[int] = ()  # log probabilities of these
    top: int = 0  # the most likely ones
    logits: bool = False  # all of it
    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What an `Output` asked for, in natural logarithms of the model's own distribution."""

    index: int
    token_id: int | None = None  # the sample; it does not join the context
    seed: int | None = None  # repeats the sample
    logprobs: Sequence[float] = ()  # of `logprob_ids`, in their order
    top: Sequence[tuple[int, float]] = ()  # best first
    logits: bytes = b""  # float32, little-endian: numpy.frombuffer(logits, "<f4")
    entropy: float | None = None  # nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The answers to the outputs that were asked for, in their order."""

    outputs: Sequence[PassResult]
    context: ContextInfo


def forward(
    context_id: str,
    tokens: Sequence[int],
    positions: Sequence[int],
    masks: Sequence[Ranges],
    keep_working: bool,
    outputs: Sequence[Output],
) -> context_service_pb2.ForwardRequest:
    """Of ContextService.Forward."""
    return requests.make(
        context_service_pb2.ForwardRequest,
        context_id=context_id,
        tokens=tokens,
        positions=positions,
        masks=[_mask(f"masks[{place}]", ranges) for place, ranges in enumerate(masks)],
        keep_working=keep_working,
        outputs=[_output(f"outputs[{place}].", output) for place, output in enumerate(outputs)],
    )


def _mask(path: str, ranges: Ranges) -> forward_pb2.AttentionMask:
    try:
        return forward_pb2.AttentionMask(bounds=[bound for start, stop in ranges for bound in (start, stop)])
    except requests.REFUSALS as error:
        raise InvalidArgument.field(path, "must be pairs of start and stop") from error


def _output(path: str, output: Output) -> forward_pb2.PassOutput:
    return requests.make(
        forward_pb2.PassOutput,
        within=path,
        index=output.index,
        sample=None if output.sample is None else requests.sampling(output.sample, f"{path}sample."),
        logprob_ids=output.logprob_ids,
        top=output.top,
        logits=output.logits,
        entropy=output.entropy,
    )


def forward_result(response: context_service_pb2.ForwardResponse) -> ForwardResult:
    """Of Forward."""
    results = [
        PassResult(
            index=each.index,
            token_id=each.token_id if each.HasField("token_id") else None,
            seed=each.seed if each.HasField("seed") else None,
            logprobs=tuple(each.logprobs),
            top=tuple((top.token_id, top.logprob) for top in each.top),
            logits=each.logits,
            entropy=each.entropy if each.HasField("entropy") else None,
        )
        for each in response.outputs
    ]
    return ForwardResult(outputs=results, context=answers.context_info(response.context))
