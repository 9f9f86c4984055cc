"""Drafts: tokens that a request is expected to sample, computed beside its next one and kept if they were right.

A step costs the same for any number of rows up to its bucket's; only on a CPU has a single row a cheaper bucket. Rows
that would be padding take guesses: a request whose last tokens stood in its context before is expected to go on as it
did then (prompt lookup decoding, A. Saxena 2023). Every row draws its own token, with the key of its own position; a
draft counts if it is what the row before it drew, and so do drafts before it. So the tokens are those of a run
without drafts, greedy or not, and a wrong guess costs only its row, or that cheaper bucket.

A guess needs the tokens before it on the host. So no step is sent ahead while there is something to guess.
"""

from collections.abc import Mapping, Sequence

from jaxctx.engine.core.request import Request


def propose_drafts(
    ready: Sequence[Request], spare_rows: int, max_drafts: int, min_ngram: int
) -> Mapping[Request, Sequence[int]]:
    """Guesses for decoding requests that are `ready` for a step with so many spare rows; only those that have any.

    `max_drafts`: of one request.
    """
    limit = min(spare_rows, max_drafts)
    guesses: list[list[int]] = []
    for request in ready:
        lookup = request.prompt_lookup
        count = request.standard_rows_behind(min(limit, request.samples_left - 1))
        guesses.append(lookup.guess(request.context, count, min_ngram) if lookup else [])
    shared = share_spare_rows(guesses, spare_rows)
    return {request: guess for request, guess in zip(ready, shared, strict=True) if guess}


def share_spare_rows(guesses: Sequence[list[int]], rows: int) -> list[list[int]]:
    """The beginning of each guess, so that all together fit into so many rows; each gets about as many rows."""
    shared: list[list[int]] = []
    guessing = sum(1 for guess in guesses if guess)
    for guess in guesses:
        part = guess[: -(-rows // max(guessing, 1))]
        shared.append(part)
        rows -= len(part)
        guessing -= bool(guess)
    return shared
