"""Streams over gRPC: long outputs, slow readers, errors after some pieces."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc

from jaxctx import errors
from jaxctx.types import FinishReason, GeneratePiece, TokenLogprob
from jaxctx.v1 import context_service_pb2 as pb
from tests.server.harness import create, failure


def long_outputs(tokens: int, n: int = 2) -> list[GeneratePiece]:
    pieces = []
    for place in range(tokens):
        for index in range(n):
            pieces.append(
                GeneratePiece(
                    index=index,
                    context_id="a",
                    text=f"{place} ",
                    token_ids=[place],
                    logprobs=[TokenLogprob(token_id=place, logprob=-1.0)],
                    finish=FinishReason.LENGTH if place == tokens - 1 else None,
                )
            )
    return pieces


async def test_of_long_outputs_nothing_is_lost(grpc_server: Any) -> None:
    await create(grpc_server)
    grpc_server.engine.pieces = long_outputs(600)
    received: dict[int, list[Any]] = {0: [], 1: []}
    async for piece in grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a", n=2)):
        received[piece.index].append(piece)
    for pieces in received.values():
        assert "".join(piece.text for piece in pieces) == "".join(f"{place} " for place in range(600))
        assert [token for piece in pieces for token in piece.token_ids] == list(range(600))
        assert [each.token_id for piece in pieces for each in piece.logprobs] == list(range(600))
        assert [bool(piece.finish) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_a_slow_reader_holds_only_its_own_bounded_buffer(grpc_server: Any) -> None:
    await create(grpc_server)
    size, text = 20_000, "x" * 2000  # far more than the transport's windows hold
    grpc_server.engine.pieces = [GeneratePiece(index=0, context_id="a", text=text, token_ids=[1]) for _ in range(size)]
    call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
    total = len((await call.read()).text)
    pulled = -1
    while pulled != grpc_server.engine.pulled:  # until it no longer moves
        pulled = grpc_server.engine.pulled
        await asyncio.sleep(0.2)
    assert pulled < size
    await asyncio.wait_for(create(grpc_server, "b"), 120)  # a neighbour does not notice
    while (piece := await call.read()) is not grpc.aio.EOF:
        total += len(piece.text)
    assert total == size * len(text)
    assert grpc_server.engine.cancelled == []


async def test_an_error_after_some_pieces(grpc_server: Any, make_engine: Any) -> None:
    class Broken(make_engine):  # type: ignore[misc]
        async def generate(self, caller: Any, request: Any) -> Any:
            yield GeneratePiece(index=0, context_id="a", text="x", token_ids=[1])
            raise errors.Unavailable("gone")

    served = grpc_server.lifecycle.served()
    grpc_server.lifecycle.set_ready(replace(served, model=replace(served.model, engine=Broken())))
    call = grpc_server.contexts.Generate(pb.GenerateRequest(context_id="a"))
    assert (await call.read()).text == "x"
    assert isinstance(await failure(call.read()), errors.Unavailable)
