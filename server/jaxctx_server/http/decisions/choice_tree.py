"""Choices as a tree of their tokens, and probabilities out of the model's log probabilities.

yes          (root) ─┬─ yes                     nodes: the beginnings after which a token of a choice comes
no                   └─ no ── t ─┬─ sure        here "no" and "no t"; the root is the end of the question
not sure                         └─ known
not known
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Tokens: TypeAlias = tuple[int, ...]
NextLogprobs: TypeAlias = Mapping[Tokens, Mapping[int, float]]
"""By the beginning of a choice, () for none: the log probability of each token that comes next in some choice."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """The beginning of one or more choices, which has at least one token more in each of them."""

    tokens: Tokens  # from the first token of the choice on
    ancestors: tuple[int, ...]  # indexes of the nodes of its own beginnings, the shortest one first
    next_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """What has to be computed so that every choice can be scored."""

    first_tokens: tuple[int, ...]  # of the choices
    nodes: tuple[TreeNode, ...]  # each behind its ancestors


def make_choice_tree(choices: Sequence[Tokens]) -> ChoiceTree:
    """The tree of choices, each of one token or more."""
    following: dict[Tokens, dict[int, None]] = {}  # the inner dict is an ordered set
    for choice in choices:
        for length, token in enumerate(choice):
            following.setdefault(choice[:length], {})[token] = None
    nodes: list[TreeNode] = []
    indexes: dict[Tokens, int] = {}
    # Depth first: then most beginnings stand in a row, and take few ranges of an attention mask.
    waiting: list[Tokens] = [(token,) for token in reversed(following[()])]
    while waiting:
        tokens = waiting.pop()
        if tokens not in following:
            continue  # the end of a choice: what follows it is of no interest
        next_tokens = tuple(following[tokens])
        ancestors = tuple(indexes[tokens[:length]] for length in range(1, len(tokens)))
        indexes[tokens] = len(nodes)
        nodes.append(TreeNode(tokens, ancestors, next_tokens))
        waiting += [(*tokens, token) for token in reversed(next_tokens)]
    return ChoiceTree(tuple(following[()]), tuple(nodes))


def choice_logprobs(choices: Sequence[Tokens], next_logprobs: NextLogprobs) -> list[float]:
    """For each choice the log probability that the text begins with it, and goes on as no longer choice.

    So the choices exclude each other, also where one is the beginning of another. No two are equal.
    """
    begins = [sum(next_logprobs[choice[:length]][token] for length, token in enumerate(choice)) for choice in choices]
    places = {choice: place for place, choice in enumerate(choices)}
    longer: list[list[int]] = [[] for _ in choices]  # of each choice, the next longer ones
    for place, choice in enumerate(choices):
        for length in range(len(choice) - 1, 0, -1):
            if choice[:length] in places:
                longer[places[choice[:length]]].append(place)
                break
    return [
        without(logprob, [begins[other] for other in others]) for logprob, others in zip(begins, longer, strict=True)
    ]


def without(logprob: float, parts: Sequence[float]) -> float:
    """The logarithm of a probability less those of some of its parts."""
    if not parts or logprob == -math.inf:
        return logprob
    share = sum(math.exp(part - logprob) for part in parts)
    return logprob + math.log1p(-share) if share < 1 else -math.inf  # 1 or a little more: by rounding


def normalised(logprobs: Sequence[float]) -> list[float]:
    """Probabilities in these proportions, 1 in all. Equal ones if the model gives none of them any."""
    highest = max(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
