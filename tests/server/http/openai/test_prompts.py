"""Prompts of completions: texts and token ids, one or several."""

from __future__ import annotations

from typing import Any

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.v1.content_pb2 import TokenIds
from jaxctx.v1.context_service_pb2 import FillRequest
from jaxctx_server.http.openai.prompts import parse_prompts

TEXT, TOKENS = FillRequest(text="x"), FillRequest(tokens=TokenIds(ids=[1, 2]))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", [TEXT]),
        (["x"], [TEXT]),
        ([1, 2], [TOKENS]),
        ([[1, 2]], [TOKENS]),
        (["x", "x"], [TEXT, TEXT]),
        ([[1, 2], "x"], [TOKENS, TEXT]),
        ([], [FillRequest(tokens=TokenIds())]),
    ],
)
def test_prompts(prompt: Any, expected: list[FillRequest]) -> None:
    assert parse_prompts(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([1, "x"], "prompt"),
        ([True], "prompt"),
        ([[True]], "prompt"),
        ([2**31], "prompt"),
        ([[1], [2**31]], "prompt[1]"),
        (["x", None], "prompt[1]"),
        (["x", "\ud800"], "prompt[1]"),
        (["x"] * 1025, "prompt"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_prompts(prompt)
    assert refused.value.violations[0].field == field
