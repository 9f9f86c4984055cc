"""Single tokens as bytes and text, and what a server remembers of them."""

from __future__ import annotations

from jaxctx_server.http.pieces import MAX_MODELS, Piece, PieceCache


def test_a_piece_that_is_no_whole_character() -> None:
    whole, part = Piece("€".encode(), False), Piece(b"\xe2\x82", False)
    assert (whole.text, whole.escaped) == ("€", "€")
    assert (part.text, part.escaped) == (None, r"\xe2\x82")


def test_pieces_are_kept_by_model_and_revision() -> None:
    cache = PieceCache()
    kept = cache.of_model("a", "1")
    assert cache.of_model("a", "1") is kept
    assert cache.of_model("a", "2") is not kept


def test_only_those_of_some_models_are_kept() -> None:
    cache = PieceCache()
    kept = cache.of_model("a", "1")
    for number in range(MAX_MODELS):
        cache.of_model("b", str(number))
    assert cache.of_model("a", "1") is not kept
