"""What sequences say of their pages, against a device that is a table of what was written where."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxctx.cache.block_manager import BlockManager
from jaxctx.cache.context_cache import ContextCache, Identity
from jaxctx.engine.config import EngineConfig
from jaxctx.engine.core.request import NO_SLOT, Request
from jaxctx.engine.drafting.pace import DraftPace
from jaxctx.engine.drafting.sequences import MAX_ROWS_BEHIND, DraftRows, DraftSequences
from jaxctx.engine.interface import Caller
from tests.jaxctx.cache.invariants import check


class Served:
    """The served model's side: contexts whose requests run."""

    def __init__(self, page_size: int = 4) -> None:
        ids = itertools.count()
        self.cache = ContextCache(BlockManager(4096, page_size), lambda: 0.0, lambda: f"c{next(ids)}")

    def request(self, tokens: list[int], *, adapter: str = "", tenant: str = "", max_tokens: int = 1000) -> Request:
        context = self.cache.create(Identity(tenant, "served", adapter), tenant=tenant)
        self.cache.append(context, tokens)
        output: Any = SimpleNamespace(max_tokens=max_tokens, tokens=0)
        reply: Any = None
        return Request(context, Caller(tenant), reply, output, draft_pace=DraftPace(), slot=0)

    def append(self, request: Request, tokens: list[int]) -> None:
        self.cache.append(request.context, tokens)


class Device:
    """What was written where, and that each row sees the tokens before it."""

    def __init__(self, sequences: DraftSequences) -> None:
        self.sequences = sequences
        self.written: dict[int, tuple[int, int]] = {}  # by slot: token and position

    def send(self, rows: list[DraftRows]) -> None:
        size, slots = self.sequences.config.page_size, set()
        tables = [each.context.page_table() for each in rows]
        for each, table in zip(rows, tables, strict=True):
            for row, token in enumerate(each.tokens):
                position = each.position + row
                slot = int(table[position // size]) * size + position % size
                assert slot not in slots, "two rows of a step write to one place"
                slots.add(slot)
                self.written[slot] = int(token), position
        for each, table in zip(rows, tables, strict=True):
            end = each.position + len(each.tokens)
            for position, token in enumerate(each.context.tokens()[:end].tolist()):
                slot = int(table[position // size]) * size + position % size
                assert self.written.get(slot) == (token, position)

    def guess(self, rows: DraftRows, guesses: list[int]) -> None:
        """The steps behind the first one: all guesses but the last are written behind the tokens."""
        for number, guess in enumerate(guesses[:-1]):
            self.send_guess(rows, rows.context.length + number, guess)

    def send_guess(self, rows: DraftRows, position: int, guess: int) -> None:
        table, size = rows.context.page_table(), self.sequences.config.page_size
        self.written[int(table[position // size]) * size + position % size] = guess, position


def make(pages: int = 64, page_size: int = 4, **settings: int) -> DraftSequences:
    sizes = {"max_batch": 4, "max_batch_tokens": 24, "max_context_tokens": 200, **settings}
    return DraftSequences(EngineConfig(pages=pages, page_size=page_size, **sizes), "small", 1000)


def follow(sequences: DraftSequences, device: Device, request: Request) -> None:
    """Catch up with a request wholly."""
    while sequences.wants_to_follow(request):
        rows = sequences.catch_up([request])
        if not rows:
            break
        device.send(rows)
        sequences.mark_sent(rows)


@pytest.mark.parametrize(("page_size", "pages"), [(1, 150), (2, 80), (3, 60), (16, 12)])
def test_random_requests_see_their_tokens_and_no_others(page_size: int, pages: int) -> None:
    rng, served = random.Random(page_size), Served(page_size)
    sequences = make(pages, page_size)
    device = Device(sequences)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 60))] for _ in range(3)]
    running: list[Request] = []
    drafted = accepted = full = 0
    for _ in range(600):
        sequences.end_unused()
        if len(running) < 6 and rng.random() < 0.2:
            prompt = rng.choice(prompts)
            running.append(served.request([*prompt[: rng.randint(1, len(prompt))], *prompt[:5]]))
        if running and rng.random() < 0.1:
            running.pop(rng.randrange(len(running))).slot = NO_SLOT
            continue
        rows = sequences.catch_up([each for each in running if sequences.wants_to_follow(each)])
        assert sum(len(each.tokens) for each in rows) <= sequences.config.max_batch_tokens
        device.send(rows)
        sequences.mark_sent(rows)
        wanted = {each: count for each in running if (count := sequences.drafts_for(each, rng.randint(0, 6)))}
        begun = {each: sequences.begin_drafts(each, count, 24) for each, count in wanted.items()}
        full += sum(rows is None for rows in begun.values())
        device.send([rows for rows in begun.values() if rows is not None])
        sequences.mark_sent([rows for rows in begun.values() if rows is not None])
        for request, rows in begun.items():
            if rows is None:
                continue
            guesses = [rng.randrange(3) for _ in range(wanted[request])]
            device.guess(rows, guesses)
            sequences.end_drafts(request, request.context.length, guesses)
            right = rng.randint(0, len(guesses))
            served.append(request, [*guesses[:right], rng.randrange(3)])
            drafted, accepted = drafted + len(guesses), accepted + right
        for request in running:
            if rng.random() < 0.3 and request not in begun:
                served.append(request, [rng.randrange(3) for _ in range(rng.randint(1, 3))])
        check(sequences.cache)
    assert drafted > accepted > 50
    assert full or sequences.block_manager.index.cached  # the pool was in use
    for request in running:
        request.slot = NO_SLOT
    sequences.end_unused()
    check(sequences.cache)
    assert sequences.block_manager.available == pages


def test_a_prompt_is_computed_in_pieces_but_for_its_last_token() -> None:
    served, sequences = Served(), make()
    request = served.request([*range(60)])
    sizes = []
    while rows := sequences.catch_up([request]):
        sizes.append(len(rows[0].tokens))
        sequences.mark_sent(rows)
    assert sizes == [24, 24, 11]
    assert not sequences.wants_to_follow(request)
    assert sequences.drafts_for(request, 15) == 4
    rows = sequences.begin_drafts(request, 4, 24)
    assert (rows.position, rows.tokens.tolist()) == (59, [59])


def test_there_are_no_guesses_while_too_much_is_left() -> None:
    served, sequences = Served(), make()
    request = served.request([*range(24 + MAX_ROWS_BEHIND + 2)])
    assert sequences.drafts_for(request, 4) == 0  # it has no sequence
    sequences.mark_sent(sequences.catch_up([request]))
    assert sequences.drafts_for(request, 4) == 0
    sequences.mark_sent(sequences.catch_up([request]))
    assert sequences.drafts_for(request, 4) == 4
    assert sequences.begin_drafts(request, 4, 0) is None  # no rows left in the step


@pytest.mark.parametrize(
    ("drawn", "position", "tokens"),
    [
        ([1, 2, 9], 12, [9]),
        ([1, 2], 11, [2]),  # the last token is computed again: the next guess is drawn behind it
        ([9], 10, [9]),
        ([1, 2, 3, 4, 5], 13, [4, 5]),  # nothing was computed behind the last guess
    ],
)
def test_guesses_that_were_drawn_need_no_rows(drawn: list[int], position: int, tokens: list[int]) -> None:
    served, sequences = Served(), make()
    device = Device(sequences)
    request = served.request([*range(10)])
    follow(sequences, device, request)
    rows = sequences.begin_drafts(request, 4, 24)
    device.send([rows])
    sequences.mark_sent([rows])
    device.guess(rows, [1, 2, 3, 4])
    sequences.end_drafts(request, 10, [1, 2, 3, 4])
    served.append(request, drawn)
    rows = sequences.begin_drafts(request, 2, 24)
    assert (rows.position, rows.tokens.tolist()) == (position, tokens)
    device.send([rows])


def test_a_full_pool_ends_a_sequence_and_makes_a_pause() -> None:
    served, sequences = Served(), make(pages=6)
    first, second = served.request([*range(20)]), served.request([50, *range(1, 20)])
    device = Device(sequences)
    follow(sequences, device, first)
    assert sequences.catch_up([second]) == []
    assert not sequences.wants_to_follow(second)
    assert sequences.begin_drafts(first, 15, 24) is None  # 20 tokens and 14 guesses: nine pages
    assert not sequences.wants_to_follow(first)
    assert sequences.block_manager.available == 6
    check(sequences.cache)


def test_more_requests_than_it_drafts_for_have_no_sequence() -> None:
    served, sequences = Served(), make(max_batch=2)
    requests = [served.request([number, 1, 2]) for number in range(3)]
    assert len(sequences.catch_up(requests)) == 2
    requests[0].slot = NO_SLOT
    sequences.end_unused()
    assert len(sequences.catch_up(requests[2:])) == 1


def test_a_new_run_of_a_request_has_a_new_sequence() -> None:
    served, sequences = Served(), make()
    request = served.request([*range(10)])
    sequences.mark_sent(sequences.catch_up([request]))
    request.run_number += 1  # preempted, and admitted again
    sequences.end_unused()
    assert sequences.drafts_for(request, 4) == 0
    (rows,) = sequences.catch_up([request])
    assert rows.position == 8  # two pages were found again


@pytest.mark.parametrize(("adapter", "tenant", "found"), [("", "", 12), ("a", "", 12), ("", "another", 0)])
def test_pages_are_shared_within_a_tenant_whatever_the_adapter(adapter: str, tenant: str, found: int) -> None:
    served, sequences = Served(), make()
    sequences.mark_sent(sequences.catch_up([served.request([*range(14)])]))
    (rows,) = sequences.catch_up([served.request([*range(15)], adapter=adapter, tenant=tenant)])
    assert rows.position == found


def test_requests_that_it_never_follows() -> None:
    served, sequences = Served(), make()
    undrafted = served.request([1, 2])
    undrafted.draft_pace = None
    moved = served.request([])
    served.cache.append(moved.context, [1, 2], [b"", b"\0" * 12])
    for request in (undrafted, moved, served.request([*range(201)]), served.request([1, 2], max_tokens=1)):
        assert not sequences.wants_to_follow(request)
        assert sequences.drafts_for(request, 4) == 0


@pytest.mark.parametrize("token", [999, 1000])
def test_there_are_no_guesses_behind_a_token_without_a_row(token: int) -> None:
    """Whether it is in the prompt or is drawn. The served model has more rows, for an image."""
    served, sequences = Served(), make()
    prompted, drawn = served.request([1, token, 2]), served.request([3, 4, 5])
    follow(sequences, Device(sequences), prompted)
    follow(sequences, Device(sequences), drawn)
    assert sequences.drafts_for(drawn, 4) == 4
    served.append(drawn, [token, 6])
    for request in (prompted, drawn):
        assert (sequences.drafts_for(request, 4) > 0) == (token < 1000)
        assert (sequences.begin_drafts(request, 4, 24) is None) == (token >= 1000)
    if token >= 1000:
        assert sequences.catch_up([prompted, drawn]) == []
        assert not sequences.wants_to_follow(prompted)
        assert not sequences.wants_to_follow(drawn)
        assert sequences.block_manager.stats().pages_held == 0


def test_guesses_end_at_the_longest_context() -> None:
    served, sequences = Served(), make()
    request = served.request([*range(198)])
    follow(sequences, Device(sequences), request)
    assert sequences.drafts_for(request, 15) == 3  # the KV of two of them still has a place
    served.append(request, [1, 2, 3])
    assert sequences.drafts_for(request, 15) == 0
    sequences.end_unused()
    assert sequences.block_manager.stats().pages_held == 0


def test_tokens_are_int32() -> None:
    served, sequences = Served(), make()
    (rows,) = sequences.catch_up([served.request([1, 2, 3])])
    assert rows.tokens.dtype == np.int32
