"""Drafts: tokens that a request is expected to sample, computed beside its next one and kept if they were right.

A step costs the same for any number of rows up to its bucket's; only on a CPU has a single row a cheaper bucket. Rows
that would be padding take guesses: a request whose last tokens stood in its context before is expected to go on as it
did then (prompt lookup decoding, A. Saxena 2023). Every row draws its own token, with the key of its own position; a
draft counts if it is what the row before it drew, and so do drafts before it. So the tokens are those of a run
without drafts, greedy or not, and a wrong guess costs only its row, or that cheaper bucket.

Where a server has a draft model, that guesses where the context has no long repetition to go by. It takes steps of its
own, a round of them before the step that has the guesses (`jaxctx.engine.drafting`).

A guess needs the tokens before it on the host. So no step is sent ahead while there is something to guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.sequences import DraftSequences

MIN_NGRAM_BEFORE_MODEL = 4  # last tokens that must have stood in the context before, where a draft model could guess


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for one request."""

    tokens: Sequence[int]
    by_model: bool = False  # of a draft model, and not by a prompt lookup


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the next step; or how many the draft model must make before, if `to_draft` is not empty."""

    drafts: Mapping[Request, Drafts]
    to_draft: Mapping[Request, int]


NO_PROPOSAL = Proposal({}, {})
NO_DRAFTS = Drafts(())


def propose_drafts(
    ready: Sequence[Request],
    spare_rows: int,
    max_drafts: int,
    min_ngram: int,
    sequences: DraftSequences | None = None,
    drafted: Mapping[Request, Sequence[int]] | None = None,
) -> Proposal:
    """Guesses for decoding requests that are `ready` for a step with so many spare rows; only those that have any.

    `max_drafts`: of one request. `sequences`: of the draft model, if there is one; `drafted`: what it guessed for this
    step, None if it was not asked.
    """
    limit = min(spare_rows, max_drafts)
    proposed = [_propose(request, limit, min_ngram, sequences, drafted) for request in ready]
    shared = share_spare_rows([each.tokens for each in proposed], spare_rows)
    drafts: dict[Request, Drafts] = {}
    to_draft: dict[Request, int] = {}
    for request, whole, tokens in zip(ready, proposed, shared, strict=True):
        if tokens and whole.by_model and drafted is None:
            to_draft[request] = len(tokens)
        elif tokens:
            drafts[request] = Drafts(tokens, whole.by_model)
    return Proposal(drafts, to_draft)


def _propose(
    request: Request,
    limit: int,
    min_ngram: int,
    sequences: DraftSequences | None,
    drafted: Mapping[Request, Sequence[int]] | None,
) -> Drafts:
    """Up to `limit` guesses for one request. Of guesses that the draft model has yet to make only the number counts."""
    lookup = request.prompt_lookup
    if lookup is None:
        return NO_DRAFTS
    count = request.standard_rows_behind(min(limit, request.samples_left - 1))
    by_model: Sequence[int] = ()
    if drafted is not None:
        by_model = drafted.get(request, ())[: max(count, 0)]
    elif sequences is not None:
        by_model = (0,) * sequences.drafts_for(request, count)
    if by_model:
        min_ngram = max(min_ngram, MIN_NGRAM_BEFORE_MODEL)
    guess = lookup.guess(request.context, count, min_ngram)
    return Drafts(guess) if guess or not by_model else Drafts(by_model, by_model=True)


def share_spare_rows(guesses: Sequence[Sequence[int]], rows: int) -> list[Sequence[int]]:
    """The beginning of each guess, so that all together fit into so many rows; each gets about as many rows."""
    shared: list[Sequence[int]] = []
    guessing = sum(1 for guess in guesses if guess)
    for guess in guesses:
        part = guess[: -(-rows // max(guessing, 1))]
        shared.append(part)
        rows -= len(part)
        guessing -= bool(guess)
    return shared
