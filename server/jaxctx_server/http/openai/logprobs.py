"""Log probabilities of tokens, in the forms of the two APIs.

Their tokens are named by their texts; one that is only a part of a character is named by its bytes, as
`bytes:\\xe2\\x82` in completions and `\\xe2\\x82` in chat. What is not a number in JSON, minus infinity, is -9999.
"""

import codecs
from collections.abc import Iterable
from typing import Any

from jaxctx.v1.generation_pb2 import TokenLogprob
from jaxctx_server.http.pieces import Piece
from jaxctx_server.http.token_pieces import TokenPieces

LEAST = -9999.0
BYTES_PREFIX = "bytes:"

Json = dict[str, Any]


def finite(logprob: float) -> float:
    """A log probability that JSON can hold."""
    return max(logprob, LEAST)


class CompletionLogprobs:
    """The log probabilities of one output of a completion: lists with an entry for each token.

    `text_offset` is where the text of a token begins in that of the output, which begins with the prompt if that is
    told too. A token of which nothing is in the text begins where the next one does.
    """

    def __init__(
        self, pieces: TokenPieces, *, top: int, as_ids: bool, shows_special_tokens: bool, drops_space: bool = False
    ) -> None:
        """`top`: how many of the most likely tokens are told beside each. `as_ids`: tokens are named "token_id:5".
        `drops_space`: the text lacks the space before its first token.
        """
        self._pieces = pieces
        self._most = top
        self._as_ids = as_ids
        self._shows_special_tokens = shows_special_tokens
        self._offset = -1 if drops_space else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def first(self, token: int) -> Json:
        """The lists of the first token of a prompt, before which nothing stands."""
        lists = empty_lists()
        self._begin(lists, token)
        lists["token_logprobs"].append(None)
        lists["top_logprobs"].append(None)
        return lists

    def of(self, logprobs: Iterable[TokenLogprob]) -> Json:
        """The lists of the next tokens."""
        lists = empty_lists()
        for each in logprobs:
            self._begin(lists, each.token_id)
            lists["token_logprobs"].append(finite(each.logprob))
            lists["top_logprobs"].append(self._top(each))
        return lists

    def _begin(self, lists: Json, token: int) -> None:
        piece = self._pieces[token]
        lists["tokens"].append(self._name(token))
        lists["text_offset"].append(max(self._offset, 0))
        if self._shows_special_tokens or not piece.is_special:
            self._offset += len(self._decoder.decode(piece.data))

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        """The most likely tokens and the token itself; of tokens with the same text the most likely one counts."""
        top: dict[str, float] = {}
        for other in each.top[: self._most]:
            top.setdefault(self._name(other.token_id), finite(other.logprob))
        top.setdefault(self._name(each.token_id), finite(each.logprob))
        return top

    def _name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        piece = self._pieces[token]
        return BYTES_PREFIX + piece.escaped if piece.text is None else piece.text


def empty_lists() -> Json:
    """The lists of no tokens."""
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def extend_lists(lists: Json, more: Json) -> None:
    """Append the lists of further tokens."""
    for name, values in more.items():
        lists[name] += values


def chat_logprobs(pieces: TokenPieces, logprobs: Iterable[TokenLogprob], *, as_ids: bool) -> list[Json]:
    """The log probabilities of tokens of a chat answer: an object for each token."""
    return [
        {
            **chat_token(pieces, each.token_id, each.logprob, as_ids=as_ids),
            "top_logprobs": [chat_token(pieces, other.token_id, other.logprob, as_ids=as_ids) for other in each.top],
        }
        for each in logprobs
    ]


def chat_token(pieces: TokenPieces, token: int, logprob: float, *, as_ids: bool) -> Json:
    """One token."""
    piece: Piece = pieces[token]
    name = f"token_id:{token}" if as_ids else piece.escaped
    return {"token": name, "bytes": list(piece.data), "logprob": finite(logprob)}
