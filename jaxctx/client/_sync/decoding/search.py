# Generated from jaxctx/client/decoding/search.py by scripts/stubs. Not edited by hand.
"""Search for likely continuations by forking: best of n, beam search. Forks that lose are closed."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from jaxctx.client._sync.context import Context
from jaxctx.client._sync.decoding import continuing
from jaxctx.client.gathering import in_turn
from jaxctx.client.options import ForwardOutputOptions, GenerateOptions
from jaxctx.client.streams import Completion
from jaxctx.errors import InvalidArgument


def likelihood(completion: Completion[Any]) -> float:
    """The sum of the log probabilities of an output's tokens."""
    return sum(each.logprob for each in completion.logprobs)


def best_of(
    context: Context,
    n: int,
    *,
    score: Callable[[Completion[Any]], float] = likelihood,
    **options: Unpack[GenerateOptions],
) -> Completion[Context]:
    """The best of n >= 2 outputs, in a fork of its own; the other forks are closed. Options are those of `generate`.

    If `score` raises, all forks are closed.
    """
    if n < 2:
        raise InvalidArgument.field("n", "must be at least 2")
    options["logprobs"] = True
    outputs = context.completions(n, **options)
    unwanted = [each.context for each in outputs]
    try:
        best = max(outputs, key=score)
        unwanted.remove(best.context)
        return best
    finally:
        in_turn([each.close() for each in unwanted])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One continuation of the prompt. Its last token is not computed yet."""

    context: Context
    tokens: tuple[int, ...]
    logprob: float  # of all tokens together


def beam_search(context: Context, *, width: int, max_tokens: int, stop_token_ids: Sequence[int] = ()) -> Beam:
    """The most likely continuation that up to `width` (1 to 64) beams find, in a fork of its own.

    A beam ends at a stop token or after `max_tokens`. The context itself stays as it is.
    """
    for name, value in (("width", width), ("max_tokens", max_tokens)):
        if value < 1:
            raise InvalidArgument.field(name, "must be at least 1")
    opened = context.fork()
    try:
        prompt = continuing.begin(opened[0])
        live: list[Beam] = [Beam(context=opened[0], tokens=(), logprob=0.0)]
        best: list[Beam] = []  # the likeliest one that has ended, if any has
        for _ in range(max_tokens):
            asked = [ForwardOutputOptions(top=width)]
            passes = [beam.context.forward([*prompt[-1:], *beam.tokens][-1:], outputs=asked) for beam in live]
            results = in_turn(passes)
            longer = [
                dataclasses.replace(beam, tokens=(*beam.tokens, token), logprob=beam.logprob + logprob)
                for beam, result in zip(live, results, strict=True)
                for token, logprob in result.outputs[0].top
            ]
            live = _with_own_contexts(_likeliest(longer, best, width, stop_token_ids), opened)
            if live and live[-1].tokens[-1] in stop_token_ids:
                best = [live.pop()]
            held = {beam.context.id for beam in (*live, *best)}
            in_turn([each.close() for each in opened if each.id not in held])
            if not live:
                break
        found = max((*best, *live), key=lambda beam: beam.logprob)
        continuing.end(found.context, [*prompt, *found.tokens])
        opened.remove(found.context)
        return found
    finally:
        in_turn([each.close() for each in opened])


def _likeliest(beams: list[Beam], best: list[Beam], width: int, stop_token_ids: Sequence[int]) -> list[Beam]:
    """Up to `width` beams that are more likely than the best ended one, most likely first, up to the first that ends.

    Beams only become less likely as they grow, so no beam after one that ends can still win.
    """
    likeliest: list[Beam] = []
    for beam in sorted(beams, key=lambda beam: -beam.logprob)[:width]:
        if best and beam.logprob <= best[0].logprob:
            break
        likeliest.append(beam)
        if beam.tokens[-1] in stop_token_ids:
            break
    return likeliest


def _with_own_contexts(beams: list[Beam], opened: list[Context]) -> list[Beam]:
    """The same beams, each with a context of its own: of several that share one, the first keeps it, others fork it."""
    taken: set[str] = set()
    apart = []
    for beam in beams:
        context = beam.context
        if context.id in taken:
            (context,) = context.fork()
            opened.append(context)
        taken.add(context.id)
        apart.append(dataclasses.replace(beam, context=context))
    return apart
