"""`prompt_logprobs`: how likely each token of a prompt was, in the form that vLLM has.

    [None, {"<token id>": {"logprob": -1.5, "rank": 3, "decoded_token": " sea"}, ...}, ...]

An entry for each token: None for the first one, before which nothing stands; else the token itself, then the most
likely ones. `rank` is 1 for the most likely token, and null for one that is not among those that were asked for.
"""

from typing import Any

from jaxctx.v1.generation_pb2 import TokenLogprob
from jaxctx_server.http.openai.logprobs import finite
from jaxctx_server.http.openai.outputs import Prompt
from jaxctx_server.http.openai.request import SharedOptions
from jaxctx_server.http.token_pieces import TokenPieces

Json = dict[str, Any]


def prompt_logprobs(prompt: Prompt, pieces: TokenPieces, shared: SharedOptions) -> list[Json | None]:
    """The entries of a prompt that was scored. Its tokens, and those that are told beside them, are in `pieces`."""
    if prompt.scoring is None or shared.prompt_logprobs is None:
        raise ValueError("the prompt was not scored")
    top, as_ids = shared.prompt_logprobs, shared.tokens_as_ids
    return [None, *[entry(each, pieces, top, as_ids=as_ids) for each in prompt.scoring.logprobs]]


def entry(each: TokenLogprob, pieces: TokenPieces, top: int, *, as_ids: bool) -> Json:
    """One token of a prompt and the `top` most likely ones at its place."""
    likely = each.top[:top]
    ranks = {other.token_id: rank for rank, other in enumerate(likely, start=1)}
    logprobs = {each.token_id: each.logprob, **{other.token_id: other.logprob for other in likely}}
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": ranks.get(token),
            "decoded_token": f"token_id:{token}" if as_ids else pieces[token].data.decode(errors="replace"),
        }
        for token, logprob in logprobs.items()
    }
