"""How many tokens two sequences have in common."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import Message

from jaxctx.v1.content_pb2 import TokenIds
from jaxctx_server.http.tokens import common_length


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([9, 2, 3], [1, 2, 3], 0),
    ],
)
def test_the_common_beginning(a: list[int], b: list[int], common: int) -> None:
    assert common_length(a, b) == common_length(b, a) == common


def test_what_is_equal_again_behind_a_difference_does_not_count() -> None:
    choose = random.Random(0)
    tokens = [choose.randrange(1000) for _ in range(500)]
    for place in range(0, 500, 7):
        other = list(tokens)
        other[place] += 1
        assert common_length(tokens, other) == place


def test_fields_of_messages_and_tuples_are_sequences_too() -> None:
    message: Message = TokenIds(ids=[1, 2, 3, 4])
    assert common_length(message.ids, (1, 2, 5)) == 2  # type: ignore[attr-defined]
