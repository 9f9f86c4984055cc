"""Streams from the step thread to a reader: few pieces for one who does not keep up, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from jaxctx.engine.core.output_stream import CallbackQueue, OutputStream
from jaxctx.errors import Unavailable
from jaxctx.types import FinishReason, GeneratePiece, TokenLogprob


def piece(index: int, place: int, finish: FinishReason | None = None) -> GeneratePiece:
    logprob = TokenLogprob(token_id=place, logprob=-1.0)
    return GeneratePiece(
        index=index, context_id="a", text=f"{place} ", token_ids=[place], logprobs=[logprob], finish=finish
    )


def opened(limit: int = 1000) -> tuple[OutputStream, CallbackQueue, list[bool]]:
    callbacks, woken = CallbackQueue(), []
    loop = asyncio.get_running_loop()
    return OutputStream(loop, callbacks, outputs=2, limit=limit, wake=lambda: woken.append(True)), callbacks, woken


async def test_pieces_that_wait_are_merged_and_nothing_is_lost() -> None:
    stream, callbacks, _ = opened()
    received: dict[int, list[GeneratePiece]] = {0: [], 1: []}

    async def read() -> None:
        async for each in stream.pieces():
            received[each.index].append(each)

    reader = asyncio.create_task(read())
    for place in range(600):
        for index in range(2):
            stream.add_piece(piece(index, place, FinishReason.LENGTH if place == 599 else None))
        if place % 100 < 3:  # the reader sees one by one what comes by itself
            callbacks.flush()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    for _ in range(2):
        stream.set_result(None)
    callbacks.flush()
    await reader
    for pieces in received.values():
        assert "".join(each.text for each in pieces) == "".join(f"{place} " for place in range(600))
        assert [token for each in pieces for token in each.token_ids] == list(range(600))
        assert [logprob.token_id for each in pieces for logprob in each.logprobs] == list(range(600))
        assert [bool(each.finish) for each in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [len(each.token_ids) for each in pieces[:3]] == [1, 1, 1]
        assert len(pieces) < 30


async def test_a_reader_that_catches_up_wakes_the_engine_once() -> None:
    stream, callbacks, woken = opened(limit=4)
    for place in range(5):
        assert not stream.backpressured()
        for index in range(2):
            stream.add_piece(piece(index, place))
    assert stream.backpressured()
    callbacks.flush()
    pieces = stream.pieces()
    # In turns, and no more at once than one output may lag behind: a message has its limits.
    assert [len((await anext(pieces)).token_ids) for _ in range(4)] == [4, 4, 1, 1]
    assert woken == [True]
    assert not stream.backpressured()


async def test_an_error_comes_after_the_pieces_before_it() -> None:
    stream, callbacks, _ = opened()
    stream.add_piece(piece(0, 7))
    stream.set_error(Unavailable("gone"))
    callbacks.flush()
    pieces = stream.pieces()
    assert (await anext(pieces)).token_ids == [7]
    with pytest.raises(Unavailable):
        await anext(pieces)


async def test_backpressured_is_a_question_without_effects() -> None:
    stream, callbacks, woken = opened(limit=4)
    for place in range(10):
        stream.add_piece(piece(0, place))
    assert [stream.backpressured() for _ in range(3)] == [True] * 3
    callbacks.flush()
    assert [len((await anext(stream.pieces())).token_ids) for _ in range(3)] == [4, 4, 2]
    assert woken == [True]


async def test_a_stream_that_fills_while_its_reader_comes_back_wakes_the_engine_again() -> None:
    """Whatever the reader saw before: after the last look of the engine it passes half of the limit once."""
    stream, callbacks, woken = opened(limit=2)
    pieces = stream.pieces()
    for burst in range(5):
        for place in range(6):
            stream.add_piece(piece(0, place))
        callbacks.flush()
        assert stream.backpressured()
        while stream.backpressured() or len(woken) == burst:
            await anext(pieces)
        while stream._sent_tokens > stream._read_tokens:
            await anext(pieces)
    assert len(woken) == 5
