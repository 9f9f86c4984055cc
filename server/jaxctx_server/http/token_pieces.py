"""Single tokens as bytes and text, for answers that name tokens. Each is asked for once, also on a router."""

import asyncio
from collections.abc import Iterable

from jaxctx.v1.generation_pb2 import TokenLogprob
from jaxctx.v1.model_service_pb2 import DetokenizeRequest
from jaxctx_server.http.call import HttpCall
from jaxctx_server.http.pieces import Piece

MAX_ASKED_TOKENS = 1000  # at once, so that the event loop goes on in between


class TokenPieces:
    """Pieces of one model, for one request."""

    def __init__(self, call: HttpCall, model_id: str, revision: str) -> None:
        self._call = call
        self._model_id = model_id
        self._known = call.frontend.pieces.of_model(model_id, revision)

    async def load(self, tokens: Iterable[int]) -> None:
        """Ask for the tokens that are not known yet. Raises the errors of Detokenize."""
        missing = [token for token in set(tokens) if token not in self._known]
        for start in range(0, len(missing), MAX_ASKED_TOKENS):
            asked = missing[start : start + MAX_ASKED_TOKENS]
            request = DetokenizeRequest(model_id=self._model_id, tokens=asked, with_pieces=True)
            response = await self._call.unary(self._call.services.models.detokenize, request)
            await asyncio.sleep(0)
            for token, piece in zip(asked, response.pieces, strict=True):
                self._known[token] = Piece(piece.bytes, piece.is_special)

    def __getitem__(self, token: int) -> Piece:
        """A token that was loaded."""
        return self._known[token]


def tokens_of(logprobs: Iterable[TokenLogprob]) -> set[int]:
    """All tokens that log probabilities name."""
    found: set[int] = set()
    for each in logprobs:
        found.add(each.token_id)
        found.update(other.token_id for other in each.top)
    return found
