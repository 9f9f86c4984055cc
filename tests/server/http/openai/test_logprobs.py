"""Log probabilities: of outputs and of prompts they are the model's own, and tokens have their texts."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

import jaxctx
from jaxctx.v1.generation_pb2 import TokenLogprob, TopLogprob
from jaxctx_server.http.openai.logprobs import CompletionLogprobs, chat_logprobs
from jaxctx_server.http.pieces import Piece
from tests.echo import echo_logprobs, echo_text
from tests.server.http.openai.harness import GREEDY, PROMPT

EURO = "€".encode()


class Pieces(dict[int, Piece]):
    """Pieces that a test has chosen."""


def pieces_of(*pieces: bytes, special: int | None = None) -> Any:
    return Pieces({token: Piece(data, token == special) for token, data in enumerate(pieces)})


def logprob(token: int, value: float = -1.0, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(
        token_id=token, logprob=value, top=[TopLogprob(token_id=other, logprob=each) for other, each in top]
    )


def written(pieces: Any, *logprobs: TokenLogprob, **options: Any) -> Any:
    defaults: Any = {"top": 20, "as_ids": False, "shows_special_tokens": False}
    return CompletionLogprobs(pieces, **{**defaults, **options}).of(logprobs)


class TestCompletions:
    def test_parts_of_a_character_are_named_by_their_bytes(self) -> None:
        pieces = pieces_of(b"a ", EURO[:2], EURO[2:], b"b")
        lists = written(pieces, *map(logprob, range(4)))
        assert lists["tokens"] == ["a ", r"bytes:\xe2\x82", r"bytes:\xac", "b"]
        assert lists["text_offset"] == [0, 2, 2, 3]

    def test_a_special_token_takes_no_place_in_the_text(self) -> None:
        pieces = pieces_of(b"<s>", b"a", special=0)
        assert written(pieces, logprob(0), logprob(1))["text_offset"] == [0, 0]
        assert written(pieces, logprob(0), logprob(1), shows_special_tokens=True)["text_offset"] == [0, 3]

    def test_the_space_that_a_text_lacks_is_not_counted(self) -> None:
        lists = written(pieces_of(b" a", b" b"), logprob(0), logprob(1), drops_space=True)
        assert lists["text_offset"] == [0, 1]

    def test_the_token_itself_is_among_the_most_likely_ones(self) -> None:
        lists = written(pieces_of(b"a", b"b", b"a"), logprob(1, -3.0, (0, -0.1), (2, -2.0)))
        assert lists["top_logprobs"] == [{"a": -0.1, "b": -3.0}]

    def test_what_json_cannot_hold(self) -> None:
        lists = written(pieces_of(b"a"), logprob(0, -math.inf, (0, -math.inf)))
        assert (lists["token_logprobs"], lists["top_logprobs"]) == ([-9999.0], [{"a": -9999.0}])

    def test_ids_instead_of_texts(self) -> None:
        lists = written(pieces_of(b"a"), logprob(0, -1.0, (0, -1.0)), as_ids=True)
        assert (lists["tokens"], lists["top_logprobs"]) == (["token_id:0"], [{"token_id:0": -1.0}])


def test_a_chat_has_bytes() -> None:
    (told,) = chat_logprobs(pieces_of(EURO[:2], b"a"), [logprob(0, -2.0, (1, -0.5))], as_ids=False)
    assert told == {
        "token": r"\xe2\x82",
        "bytes": [0xE2, 0x82],
        "logprob": -2.0,
        "top_logprobs": [{"token": "a", "bytes": [97], "logprob": -0.5}],
    }


async def alone(client: jaxctx.aio.Client, ids: list[int], tokens: int) -> Any:
    """An output that a context gives, with log probabilities."""
    async with await client.create(tokens=ids, salt="alone") as context:
        return await context.complete(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=2)


@pytest.mark.parametrize("streams", [False, True])
async def test_of_a_completion(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, streams: bool) -> None:
    ids = await client.tokenize(PROMPT)
    expected = await alone(client, ids, 9)
    asked: Any = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 2, **GREEDY}
    if streams:
        choices = [each.choices[0] async for each in await api.completions.create(stream=True, **asked)]
    else:
        choices = (await api.completions.create(**asked)).choices
    lists = [choice.logprobs for choice in choices if choice.logprobs is not None]
    found = [value for each in lists for value in each.token_logprobs or []]
    assert found == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-4)
    tops = [sorted(top.values()) for each in lists for top in each.top_logprobs or []]
    assert [top[-1] for top in tops] == found  # greedy
    offsets = [offset for each in lists for offset in each.text_offset or []]
    assert offsets == sorted(offsets)
    assert len(offsets) == 9


@pytest.mark.parametrize("streams", [False, True])
async def test_of_a_chat(api: openai.AsyncOpenAI, streams: bool) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **GREEDY}
    asked |= {"logprobs": True, "top_logprobs": 2}
    if streams:
        choices = [each.choices[0] async for each in await api.chat.completions.create(stream=True, **asked)]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choices = (await api.chat.completions.create(**asked)).choices
        text = choices[0].message.content
    told = [each for choice in choices if choice.logprobs for each in choice.logprobs.content or []]
    assert len(told) == 9
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob == each.logprob for each in told)
    assert b"".join(bytes(each.bytes or []) for each in told).decode(errors="replace").startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("kind", ["text", "tokens"])
async def test_of_a_prompt(api: openai.AsyncOpenAI, client: jaxctx.aio.Client, max_tokens: int, kind: str) -> None:
    """As evaluation harnesses ask: `echo` and `logprobs`. Longer than what is computed at once."""
    text = PROMPT * 4
    ids = list(await client.tokenize(text))
    assert len(ids) > 256
    prompt: Any = text if kind == "text" else [ids]
    answer = await api.completions.create(prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, **GREEDY)
    (choice,) = answer.choices
    lists = choice.logprobs
    assert lists is not None
    assert lists.token_logprobs is not None
    assert lists.top_logprobs is not None
    assert lists.tokens is not None
    assert lists.text_offset is not None
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(ids) + max_tokens
    assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
    for place in (1, 2, 100, 255, 256, 257, len(ids) - 1):
        expected = echo_logprobs(ids[:place])
        assert lists.token_logprobs[place] == pytest.approx(expected[ids[place]], abs=1e-4)
        assert max(lists.top_logprobs[place].values()) == pytest.approx(max(expected), abs=1e-4)
    assert choice.text.startswith(text)
    for place in (0, 5, len(ids) - 1):
        assert choice.text[lists.text_offset[place] :].startswith(lists.tokens[place])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), max_tokens)
    if max_tokens:
        alike = await alone(client, ids, max_tokens)
        expected_output = [each.logprob for each in alike.logprobs]
        assert lists.token_logprobs[len(ids) :] == pytest.approx(expected_output, abs=1e-4)
        assert choice.text[len(text) :] == str(alike)


async def test_the_most_likely_token_is_exactly_as_likely_as_the_most_likely_one(
    api: openai.AsyncOpenAI, client: jaxctx.aio.Client
) -> None:
    """Evaluation harnesses tell by that whether a continuation is greedy."""
    ids = list(await client.tokenize(PROMPT))
    greedy = [*ids, *(await alone(client, ids, 20)).token_ids]
    (choice,) = (await api.completions.create(prompt=greedy, max_tokens=0, echo=True, logprobs=1, **GREEDY)).choices
    assert choice.logprobs is not None
    likely = [max(top.values()) for top in (choice.logprobs.top_logprobs or [])[len(ids) :]]
    assert (choice.logprobs.token_logprobs or [])[len(ids) :] == likely
    assert len(likely) == 20


async def test_of_many_prompts_with_several_outputs(api: openai.AsyncOpenAI, client: jaxctx.aio.Client) -> None:
    prompts = [list(await client.tokenize(f"{number}: {PROMPT}")) for number in range(5)]
    asked: Any = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2, **GREEDY}
    answer = await api.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == list(range(10))
    for choice in answer.choices:
        ids = prompts[choice.index // 2]
        lists = choice.logprobs
        assert lists is not None
        assert lists.token_logprobs is not None
        assert len(lists.token_logprobs) == len(ids) + 1
        assert lists.token_logprobs[-2] == pytest.approx(echo_logprobs(ids[:-1])[ids[-1]], abs=1e-4)
    parts: dict[int, list[float | None]] = {index: [] for index in range(10)}
    async for each in await api.completions.create(stream=True, **asked):
        for part in each.choices:
            assert part.logprobs is not None
            parts[part.index] += part.logprobs.token_logprobs or []
    whole = {choice.index: choice.logprobs and choice.logprobs.token_logprobs for choice in answer.choices}
    assert parts == whole


async def test_of_one_token(api: openai.AsyncOpenAI) -> None:
    answer = await api.completions.create(prompt=[65], max_tokens=1, echo=True, logprobs=1, **GREEDY)
    lists = answer.choices[0].logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.token_logprobs is not None
    assert lists.tokens[0] == echo_text().tokenizer.decode([65])
    assert lists.token_logprobs == [None, pytest.approx(max(echo_logprobs([65])), abs=1e-4)]
