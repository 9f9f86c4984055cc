"""What is remembered of prompts: how much two have in common, whose they are, and how many there are."""

from __future__ import annotations

import random

import pytest

from jaxctx_server.http.prompt_memory import (
    DIGEST_BYTES,
    MAX_BEGINNINGS,
    MAX_PROMPTS,
    MAX_PROMPTS_OF_TENANT,
    PromptMemory,
    RememberedPrompt,
    common_tokens,
)

PAGE = 16


def prompt(memory: PromptMemory, tokens: list[int], answer_id: str = "a") -> RememberedPrompt:
    span, beginnings = memory.digests_of(tokens, PAGE)
    return RememberedPrompt(answer_id=answer_id, model="m", salt=b"", tools=b"", span=span, beginnings=beginnings)


def tokens(count: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1 << 17) for _ in range(count)]


@pytest.mark.parametrize("changed", [0, 1, 15, 16, 17, 95, 96, 99])
def test_pages_that_two_prompts_have_in_common(changed: int) -> None:
    memory, first = PromptMemory(), tokens(100)
    second = list(first)
    second[changed] += 1
    common = common_tokens(prompt(memory, first), prompt(memory, second))
    assert common == min(changed // PAGE, 100 // PAGE) * PAGE


def test_one_that_goes_on_where_the_other_ends() -> None:
    memory, both = PromptMemory(), tokens(100)
    assert common_tokens(prompt(memory, both[:70]), prompt(memory, both)) == 64
    assert common_tokens(prompt(memory, both[:15]), prompt(memory, both)) == 0
    assert common_tokens(prompt(memory, []), prompt(memory, both)) == 0


def test_what_is_equal_again_behind_a_difference_does_not_count() -> None:
    memory, first = PromptMemory(), tokens(200)
    second = [*tokens(16, seed=1), *first[16:]]
    assert common_tokens(prompt(memory, first), prompt(memory, second)) == 0


def test_a_long_prompt_takes_no_more_room() -> None:
    memory, long = PromptMemory(), tokens(PAGE * MAX_BEGINNINGS * 3)
    remembered = prompt(memory, long)
    assert remembered.span == 4 * PAGE
    assert len(remembered.beginnings) <= MAX_BEGINNINGS * DIGEST_BYTES
    assert remembered.whole_tokens == len(long)
    short = prompt(memory, long[: PAGE * 7])
    assert (short.span, common_tokens(short, remembered)) == (PAGE, PAGE * 4)
    other = list(long)
    other[PAGE * 1001] += 1
    assert common_tokens(remembered, prompt(memory, other)) == PAGE * 1000


def test_the_last_prompt_of_a_key_of_a_tenant() -> None:
    memory = PromptMemory()
    first, second, other = (prompt(memory, [1], each) for each in "abc")
    assert memory.replace("red", "k", first) is None
    assert memory.replace("blue", "k", other) is None
    assert memory.replace("red", "other", other) is None
    assert memory.replace("red", "k", second) is first
    assert memory.replace("red", "k", first) is second
    assert memory.replace("blue", "k", first) is other


def test_what_a_tenant_used_longest_ago_is_forgotten_and_nothing_of_others() -> None:
    memory = PromptMemory()
    mine = prompt(memory, [1])
    memory.replace("blue", "k", mine)
    for number in range(MAX_PROMPTS_OF_TENANT):
        memory.replace("red", str(number), mine)
    assert memory.replace("red", "0", mine) is mine  # used again
    for number in range(MAX_PROMPTS_OF_TENANT - 1):
        memory.replace("red", f"new {number}", mine)
    assert len(memory) == MAX_PROMPTS_OF_TENANT + 1
    assert memory.replace("red", "0", mine) is mine
    assert memory.replace("red", "1", mine) is None
    assert memory.replace("blue", "k", mine) is mine


def test_it_is_bounded_for_all_tenants_together() -> None:
    memory = PromptMemory()
    mine = prompt(memory, [1])
    for number in range(MAX_PROMPTS + 50):
        memory.replace(f"tenant {number}", "k", mine)
    assert len(memory) == MAX_PROMPTS
    assert memory.replace("tenant 60", "k", mine) is mine
    assert memory.replace("tenant 0", "k", mine) is None
    assert len(memory._counts) == MAX_PROMPTS


def test_digests_are_of_one_memory() -> None:
    """Nobody can find tokens that have the digest of others."""
    assert prompt(PromptMemory(), tokens(64)).beginnings != prompt(PromptMemory(), tokens(64)).beginnings
    assert PromptMemory().digest_of("x") != PromptMemory().digest_of("x")


def test_a_key_may_be_any_text() -> None:
    memory = PromptMemory()
    mine = prompt(memory, [1])
    for key in ("", "x" * 100_000, "é\ud800"):
        assert memory.replace("red", key, mine) is None
        assert memory.replace("red", key, mine) is mine
