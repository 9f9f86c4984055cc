"""Generation: how tokens are drawn, the request of an output, and the pieces in which it comes."""

from jaxctx.convert.contexts import context_info_from_proto, context_info_to_proto
from jaxctx.types import FinishReason, GeneratePiece, GenerateRequest, OutputFormat, SamplingParams, TokenLogprob, Usage
from jaxctx.v1 import context_service_pb2, generation_pb2

_FINISH_REASON_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_FROM_PROTO: dict[int, FinishReason] = {
    number: member for member, number in _FINISH_REASON_TO_PROTO.items()
}


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """Why an output ended, None for 0. A number that only a later version knows is STOP."""
    if number == generation_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_REASON_FROM_PROTO.get(number, FinishReason.STOP)


def finish_reason_to_proto(value: FinishReason | None) -> generation_pb2.FinishReason.ValueType:
    """The reason's number; 0 for None."""
    return generation_pb2.FINISH_REASON_UNSPECIFIED if value is None else _FINISH_REASON_TO_PROTO[value]


def top_logprob_from_proto(message: generation_pb2.TopLogprob) -> tuple[int, float]:
    """One of the most likely tokens: its id and log probability."""
    return message.token_id, message.logprob


def top_logprob_to_proto(value: tuple[int, float]) -> generation_pb2.TopLogprob:
    """One of the most likely tokens: its id and log probability."""
    token_id, logprob = value
    return generation_pb2.TopLogprob(token_id=token_id, logprob=logprob)


def token_logprob_from_proto(message: generation_pb2.TokenLogprob) -> TokenLogprob:
    """How likely one token was."""
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple([top_logprob_from_proto(each) for each in message.top]),
    )


def token_logprob_to_proto(value: TokenLogprob) -> generation_pb2.TokenLogprob:
    """How likely one token was."""
    return generation_pb2.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        top=[top_logprob_to_proto(each) for each in value.top],
    )


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    """What one output cost."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        computed_tokens=message.computed_tokens,
        completion_tokens=message.completion_tokens,
        restored_tokens=message.restored_tokens,
    )


def usage_to_proto(value: Usage) -> generation_pb2.Usage:
    """What one output cost."""
    return generation_pb2.Usage(
        prompt_tokens=value.prompt_tokens,
        cached_tokens=value.cached_tokens,
        computed_tokens=value.computed_tokens,
        completion_tokens=value.completion_tokens,
        restored_tokens=value.restored_tokens,
    )


def stop_match_from_proto(message: context_service_pb2.GenerateResponse) -> str | int | None:
    """The stop string or token that ended an output; None if neither did."""
    kind = message.WhichOneof("stop_match")
    if kind is None:
        return None
    return message.stop_text if kind == "stop_text" else message.stop_token_id


def generate_piece_from_proto(message: context_service_pb2.GenerateResponse) -> GeneratePiece:
    """A part of one output."""
    return GeneratePiece(
        index=message.index,
        context_id=message.context_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple([token_logprob_from_proto(each) for each in message.logprobs]),
        finish=finish_reason_from_proto(message.finish),
        stop_match=stop_match_from_proto(message),
        seed=message.seed if message.HasField("seed") else None,
        usage=usage_from_proto(message.usage) if message.HasField("usage") else None,
        context=context_info_from_proto(message.context) if message.HasField("context") else None,
    )


def generate_piece_to_proto(value: GeneratePiece) -> context_service_pb2.GenerateResponse:
    """A part of one output."""
    message = context_service_pb2.GenerateResponse(
        index=value.index,
        context_id=value.context_id,
        text=value.text,
        token_ids=value.token_ids,
        logprobs=[token_logprob_to_proto(each) for each in value.logprobs],
        finish=finish_reason_to_proto(value.finish),
        seed=value.seed,
        usage=None if value.usage is None else usage_to_proto(value.usage),
        context=None if value.context is None else context_info_to_proto(value.context),
    )
    if isinstance(value.stop_match, str):
        message.stop_text = value.stop_match
    elif value.stop_match is not None:
        message.stop_token_id = value.stop_match
    return message


def sampling_params_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """How the next token is drawn; what is unset has the value of the model's own distribution."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if message.HasField("seed") else None,
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
    )


def sampling_params_to_proto(value: SamplingParams) -> generation_pb2.SamplingParams:
    """How the next token is drawn."""
    return generation_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        logit_bias=value.logit_bias,
        seed=value.seed,
        allowed_token_ids=value.allowed_token_ids,
        bad_words=value.bad_words,
    )


def output_format_from_proto(message: generation_pb2.OutputFormat) -> OutputFormat:
    """What an output's text may look like."""
    kind = message.WhichOneof("format")
    return OutputFormat(
        json_object=message.json_object if kind == "json_object" else None,
        json_schema=message.json_schema if kind == "json_schema" else None,
        regex=message.regex if kind == "regex" else None,
        grammar=message.grammar if kind == "grammar" else None,
        choices=tuple(message.choices.texts) if kind == "choices" else None,
    )


def output_format_to_proto(value: OutputFormat) -> generation_pb2.OutputFormat:
    """What an output's text may look like."""
    if value.json_schema is not None:
        return generation_pb2.OutputFormat(json_schema=value.json_schema)
    if value.regex is not None:
        return generation_pb2.OutputFormat(regex=value.regex)
    if value.grammar is not None:
        return generation_pb2.OutputFormat(grammar=value.grammar)
    if value.choices is not None:
        return generation_pb2.OutputFormat(choices=generation_pb2.Choices(texts=value.choices))
    return generation_pb2.OutputFormat(json_object=bool(value.json_object))


def generate_request_from_proto(message: context_service_pb2.GenerateRequest) -> GenerateRequest:
    """A request to continue a context."""
    return GenerateRequest(
        context_id=message.context_id,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        n=message.n if message.HasField("n") else 1,
        sampling=sampling_params_from_proto(message.sampling),
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        resume_tokens=message.resume_tokens,
        include_special_tokens=message.include_special_tokens,
        output_format=output_format_from_proto(message.output_format) if message.HasField("output_format") else None,
    )


def generate_request_to_proto(value: GenerateRequest) -> context_service_pb2.GenerateRequest:
    """A request to continue a context."""
    return context_service_pb2.GenerateRequest(
        context_id=value.context_id,
        max_tokens=value.max_tokens,
        min_tokens=value.min_tokens,
        n=value.n,
        sampling=sampling_params_to_proto(value.sampling),
        logprobs=value.logprobs,
        top_logprobs=value.top_logprobs,
        stop=value.stop,
        stop_token_ids=value.stop_token_ids,
        ignore_eos=value.ignore_eos,
        include_stop=value.include_stop,
        resume_tokens=value.resume_tokens,
        include_special_tokens=value.include_special_tokens,
        output_format=None if value.output_format is None else output_format_to_proto(value.output_format),
    )
