"""Generation: neutral values of sampling, why an output ended, and zeros that are not None."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx import types
from jaxctx.convert import generation
from jaxctx.v1 import context_service_pb2, generation_pb2

PIECE = types.GeneratePiece(index=0, context_id="a")


def test_finish_reasons() -> None:
    unknown: Any = 99  # a number that only a later server knows
    assert generation.finish_reason_from_proto(0) is None
    assert generation.finish_reason_from_proto(unknown) is types.FinishReason.STOP
    assert generation.finish_reason_to_proto(None) == 0
    assert generation.finish_reason_to_proto(types.FinishReason.LENGTH) == generation_pb2.FINISH_REASON_LENGTH
    piece = context_service_pb2.GenerateResponse(finish=unknown)
    assert generation.generate_piece_from_proto(piece).finish is types.FinishReason.STOP


@pytest.mark.parametrize("match", [None, "", "end", 0, 7])
def test_a_stop_match_is_a_text_or_a_token_or_none(match: str | int | None) -> None:
    piece = types.GeneratePiece(index=0, context_id="a", stop_match=match)
    sent = generation.generate_piece_to_proto(piece)
    expected_field = None if match is None else "stop_text" if isinstance(match, str) else "stop_token_id"
    assert sent.WhichOneof("stop_match") == expected_field
    received = generation.stop_match_from_proto(sent)
    assert (received, type(received)) == (match, type(match))


def test_a_piece_before_the_last_has_neither_seed_nor_usage_nor_context() -> None:
    sent = generation.generate_piece_to_proto(PIECE)
    assert [sent.HasField(name) for name in ("seed", "usage", "context")] == [False, False, False]
    assert sent.finish == 0
    assert generation.generate_piece_from_proto(sent) == PIECE


def test_zeros_of_the_last_piece_are_not_none() -> None:
    usage = generation.usage_from_proto(generation_pb2.Usage())
    for match in (0, ""):
        piece = types.GeneratePiece(index=0, context_id="a", stop_match=match, seed=0, usage=usage)
        assert generation.generate_piece_from_proto(generation.generate_piece_to_proto(piece)) == piece


def test_usage_does_not_get_mixed_up() -> None:
    message = generation_pb2.Usage(
        prompt_tokens=1, cached_tokens=2, computed_tokens=3, completion_tokens=4, restored_tokens=5
    )
    usage = generation.usage_from_proto(message)
    assert usage == types.Usage(
        prompt_tokens=1, cached_tokens=2, computed_tokens=3, completion_tokens=4, restored_tokens=5
    )
    assert generation.usage_to_proto(usage) == message


def test_unset_sampling_is_the_distribution_of_the_model() -> None:
    sampling = generation.sampling_params_from_proto(generation_pb2.SamplingParams())
    assert sampling == types.SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert sampling.seed is None


def test_sampling_that_is_set_to_zero_stays_zero() -> None:
    zeros = generation_pb2.SamplingParams(temperature=0.0, top_p=0.0, repetition_penalty=0.0, seed=0)
    sampling = generation.sampling_params_from_proto(zeros)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.seed) == (0.0, 0.0, 0.0, 0)


def test_the_logit_bias_is_a_copy_of_the_message() -> None:
    message = generation_pb2.SamplingParams(logit_bias={5: 1.0})
    sampling = generation.sampling_params_from_proto(message)
    message.logit_bias[5] = 2.0
    assert sampling.logit_bias == {5: 1.0}


def test_a_request_asks_for_one_output_by_default() -> None:
    request = generation.generate_request_from_proto(context_service_pb2.GenerateRequest(context_id="c"))
    assert request == types.GenerateRequest(context_id="c")
    assert (request.n, request.max_tokens) == (1, None)
    zero = context_service_pb2.GenerateRequest(context_id="c", n=0, max_tokens=0)
    assert generation.generate_request_from_proto(zero).n == 0  # to be refused by the server
    assert generation.generate_request_from_proto(zero).max_tokens == 0


def test_alternatives_of_a_token_stay_in_their_order() -> None:
    logprob = types.TokenLogprob(token_id=3, logprob=-0.5, top=((3, -0.5), (9, -1.5)))
    sent = generation.token_logprob_to_proto(logprob)
    assert [(each.token_id, each.logprob) for each in sent.top] == [(3, -0.5), (9, -1.5)]
    assert generation.token_logprob_from_proto(sent) == logprob
    assert generation.top_logprob_from_proto(sent.top[1]) == (9, -1.5)


FORMATS = [
    types.OutputFormat(json_object=True),
    types.OutputFormat(json_object=False),  # to be refused by the server
    types.OutputFormat(json_schema="{}"),
    types.OutputFormat(regex=""),
    types.OutputFormat(grammar="start: /a/"),
    types.OutputFormat(choices=()),
    types.OutputFormat(choices=("a", "b")),
]


@pytest.mark.parametrize("output_format", FORMATS, ids=str)
def test_each_kind_of_output_format_stays_the_one_that_is_set(output_format: types.OutputFormat) -> None:
    sent = generation.output_format_to_proto(output_format)
    received = generation_pb2.OutputFormat.FromString(sent.SerializeToString())
    assert received.WhichOneof("format") is not None
    assert generation.output_format_from_proto(received) == output_format


def test_no_output_format_is_none_and_not_an_empty_one() -> None:
    request = context_service_pb2.GenerateRequest(context_id="c")
    assert generation.generate_request_from_proto(request).output_format is None
    sent = generation.generate_request_to_proto(types.GenerateRequest(context_id="c"))
    assert not sent.HasField("output_format")
