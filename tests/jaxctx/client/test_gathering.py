"""Calls that run together."""

from __future__ import annotations

import asyncio

import pytest

from jaxctx.client.gathering import gather_all, in_turn
from jaxctx.errors import Aborted


async def test_of_calls_that_run_together_none_is_left_behind_by_an_error_of_another() -> None:
    ended: list[str] = []

    async def fails() -> str:
        raise Aborted("busy")

    async def takes_longer() -> str:
        await asyncio.sleep(0.01)
        ended.append("longer")
        return "done"

    with pytest.raises(Aborted):
        await gather_all([fails(), takes_longer()])
    assert ended == ["longer"]
    assert await gather_all([takes_longer(), takes_longer()]) == ["done", "done"]
    assert in_turn(["done", "done"]) == ["done", "done"]
