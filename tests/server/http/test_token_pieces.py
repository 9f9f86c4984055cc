"""Single tokens as bytes: each is asked for once."""

from __future__ import annotations

import pytest

from jaxctx.errors import InvalidArgument
from jaxctx.v1.generation_pb2 import TokenLogprob, TopLogprob
from jaxctx_server.auth import LOCAL
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.token_pieces import TokenPieces, tokens_of
from jaxctx_server.services import Backend
from tests.server.http.calls import call_of


@pytest.fixture
def call(backend: Backend) -> HttpCall:
    return call_of(backend, LOCAL)


async def test_they_are_asked_for_once(call: HttpCall) -> None:
    pieces = TokenPieces(call, "echo", "1")
    await pieces.load([65, 65, 258])
    assert (pieces[65].text, pieces[65].is_special, pieces[258].is_special) == ("A", False, True)
    again = TokenPieces(call, "echo", "1")
    assert again[65] is pieces[65]
    with pytest.raises(KeyError):
        TokenPieces(call, "echo", "2")[65]


async def test_more_than_are_asked_for_at_once(call: HttpCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxctx_server.http.token_pieces.MAX_ASKED_TOKENS", 100)
    pieces = TokenPieces(call, "echo", "1")
    await pieces.load(range(512))
    assert b"".join(pieces[token].data for token in b"Hello") == b"Hello"
    assert len({pieces[token].data for token in range(512)}) == 512


async def test_what_the_vocabulary_lacks(call: HttpCall) -> None:
    with pytest.raises(InvalidArgument):
        await TokenPieces(call, "echo", "1").load([512])


def test_all_tokens_that_are_named() -> None:
    top = [TopLogprob(token_id=2), TopLogprob(token_id=3)]
    assert tokens_of([TokenLogprob(token_id=1, top=top), TokenLogprob(token_id=3)]) == {1, 2, 3}
