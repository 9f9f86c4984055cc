"""Forward passes: tokens with positions and attention masks, and the requested outputs of their distributions."""

from collections.abc import Sequence

from jaxctx.convert.contexts import context_info_from_proto, context_info_to_proto
from jaxctx.convert.generation import (
    sampling_params_from_proto,
    sampling_params_to_proto,
    top_logprob_from_proto,
    top_logprob_to_proto,
)
from jaxctx.types import ForwardOutputParams, ForwardOutputResult, ForwardRequest, ForwardResult
from jaxctx.v1 import context_service_pb2, forward_pb2


def attention_mask_from_proto(message: forward_pb2.AttentionMask) -> tuple[tuple[int, int], ...]:
    """The mask of one token: ranges of (start, stop). Raises ValueError for a start without a stop."""
    bounds = message.bounds
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def attention_mask_to_proto(ranges: Sequence[tuple[int, int]]) -> forward_pb2.AttentionMask:
    """The mask of one token: start, stop, start, stop, ..."""
    bounds = []
    for start, stop in ranges:
        bounds.append(start)
        bounds.append(stop)
    return forward_pb2.AttentionMask(bounds=bounds)


def forward_output_params_from_proto(message: forward_pb2.ForwardOutputParams) -> ForwardOutputParams:
    """The requested output of one token's distribution."""
    return ForwardOutputParams(
        index=message.index,
        sample=sampling_params_from_proto(message.sample) if message.HasField("sample") else None,
        logprob_ids=tuple(message.logprob_ids),
        top=message.top,
        logits=message.logits,
        entropy=message.entropy,
    )


def forward_output_params_to_proto(value: ForwardOutputParams) -> forward_pb2.ForwardOutputParams:
    """The requested output of one token's distribution."""
    return forward_pb2.ForwardOutputParams(
        index=value.index,
        sample=None if value.sample is None else sampling_params_to_proto(value.sample),
        logprob_ids=value.logprob_ids,
        top=value.top,
        logits=value.logits,
        entropy=value.entropy,
    )


def forward_request_from_proto(message: context_service_pb2.ForwardRequest) -> ForwardRequest:
    """A request for one pass over tokens."""
    return ForwardRequest(
        context_id=message.context_id,
        tokens=tuple(message.tokens),
        positions=tuple(message.positions),
        masks=tuple([attention_mask_from_proto(each) for each in message.masks]),
        keep_working=message.keep_working,
        outputs=tuple([forward_output_params_from_proto(each) for each in message.outputs]),
    )


def forward_request_to_proto(value: ForwardRequest) -> context_service_pb2.ForwardRequest:
    """A request for one pass over tokens."""
    return context_service_pb2.ForwardRequest(
        context_id=value.context_id,
        tokens=value.tokens,
        positions=value.positions,
        masks=[attention_mask_to_proto(each) for each in value.masks],
        keep_working=value.keep_working,
        outputs=[forward_output_params_to_proto(each) for each in value.outputs],
    )


def forward_output_result_from_proto(message: forward_pb2.ForwardOutputResult) -> ForwardOutputResult:
    """The answer to one ForwardOutputParams."""
    return ForwardOutputResult(
        index=message.index,
        token_id=message.token_id if message.HasField("token_id") else None,
        seed=message.seed if message.HasField("seed") else None,
        logprobs=tuple(message.logprobs),
        top=tuple([top_logprob_from_proto(each) for each in message.top]),
        logits=message.logits,
        entropy=message.entropy if message.HasField("entropy") else None,
    )


def forward_output_result_to_proto(value: ForwardOutputResult) -> forward_pb2.ForwardOutputResult:
    """The answer to one ForwardOutputParams."""
    return forward_pb2.ForwardOutputResult(
        index=value.index,
        token_id=value.token_id,
        seed=value.seed,
        logprobs=value.logprobs,
        top=[top_logprob_to_proto(each) for each in value.top],
        logits=value.logits,
        entropy=value.entropy,
    )


def forward_result_from_proto(message: context_service_pb2.ForwardResponse) -> ForwardResult:
    """The answers of one pass."""
    return ForwardResult(
        outputs=tuple([forward_output_result_from_proto(each) for each in message.outputs]),
        context=context_info_from_proto(message.context),
    )


def forward_result_to_proto(value: ForwardResult) -> context_service_pb2.ForwardResponse:
    """The answers of one pass."""
    return context_service_pb2.ForwardResponse(
        outputs=[forward_output_result_to_proto(each) for each in value.outputs],
        context=context_info_to_proto(value.context),
    )
