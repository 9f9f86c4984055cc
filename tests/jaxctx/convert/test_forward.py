"""Forward passes: masks as ranges, and zeros that are results."""

from __future__ import annotations

import pytest

from jaxctx import types
from jaxctx.convert import forward
from jaxctx.v1 import context_service_pb2, forward_pb2


@pytest.mark.parametrize(
    ("bounds", "ranges"),
    [([], ()), ([0, 4], ((0, 4),)), ([0, 4, 7, 9], ((0, 4), (7, 9))), ([7, 9, 0, 4], ((7, 9), (0, 4)))],
)
def test_a_mask_is_ranges_in_their_order(bounds: list[int], ranges: tuple[tuple[int, int], ...]) -> None:
    mask = forward_pb2.AttentionMask(bounds=bounds)
    assert forward.attention_mask_from_proto(mask) == ranges
    assert forward.attention_mask_to_proto(ranges) == mask


@pytest.mark.parametrize("bounds", [[0], [0, 4, 7]])
def test_a_start_without_a_stop_is_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        forward.attention_mask_from_proto(forward_pb2.AttentionMask(bounds=bounds))
    request = context_service_pb2.ForwardRequest(masks=[forward_pb2.AttentionMask(bounds=bounds)])
    with pytest.raises(ValueError, match="zip"):
        forward.forward_request_from_proto(request)


def test_sampling_by_the_defaults_is_not_no_sampling() -> None:
    by_default = types.ForwardOutputParams(sample=types.SamplingParams())
    nothing = types.ForwardOutputParams()
    for output in (by_default, nothing):
        assert forward.forward_output_params_from_proto(forward.forward_output_params_to_proto(output)) == output
    assert forward.forward_output_params_from_proto(forward_pb2.ForwardOutputParams()) == nothing
    assert not forward.forward_output_params_to_proto(nothing).HasField("sample")


def test_zero_is_a_result_and_unset_is_none() -> None:
    zeros = types.ForwardOutputResult(index=0, token_id=0, seed=0, entropy=0.0)
    sent = forward.forward_output_result_to_proto(zeros)
    assert [sent.HasField(name) for name in ("token_id", "seed", "entropy")] == [True, True, True]
    assert forward.forward_output_result_from_proto(sent) == zeros
    empty = forward.forward_output_result_from_proto(forward_pb2.ForwardOutputResult(index=2))
    assert empty == types.ForwardOutputResult(index=2)


def test_masks_and_outputs_of_a_request_stay_in_their_order() -> None:
    request = types.ForwardRequest(
        context_id="c",
        tokens=(4, 5),
        positions=(9, 3),
        masks=(((0, 1),), ((0, 1), (2, 3))),
        outputs=(types.ForwardOutputParams(index=1), types.ForwardOutputParams(index=0, top=3)),
        keep_working=True,
    )
    sent = forward.forward_request_to_proto(request)
    assert [list(mask.bounds) for mask in sent.masks] == [[0, 1], [0, 1, 2, 3]]
    assert [output.index for output in sent.outputs] == [1, 0]
    assert forward.forward_request_from_proto(sent) == request
